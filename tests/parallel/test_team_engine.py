"""One engine made of several processes: what the leader tells holds for all, and nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from src.core.protocols import GroupLost, OnStep, never, unwatched
from src.core.types import (
    Commit,
    Generation,
    PolicyVersion,
    SampleRequest,
    SampleResult,
    WorkReport,
)
from src.parallel.team_engine import ElasticEngine
from src.parallel.ulysses import SequenceGroup
from tests.parallel.ranks import Rank, RankPool
from tests.parallel.test_cluster import request

STEPS = 4


class SteppingEngine:
    """Counts its steps, and asks before each of them and once after the last."""

    batch_size = 2
    fingerprint = "sp1"

    def __init__(self) -> None:
        self.steps: list[tuple[tuple[int, ...], int]] = []

    def share(self, sp_degree: int) -> None:
        self.fingerprint = f"sp{sp_degree}"

    def load_weights(self, folder: Any) -> str:
        return ""

    def weights_changed(self) -> str:
        return ""

    def serve(
        self,
        requests: Sequence[SampleRequest],
        worker: str,
        *,
        resume: Sequence[Commit] = (),
        commit_every: int = 0,
        on_step: OnStep = unwatched,
        should_yield: Callable[[], bool] = never,
    ) -> tuple[list[SampleResult], WorkReport]:
        self.assist(requests, should_yield=should_yield)
        return [], WorkReport(0.0, 0.0, 0.0, self.steps[-1][1])

    def assist(
        self,
        requests: Sequence[SampleRequest],
        *,
        resume: Sequence[Commit] = (),
        should_yield: Callable[[], bool] = never,
    ) -> None:
        made = 0
        while made < STEPS and not should_yield():
            made += 1
        should_yield()
        self.steps.append((tuple(each.key.seed for each in requests), made))


def lead(engine: ElasticEngine, seeds: Sequence[int], should_yield: Callable[[], bool]) -> int:
    requests = [request(seed) for seed in seeds]
    engine.announce(requests)
    return engine.serve(requests, "w", should_yield=should_yield)[1].steps


def story(rank: Rank, fails: bool) -> dict[str, Any]:
    """Two leases, of which the second is given up before its third step; rank 1 may fail in the third."""
    own, sequence = SteppingEngine(), SequenceGroup()
    engine = ElasticEngine(engine=own, sequence=sequence, device=rank.device, patience_s=20.0)
    members = tuple(f"w{number}" for number in range(rank.size))
    generation = Generation(rank.generation, members)
    engine.form("elastic", generation, rank.rank, store_port=rank.store_port)
    seen = {"fingerprint": engine.fingerprint, "sequence": (sequence.rank, sequence.size)}
    prepared: list[PolicyVersion] = []

    def fails_at_the_third(policy: PolicyVersion) -> None:
        prepared.append(policy)
        if len(prepared) == 3:
            raise MemoryError

    try:
        if rank.rank == 0:
            engine.remind()
            lead(engine, [1, 2], never)
            asked = iter(range(STEPS))
            seen["yielded after"] = lead(engine, [3], lambda: next(asked) == 2)
            if fails:
                lead(engine, [4], never)
                lead(engine, [5], never)
            engine.release()
        elif fails and rank.rank == 1:
            engine.follow(fails_at_the_third)
        else:
            engine.follow(prepared.append)
        seen["ended"] = "released"
    except GroupLost:
        seen["ended"] = "lost"
    except MemoryError:
        seen["ended"] = "failed"
    engine.drop()
    return {**seen, "alone": (engine.fingerprint, sequence.size), "steps": own.steps, "prepared": len(prepared)}


@pytest.mark.parametrize("size", [2, 3])
def test_all_stop_before_the_same_step(ranks: RankPool, size: int):
    told = ranks.run(story, False, size=size)
    for number, rank in enumerate(told):
        assert rank["fingerprint"] == f"sp{size}"
        assert rank["sequence"] == (number, size)
        assert rank["steps"] == [((1, 2), STEPS), ((3,), 2)]
        assert rank["prepared"] == (2 if number else 0)
        assert (rank["ended"], rank["alone"]) == ("released", ("sp1", 1))
    assert told[0]["yielded after"] == 2


def test_all_notice_when_one_of_them_is_gone(ranks: RankPool):
    told = ranks.run(story, True, size=3)
    assert [rank["ended"] for rank in told] == ["lost", "failed", "lost"]
    assert [rank["alone"] for rank in told] == [("sp1", 1)] * 3


def test_alone_nobody_is_told_anything():
    own = SteppingEngine()
    engine = ElasticEngine(engine=own, sequence=SequenceGroup(), device=None)  # type: ignore[arg-type]
    engine.form("elastic", Generation(1, ("w0",)), 0, store_port=0)
    engine.remind()
    assert lead(engine, [1], lambda: len(own.steps) > 0) == STEPS
    engine.release()
    engine.drop()
