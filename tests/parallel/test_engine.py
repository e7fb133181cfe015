"""Updates through DeepSpeed's engine on several ranks equal those of one process: loss, norm, weights, optimizer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore

from src.core.types import SampleSpec
from src.models.sampler import Sampler
from src.models.schedule import flow_match_schedule
from src.models.steps import FlowSDE
from src.parallel.engine import EngineUpdater, engine_config, prepare_deepspeed
from src.parallel.families import parallelize
from src.parallel.group import connect_store
from src.parallel.mesh import FixedWorld, Mesh
from src.parallel.ulysses import SequenceGroup
from src.parallel.updater import LocalUpdater
from src.rl.loss import ClippedLoss, LossSums
from src.rl.policy_gradient import PolicyGradient, TrainingSet
from src.rl.rollouts import Pairs, Rollouts
from tests.models.lively import lively_adapter
from tests.parallel.ranks import Rank, RankPool, largest_difference

SAMPLES, UPDATES = 5, 3
SPEC = SampleSpec(4, (0, 2))
PAIRS = Pairs.of([(row, slot) for row in range(SAMPLES) for slot in range(2)])
optimizer_of = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.01)
"""With Adam's usual eps, elements whose gradient is all rounding would move by the learning rate, either way."""


class Trained:
    """A tiny model with its loss. Ten pairs in micro-batches of three: uneven on any number of ranks."""

    def __init__(self, *, lora: bool = False) -> None:
        self.adapter = lively_adapter()
        if lora:
            from src.models.lora import apply_lora

            apply_lora(self.adapter.transformer, rank=2, alpha=4, target_modules=["to_q", "to_v"])
        sampler = Sampler(
            adapter=self.adapter,
            rule=FlowSDE(noise_level=0.7),
            schedule_for=flow_match_schedule,
            noise_steps=4,
            batch_size=SAMPLES,
        )
        self.policy = PolicyGradient(sampler=sampler, loss=ClippedLoss(clip_range=0.5), reference=None, micro_batch=3)
        cond = self.adapter.encode(["abcd", "d", "ab", "cba", "b"])
        path = sampler.sample(range(SAMPLES), cond, SPEC).trajectory
        rollouts = Rollouts(
            instances_B=(0,) * SAMPLES,
            seeds_B=tuple(range(SAMPLES)),
            rewards_B=(0.0,) * SAMPLES,
            scores_B=({},) * SAMPLES,
            fingerprints_B=("test",) * SAMPLES,
            before_BSLC=path.before_BSLC,
            after_BSLC=path.after_BSLC,
            log_probs_BS=path.log_probs_BS,
            failed=0,
        )
        self.data = TrainingSet(rollouts, cond, SPEC, torch.linspace(-1, 1.5, SAMPLES), path.log_probs_BS)
        self.losses: list[float] = []
        self.norms: list[float] = []

    @property
    def transformer(self) -> nn.Module:
        return self.adapter.transformer

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.transformer.parameters() if p.requires_grad]

    def log_probs(self) -> Tensor:
        return self.policy.log_probs(self.data.rollouts, self.data.cond, SPEC, range(SAMPLES))

    def train(self, updater: Any, updates: range, *, poison: int | None = None) -> None:
        """Runs the updates; the gradient of update `poison` is not a number."""
        for update in updates:
            scale = math.nan if update == poison else 1 / len(PAIRS)

            def closure(scale: float = scale) -> LossSums:
                ranks = updater.snapshot
                sums = self.policy.backward(
                    self.data, PAIRS, scale=scale, backward=updater.backward, rank=ranks.dp_rank, ranks=ranks.dp
                )
                return LossSums(updater.total(sums.sums_XT))

            norm, total = updater.apply(update, closure)
            self.norms.append(norm)
            self.losses.append(total.means()["policy_loss"])

    def outcome(self, updater: Any) -> dict[str, Any]:
        tensors, scalars = updater.state(dict(self.transformer.named_parameters()))
        return {
            "weights": self.adapter.trainable_state(),
            "losses": self.losses,
            "norms": self.norms,
            "log_probs": self.log_probs(),
            "optimizer": tensors,
            "scalars": scalars,
            "skipped": updater.skipped,
        }


def alone(updates: range = range(UPDATES), *, lora: bool = False, poison: int | None = None) -> dict[str, Any]:
    """What one process computes."""
    trained = Trained(lora=lora)
    updater = LocalUpdater(optimizer=optimizer_of(trained.parameters), grad_clip=0.05, warmup_updates=2)
    trained.train(updater, updates, poison=poison)
    return trained.outcome(updater)


@contextmanager
def engine_updater(
    rank: Rank, trained: Trained, sp_degree: int, stage: int, mpu: bool = True
) -> Iterator[EngineUpdater]:
    """An engine on all ranks of the task."""
    deepspeed = prepare_deepspeed(torch.device("cpu"))
    os.environ["LOCAL_RANK"] = str(rank.rank)
    store = PrefixStore(f"world/{rank.generation}", connect_store("127.0.0.1", rank.store_port))
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.size, timeout=timedelta(seconds=30))
    try:
        deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
        mesh = Mesh.build(sp_degree=sp_degree, device="cpu", timeout_s=30)
        group = SequenceGroup(mesh.sequence)
        parallelize(trained.transformer, group)
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=rank.rank),
            model=trained.transformer,
            model_parameters=trained.parameters,
            optimizer=optimizer_of(trained.parameters),
            config=engine_config(stage=stage, grad_clip=0.05),
            mpu=mesh if mpu else None,
            dist_init_required=False,
        )
        yield EngineUpdater(engine=engine, world=FixedWorld(mesh), stage=stage, grad_clip=0.05, warmup_updates=2)
    finally:
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None
        for name in ("mpu", "_WORLD_GROUP", "_ALL_TO_ALL_GROUP"):
            setattr(deepspeed.utils.groups, name, {} if name == "_ALL_TO_ALL_GROUP" else None)


def together(rank: Rank, sp_degree: int, stage: int, lora: bool = False, poison: int | None = None) -> dict[str, Any]:
    trained = Trained(lora=lora)
    with engine_updater(rank, trained, sp_degree, stage) as updater:
        trained.train(updater, range(UPDATES), poison=poison)
        return trained.outcome(updater)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Equal to rounding, which differs with the number of ranks; it grows with the number of updates."""
    assert found["skipped"] == expected["skipped"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=1e-7, nan_ok=True)
    assert [x for x in found["norms"] if math.isfinite(x)] == pytest.approx(
        [x for x in expected["norms"] if math.isfinite(x)], rel=tolerance
    )
    trained = {name.partition("/")[2] for name in expected["optimizer"]}
    assert len(trained) >= 4
    weights = [[outcome["weights"][name] for name in sorted(trained)] for outcome in (found, expected)]
    assert largest_difference(*weights) < tolerance
    assert float((found["log_probs"] - expected["log_probs"]).abs().max()) < tolerance
    # Parameters that nothing depends on have no state in one process, and zeros in an engine.
    assert found["optimizer"].keys() >= expected["optimizer"].keys()
    for name in found["optimizer"].keys() - expected["optimizer"].keys():
        assert name.startswith("step/") or not found["optimizer"][name].any()
    names = sorted(name for name in expected["optimizer"] if not name.startswith("step/"))
    states = [[outcome["optimizer"][name] for name in names] for outcome in (found, expected)]
    assert largest_difference(*states) < max(1e-4, tolerance)


def assert_ranks_agree(outcomes: list[dict[str, Any]]) -> None:
    """Bit for bit: whoever publishes, all hold the same weights."""
    for other in outcomes[1:]:
        for name, mine in outcomes[0]["weights"].items():
            assert torch.equal(mine, other["weights"][name])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("sp_degree", [1, 2])
def test_two_ranks_train_like_one(ranks: RankPool, sp_degree: int, stage: int):
    outcomes = ranks.run(together, sp_degree, stage, size=2)
    assert_ranks_agree(outcomes)
    assert_same(outcomes[0], alone())


@pytest.mark.parametrize("stage", [0, 2])
def test_lora_on_shared_sequences(ranks: RankPool, stage: int):
    outcomes = ranks.run(together, 2, stage, True, size=2)
    assert_ranks_agree(outcomes)
    assert_same(outcomes[0], alone(lora=True))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_is_not_finite_changes_nothing(ranks: RankPool, stage: int):
    outcomes = ranks.run(together, 2, stage, False, 1, size=2)
    assert_ranks_agree(outcomes)
    expected = alone(poison=1)
    assert expected["skipped"] == 1
    assert_same(outcomes[0], expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("world", "sp_degree"), [(4, 2), (4, 4), (6, 3), (6, 2), (6, 6)])
def test_many_ranks_train_like_one(many_ranks: RankPool, world: int, sp_degree: int, stage: int):
    outcomes = many_ranks.run(together, sp_degree, stage, size=world)
    assert_ranks_agree(outcomes)
    assert_same(outcomes[0], alone())


def resumed(rank: Rank, sp_degree: int, stage: int, weights: Any, tensors: Any, scalars: Any) -> dict[str, Any]:
    trained = Trained()
    with engine_updater(rank, trained, sp_degree, stage) as updater:
        trained.adapter.load_trainable_state(weights)
        own = {name: tensor.clone() for name, tensor in tensors.items()}  # a pipe hands the same memory to all
        updater.restore(dict(trained.transformer.named_parameters()), own, scalars)
        trained.train(updater, range(1, UPDATES))
        return trained.outcome(updater)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_state_of_one_process_is_taken_over_by_two(ranks: RankPool, stage: int):
    """And the other way round: the state that two give equals that of one (see `assert_same`)."""
    first = Trained()
    updater = LocalUpdater(optimizer=optimizer_of(first.parameters), grad_clip=0.05, warmup_updates=2)
    first.train(updater, range(1))
    tensors, scalars = updater.state(dict(first.transformer.named_parameters()))
    scalars = json.loads(json.dumps(scalars))
    outcomes = ranks.run(resumed, 2, stage, first.adapter.trainable_state(), tensors, scalars, size=2)
    expected = alone()
    expected["losses"], expected["norms"] = expected["losses"][1:], expected["norms"][1:]
    assert_same(outcomes[0], expected)


def saved(rank: Rank, stage: int, folder: str) -> dict[str, Any]:
    trained = Trained()
    with engine_updater(rank, trained, 1, stage) as updater:
        trained.train(updater, range(1))
        updater._engine.save_checkpoint(folder, tag="here", exclude_frozen_parameters=True)
        trained.train(updater, range(1, UPDATES))
        return trained.outcome(updater)


def loaded(rank: Rank, stage: int, folder: str) -> dict[str, Any]:
    """What plain DeepSpeed makes of it, which is told nothing of our mesh."""
    trained = Trained()
    with engine_updater(rank, trained, 1, stage, mpu=False) as updater:
        path, _ = updater._engine.load_checkpoint(folder)
        assert path is not None
        trained.train(updater, range(1, UPDATES))
        return trained.outcome(updater)


@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_goes_on_from_its_own_checkpoint(ranks: RankPool, stage: int, tmp_path: Path):
    expected = ranks.run(saved, stage, str(tmp_path), size=2)[0]
    found = ranks.run(loaded, stage, str(tmp_path), size=2)[0]
    expected["losses"], expected["norms"] = expected["losses"][1:], expected["norms"][1:]
    assert_same(found, expected)


def test_zero_3_is_refused():
    with pytest.raises(ValueError, match=r"ZeRO stage must be 0, 1 or 2 .*, got 3"):
        engine_config(stage=3, grad_clip=1.0)
