"""What the arms exchange, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks.arms import ARMS, OdeExploring, ReusingCluster, TrajectoryExploring
from src.core.types import (
    Exploration,
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
    SampleSpec,
    WorkReport,
)
from src.spot.coordinator import Coordinator
from src.spot.planning.simple import Fixed
from src.spot.scheduler import Scheduler


class FakeEngine:
    """Serves at once; the reward is `worth`, and every request it was asked is kept."""

    fingerprint = "fake"
    batch_size = 2

    def __init__(self, worth: float) -> None:
        self.worth = worth
        self.asked: list[SampleRequest] = []

    def load_weights(self, folder: Path) -> str:
        return "w"

    def serve(
        self, requests: Sequence[SampleRequest], worker: str, **_: object
    ) -> tuple[list[SampleResult], WorkReport]:
        self.asked += requests
        made = [SampleResult(request.key, worker, "w", reward=self.worth) for request in requests]
        return made, WorkReport(0.0, 0.0, 0.0, len(requests))


def request(kind: RequestKind, seed: int, *, version: int = 0) -> SampleRequest:
    key = RequestKey("run", 1, kind, 0, seed, PolicyVersion(0, version), 4)
    return SampleRequest(key, Prompt(0, "ABCD"), SampleSpec(4, (0, 1, 2)))


def test_ode_ranking_explores_without_step_noise_and_rolls_out_with_it() -> None:
    engine = FakeEngine(0.5)
    arm = OdeExploring(cast(Any, engine))
    explore, rollout = request(RequestKind.EXPLORE, 7), request(RequestKind.ROLLOUT, 7)
    for asked in (explore, rollout):
        (result,), _ = arm.serve([asked], "w")
        assert result.key == asked.key
    assert [asked.spec.stochastic_steps for asked in engine.asked] == [(), (0, 1, 2)]


def test_explored_trajectories_are_made_as_rollouts_and_delivered_as_explorations() -> None:
    engine = FakeEngine(0.5)
    asked = request(RequestKind.EXPLORE, 7)
    (result,), _ = TrajectoryExploring(cast(Any, engine)).serve([asked], "w")
    assert result.key == asked.key
    assert engine.asked == [replace(asked, key=replace(asked.key, kind=RequestKind.ROLLOUT))]


def test_the_reusing_cluster_generates_only_what_was_not_explored(tmp_path: Path) -> None:
    trainer, explorer = FakeEngine(0.1), FakeEngine(0.9)
    planner = Fixed(seeds_per_prompt=3)
    coordinator = Coordinator(run="run", folder=tmp_path, scheduler=Scheduler(), planner=planner)
    cluster = ReusingCluster(coordinator=coordinator, engine=trainer, spot_engines=[explorer])

    def save(folder: Path) -> str:
        (folder / "weights").write_text("w")
        return "w"

    cluster.publish(PolicyVersion(0, 0), save)
    spec = SampleSpec(4, (0, 1, 2))
    cluster.open_exploration(Exploration("run", 0, 1, (Prompt(0, "ABCD"),), 2, PolicyVersion(0, 0), spec))
    one, _, three = (result.key.seed for result in cluster.close_exploration(wait_s=0.0))
    cluster.publish(PolicyVersion(0, 1), save)
    wanted = [request(RequestKind.ROLLOUT, seed, version=1) for seed in (three, 9, one)]
    assert [result.reward for result in cluster.collect(wanted)] == [0.9, 0.1, 0.9]
    assert [asked.key.seed for asked in trainer.asked] == [9]
    evaluated = [request(RequestKind.EVAL, three, version=1)]
    assert [result.reward for result in cluster.collect(evaluated)] == [0.1]
    coordinator.shutdown()


def test_arms_are_named_after_their_key() -> None:
    assert all(name == arm.name for name, arm in ARMS.items())
    assert [arm.candidates for arm in ARMS.values()] == [0, 0, 2, 4, 2, 4, 4, 4]
