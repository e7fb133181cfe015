"""Training ranks die, freeze and join at every point of an update; what they compute is what one process computes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
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
from src.parallel.mesh import Mesh
from src.parallel.ulysses import SequenceGroup
from tests.parallel.elastic_ranks import ALARM, FROZEN_S, Fault, Stage, Story
from tests.parallel.test_engine import Trained, alone, assert_ranks_agree, assert_same, optimizer_of

UPDATES = 4
TIMEOUT_S = 60.0
POINTS = ("before", "backward", "attention", "reduce", "in reduce", "step", "stepped", "barrier", "in barrier")


def train(world: ElasticWorld, number: int, story: Story, joins: bool) -> dict[str, Any]:
    """What a rank does: one update between two boundaries. Returns what `Trained.outcome` does, and how it went.

    `stepped` are the updates, with the steps of all engines until then and the number of engines.
    """
    deepspeed = prepare_deepspeed(torch.device("cpu"))
    expect_equal_weights(deepspeed)
    os.environ["LOCAL_RANK"] = str(number)
    trained = Trained(lora=story.lora)
    names = dict(trained.transformer.named_parameters())
    group = SequenceGroup()
    parallelize(trained.transformer, group)
    world.on_change(lambda mesh: group.enter(mesh.sequence))
    if number == story.misfit:
        world.on_change(_refuse_a_second_group)
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
    stepped: list[tuple[int, int, int]] = []
    for update in range(first, story.updates):
        if update > first:
            world.boundary(lambda update=update: _save(story, trained, updater, names, update))  # type: ignore[misc]
        with Faults(story, number, update, updater, group, optimizer) as faults:
            faults.strike("before")
            trained.train(updater, range(update, update + 1))
        stepped.append((update, sum(engine.global_steps for engine in engines), len(engines)))
    return {
        **trained.outcome(updater),
        "first": first,
        "stepped": stepped,
        "snapshot": world.mesh.snapshot,
        "recoveries": world.recoveries,  # type: ignore[attr-defined]
    }


def _refuse_a_second_group(mesh: Mesh) -> None:
    if mesh.snapshot.generation > 0:
        raise RuntimeError("no memory for another engine")


def train_or_give_up(world: ElasticWorld, number: int, story: Story, joins: bool) -> dict[str, Any]:
    """As `train`; the misfit's outcome is its error."""
    try:
        return train(world, number, story, joins)
    except RuntimeError as error:
        if number != story.misfit:
            raise
        return {"gave up": str(error), "generation": world._generation.number}


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
        if "always" in self._due:
            self._due["always"].strike()

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
                    timer = threading.Timer(0.0005, self.strike, (f"in {point}",))
                    timer.start()
                    self._undo.append(timer.join)  # it strikes in this update or never
            return original(*arguments, **options)

        setattr(owner, name, patched)
        self._undo.append(lambda: setattr(owner, name, original))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def check(results: dict[int, Any], story: Story) -> None:
    """The survivors agree bit for bit, and with one process to rounding; each update went through an engine once."""
    expected = alone(range(story.updates), lora=story.lora)
    assert_ranks_agree(list(results.values()))
    for result in results.values():
        first = result["first"]
        told = {**expected, "losses": expected["losses"][first:], "norms": expected["norms"][first:]}
        assert_same(result, told, tolerance=1e-5 if story.updates <= UPDATES else 3e-4)
        assert len(result["norms"]) == story.updates - first


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("fault", "sp_degree"),
    [
        (Fault(2, 1, "backward"), 1),
        (Fault(2, 1, "reduce"), 1),
        (Fault(1, 1, "step"), 1),
        (Fault(0, 1, "attention"), 3),
    ],
)
def test_a_killed_rank_changes_nothing(stage: Stage, fault: Fault, sp_degree: int):
    """Before the collective, in it, in the optimizer's step, and in the all-to-all of the first rank."""
    story = Story(3, sp_degree, UPDATES, (fault,))
    results = stage.play(story, train, timeout_s=TIMEOUT_S)
    assert len(results) == 2
    assert fault.rank not in results
    check(results, story)
    (recovery,) = [told for result in results.values() for told in result["recoveries"]]
    assert (recovery["generation"], recovery["world"], recovery["sp_degree"]) == (1, 2, min(2, sp_degree))
    for result in results.values():
        assert [(update, steps) for update, steps, _ in result["stepped"]] == [(0, 1), (1, 2), (2, 3), (3, 4)]
        assert [engines for _, _, engines in result["stepped"]] == [1, 2, 2, 2], "before and after it, the engine's own"


@pytest.mark.timeout(400)
def test_who_has_done_an_update_gives_it_to_who_has_not(stage: Stage):
    """Rank 1 sees an error when all gradients are summed and the others have stepped: nobody is lost, nobody rolls
    back, and the update that rank 1 did not make is in its weights, moments and losses."""
    story = Story(3, 1, UPDATES, (Fault(1, 1, "step", ALARM),))
    results = stage.play(story, train, timeout_s=TIMEOUT_S)
    assert sorted(results) == [0, 1, 2]
    check(results, story)
    assert [steps for _, steps, _ in results[0]["stepped"]] == [1, 2, 3, 4]
    assert [steps for _, steps, _ in results[1]["stepped"]] == [1, 1, 2, 3], "update 1 was made elsewhere"
    assert [result["snapshot"].generation for result in results.values()] == [1, 1, 1]


@pytest.mark.timeout(400)
def test_a_rank_joins_between_two_updates_and_outlives_the_others(stage: Stage, tmp_path: Path):
    """It gets weights and moments from the first rank, and later goes on alone."""
    faults = (Fault(1, 1, "step"), Fault(0, 39, "reduce"))
    story = Story(2, 1, 41, faults, joins_at_s=(0.0,), folder=str(tmp_path))
    results = stage.play(story, train, timeout_s=TIMEOUT_S)
    assert sorted(results) == [2]
    assert results[2]["first"] >= 2
    check(results, story)
    assert results[2]["snapshot"].world == 1


@pytest.mark.timeout(400)
def test_two_join_one_right_after_the_other(stage: Stage, tmp_path: Path):
    """The second comes while the first is being let in; all number their operations alike."""
    story = Story(2, 1, 41, (Fault(1, 1, "reduce"),), joins_at_s=(0.0, 0.0), folder=str(tmp_path))
    results = stage.play(story, train, timeout_s=TIMEOUT_S)
    assert sorted(results) == [0, 2, 3]
    check(results, story)
    assert results[0]["snapshot"].world == 3


@pytest.mark.timeout(400)
def test_a_frozen_rank_is_ended_and_the_others_go_on(stage: Stage):
    story = Story(3, 1, UPDATES, (Fault(1, 2, "reduce", signal.SIGSTOP),))
    begun_s = time.monotonic()
    results = stage.play(story, train, timeout_s=TIMEOUT_S)
    assert sorted(results) == [0, 2]
    assert time.monotonic() - begun_s > FROZEN_S
    check(results, story)


@pytest.mark.timeout(400)
def test_an_error_that_is_no_matter_of_ranks_is_raised(stage: Stage):
    """All ranks see it again and again."""
    story = Story(2, 1, UPDATES, tuple(Fault(rank, 1, "always", ALARM) for rank in range(2)))
    with pytest.raises(AssertionError, match="RuntimeError: false alarm"):
        stage.play(story, train, timeout_s=TIMEOUT_S)


@pytest.mark.timeout(400)
def test_a_rank_that_cannot_form_groups_any_more_gives_up_and_the_others_go_on(stage: Stage):
    story = Story(4, 1, UPDATES, (Fault(3, 1, "reduce"),), misfit=1)
    results = stage.play(story, train_or_give_up, timeout_s=TIMEOUT_S)
    misfit = results.pop(1)
    assert misfit["gave up"] == "no memory for another engine"
    assert misfit["generation"] == 4, "it has tried four times"
    assert sorted(results) == [0, 2]
    check(results, story)
    assert results[0]["snapshot"].world == 2


def meet(world: ElasticWorld, number: int, story: Story, joins: bool) -> int:
    """The ranks form their first groups, and one dies when it is about to: nobody is in a collective yet. Returns how
    many are left."""
    (fault,) = story.faults
    owner = dist if fault.point == "init_process_group" else Mesh
    if number == fault.rank:
        setattr(owner, fault.point, lambda *_, **__: fault.strike())
    world.enter()
    return world.run(lambda: world.mesh.snapshot.world)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["init_process_group", "build"])
def test_a_death_while_groups_form_costs_seconds(stage: Stage, point: str):
    story = Story(3, 1, 0, (Fault(1, 0, point),))
    stage.warm(3)
    begun_s = time.monotonic()
    assert stage.play(story, meet, timeout_s=TIMEOUT_S) == {0: 2, 2: 2}
    assert time.monotonic() - begun_s < 15.0


TRIALS = int(os.environ.get("SPOTLIGHT_TRIALS", "100"))


def drawn(trial: int) -> Story:
    """A random story: one or two ranks are killed or frozen, each at a random point."""
    draw = random.Random(trial)
    sp_degree = draw.choice((1, 1, 2, 3, 4))
    points = [point for point in POINTS if sp_degree > 1 or point != "attention"]
    faults = tuple(
        Fault(rank, draw.randrange(UPDATES), draw.choice(points), draw.choice((signal.SIGKILL, signal.SIGSTOP)))
        for rank in draw.sample(range(4), draw.choice((1, 2)))
    )
    return Story(4, sp_degree, UPDATES, faults, lora=draw.random() < 0.3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_whatever_happens_whenever(stage: Stage, trial: int):
    """kill -9 and SIGSTOP anywhere: no hang, no wrong number. SPOTLIGHT_TRIALS=10 for fewer of them."""
    story = drawn(trial)
    results = stage.play(story, train, timeout_s=TIMEOUT_S)
    survivors = {0, 1, 2, 3} - {fault.rank for fault in story.faults}
    assert set(results) >= survivors, "who was never hit comes to the end"
    check(results, story)
