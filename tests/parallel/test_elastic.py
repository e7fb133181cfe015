"""Training ranks die, freeze and join at every point of an update; what they compute is what one process computes."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from src.parallel.elastic import ElasticWorld
from src.parallel.engine import EngineUpdater, engine_config, expect_equal_weights, prepare_deepspeed, renew_engine
from src.parallel.families import parallelize
from src.parallel.ulysses import SequenceGroup
from tests.parallel.elastic_ranks import Fault, Stage, Story
from tests.parallel.test_engine import Trained, alone, assert_ranks_agree, assert_same, optimizer_of

UPDATES = 4
TIMEOUT_S = 60.0
POINTS = ("before", "backward", "attention", "reduce", "in reduce", "step", "stepped", "barrier", "in barrier")


def train(world: ElasticWorld, number: int, story: Story, joins: bool) -> dict[str, Any]:
    """What a rank does: one update between two boundaries. Returns what `Trained.outcome` does, and how it went."""
    deepspeed = prepare_deepspeed(torch.device("cpu"))
    expect_equal_weights(deepspeed)
    os.environ["LOCAL_RANK"] = str(number)
    trained = Trained(lora=story.lora)
    names = dict(trained.transformer.named_parameters())
    group = SequenceGroup()
    parallelize(trained.transformer, group)
    world.on_change(lambda mesh: group.enter(mesh.sequence))
    world.enter()
    known = world.boundary(_nothing) if joins else None
    optimizer = optimizer_of(trained.parameters)

    def make() -> Any:
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=number),
            model=trained.transformer,
            model_parameters=trained.parameters,
            optimizer=optimizer,
            config=engine_config(stage=0, grad_clip=0.05),
            mpu=world.mesh,
            dist_init_required=False,
        )
        return engine

    deepspeed.utils.groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    engines = [make()]
    updater = EngineUpdater(engine=engines[0], world=world, stage=0, grad_clip=0.05, warmup_updates=2)

    def renew(_: Any) -> None:
        engines.append(renew_engine(deepspeed, engines[-1], make))
        updater.exchange(engines[-1])

    world.on_change(renew)
    world.share(updater)
    first = 0
    if known is not None:
        state = torch.load(known, weights_only=True)
        first = state["update"]
        trained.adapter.load_trainable_state(state["weights"])
        updater.restore(names, state["tensors"], state["scalars"])
    stepped: list[tuple[int, int]] = []
    for update in range(first, story.updates):
        if update > first:
            world.boundary(lambda update=update: _save(story, trained, updater, names, update))  # type: ignore[misc]
        with Faults(story, number, update, updater, group, optimizer) as faults:
            faults.strike("before")
            trained.train(updater, range(update, update + 1))
        steps = sum(engine.global_steps for engine in engines)
        stepped.append((update, steps))
    return {
        **trained.outcome(updater),
        "first": first,
        "stepped": stepped,
        "snapshot": world.mesh.snapshot,
        "recoveries": world.recoveries,  # type: ignore[attr-defined]
    }


def _nothing() -> str:
    raise AssertionError("a newcomer has nothing to tell")


def _save(story: Story, trained: Trained, updater: EngineUpdater, names: dict[str, nn.Parameter], update: int) -> str:
    tensors, scalars = updater.state(names)
    path = Path(story.folder) / f"state{update}.pt"
    weights = trained.adapter.trainable_state()
    torch.save({"update": update, "weights": weights, "tensors": tensors, "scalars": scalars}, path)
    return str(path)


class Faults:
    """Inside, this rank is hit where the story says so."""

    def __init__(
        self, story: Story, number: int, update: int, updater: EngineUpdater, group: SequenceGroup, optimizer: Any
    ) -> None:
        self._due = {fault.point: fault for fault in story.faults if (fault.rank, fault.update) == (number, update)}
        self._updater = updater
        self._group = group
        self._optimizer = optimizer
        self._undo: list[Callable[[], None]] = []

    def strike(self, point: str) -> None:
        if point in self._due:
            self._due.pop(point).strike()

    def __enter__(self) -> Faults:
        if not self._due:
            return self
        self._patch(self._updater, "backward", "backward")
        self._patch(self._group, "attention", "attention")
        self._patch(dist, "all_reduce", "reduce", call=2)
        self._patch(dist, "barrier", "barrier")
        before = self._optimizer.register_step_pre_hook(lambda *_: self.strike("step"))
        after = self._optimizer.register_step_post_hook(lambda *_: self.strike("stepped"))
        self._undo += [before.remove, after.remove]
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def _patch(self, owner: Any, name: str, point: str, call: int = 1) -> None:
        original, calls = getattr(owner, name), [0]

        def patched(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] >= call:
                self.strike(point)
                if f"in {point}" in self._due:
                    threading.Timer(0.0005, self.strike, (f"in {point}",)).start()
            return original(*arguments, **options)

        setattr(owner, name, patched)
        self._undo.append(lambda: setattr(owner, name, original))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def check(results: dict[int, Any], story: Story) -> None:
    """The survivors agree bit for bit, and with one process to rounding."""
    expected = alone(range(story.updates), lora=story.lora)
    whole = [result for result in results.values() if result["first"] == 0]
    assert_ranks_agree(list(results.values()))
    for result in whole:
        assert_same({**result, "losses": expected["losses"]}, expected)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-6)


def test_a_rank_is_killed_in_the_reduction(stage: Stage):
    story = Story(3, 1, UPDATES, (Fault(2, 1, "reduce"),))
    results = stage.play(story, train, timeout_s=TIMEOUT_S)
    assert sorted(results) == [0, 1]
    check(results, story)
    (recovery,) = results[0]["recoveries"]
    assert (recovery["generation"], recovery["world"], recovery["sp_degree"]) == (1, 2, 1)
    assert [steps for _, steps in results[0]["stepped"]] == [1, 2, 3, 4], "each update went through an engine"
