"""What several ranks see of the cluster: everybody the same, and the work is shared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from src.core.protocols import Engine
from src.core.types import (
    Commit,
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
from src.parallel.cluster import RankCluster
from src.parallel.mesh import FixedWorld, start_mesh
from tests.parallel.ranks import Rank, RankPool

EXPLORATION = Exploration("run", 0, 2, (Prompt(0, "a"),), 2, PolicyVersion(3, 1), SampleSpec(4))
NOTHING = WorkReport(denoise_s=0.0, decode_s=0.0, score_s=0.0, steps=0)


def request(seed: int) -> SampleRequest:
    key = RequestKey("run", 0, RequestKind.ROLLOUT, 0, seed, PolicyVersion(0, 0), 4)
    return SampleRequest(key, Prompt(0, "a"), SampleSpec(4))


class LoggingEngine:
    """Writes down what it is asked for."""

    fingerprint = "test"
    batch_size = 2

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[int, ...]]] = []

    def load_weights(self, folder: Path) -> str:
        return ""

    def weights_changed(self) -> str:
        self.log.append(("weights", ()))
        return "checksum"

    def serve(self, requests: Sequence[SampleRequest], worker: str, **_: Any) -> tuple[list[SampleResult], WorkReport]:
        self.log.append(("serve", tuple(each.key.seed for each in requests)))
        return [SampleResult(each.key, worker, "checksum", float(each.key.seed)) for each in requests], NOTHING

    def assist(self, requests: Sequence[SampleRequest], *, resume: Sequence[Commit] = ()) -> None:
        self.log.append(("assist", tuple(each.key.seed for each in requests)))


class LoggingCluster:
    """A coordinator that leases two requests at a time, and writes down who speaks to it."""

    run, incarnation = "run", 3

    def __init__(self, engine: Engine, number: int) -> None:
        self.log: list[str] = []
        self._engine = engine
        self._name = f"worker{number}"

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        self.log.append(f"publish {version}")

    def submit(self, requests: Sequence[SampleRequest], *, behind_rollouts: bool = False) -> None:
        self.log.append("submit")

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        leases = [requests[first : first + 2] for first in range(0, len(requests), 2)]
        return [result for lease in leases for result in self._engine.serve(lease, self._name)[0]]

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        return [SampleResult(each.key, "spot", "checksum", 0.5) for each in requests]

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        self.log.append(f"open {exploration.iteration}")

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        self.log.append("close")
        return [SampleResult(request(8).key, "spot", "checksum", 0.25)]

    def planner_state(self) -> Mapping[str, Any]:
        return {"known": 5}

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        self.log.append(f"restore {state['known']}")

    def workers(self) -> int:
        return 7

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        self.log.append(f"{name} starts")
        yield
        self.log.append(f"{name} ends")

    def lead(self, act: Callable[[], Any]) -> Any:
        raise AssertionError("ranks lead one another")

    def record(self, kind: str, **fields: Any) -> None:
        self.log.append(kind)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log.append(f"metrics {step}")

    def should_stop(self) -> bool:
        return True


def story(rank: Rank, sp_degree: int, port: int) -> dict[str, Any]:
    os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    engine, made = LoggingEngine(), []

    def connect(shared: Engine, number: int) -> LoggingCluster:
        made.append(LoggingCluster(shared, number))
        return made[-1]

    mesh = start_mesh(sp_degree=sp_degree, device="cpu", timeout_s=30.0)
    try:
        cluster = RankCluster(world=FixedWorld(mesh), engine=engine, connect=connect)
        cluster.publish(PolicyVersion(3, 1), lambda folder: "checksum")
        cluster.restore_planner(cluster.planner_state())
        cluster.submit([request(0)])
        cluster.open_exploration(EXPLORATION)
        with cluster.phase("rollout", 0):
            results = cluster.collect([request(seed) for seed in range(5)])
        closed = cluster.close([request(9)], wait_s=0.0) + cluster.close_exploration(wait_s=0.0)
        led = cluster.lead(lambda: rank.rank)
        cluster.record("kept")
        cluster.log_metrics(1, {})
        return {
            "told": (cluster.run, cluster.incarnation, cluster.workers(), cluster.should_stop()),
            "led": led,
            "results": [(result.key.seed, result.reward, result.worker) for result in results],
            "closed": [result.reward for result in closed],
            "engine": engine.log,
            "said": [line for each in made for line in each.log],
            "connections": len(made),
        }
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    from src.app.processes import free_port

    return free_port()


SAID = [
    "publish 3.1",
    "restore 5",
    "submit",
    "open 2",
    "rollout starts",
    "rollout ends",
    "close",
    "kept",
    "metrics 1",
]


def test_ranks_that_share_sequences_are_one_worker(ranks: RankPool):
    leader, follower = ranks.run(story, 2, free_port(), size=2)
    everybody = [(seed, float(seed), "worker0") for seed in range(5)]
    for rank in (leader, follower):
        assert rank["told"] == ("run", 3, 7, True)
        assert rank["results"] == everybody
        assert rank["closed"] == [0.5, 0.25]
        assert rank["led"] == 0
    assert leader["engine"] == [("serve", (0, 1)), ("serve", (2, 3)), ("serve", (4,))]
    assert follower["engine"] == [("weights", ()), ("assist", (0, 1)), ("assist", (2, 3)), ("assist", (4,))]
    assert leader["said"] == SAID
    assert (follower["said"], follower["connections"]) == ([], 0)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_nothing_share_the_requests(ranks: RankPool, size: int):
    outcomes = ranks.run(story, 1, free_port(), size=size)
    for outcome in outcomes:
        assert outcome["results"] == [(seed, float(seed), f"worker{seed % size}") for seed in range(5)]
        assert outcome["connections"] == 1
    assert outcomes[0]["said"] == SAID
    assert all(outcome["said"] == [] for outcome in outcomes[1:])
    assert all(outcome["engine"][0] == ("weights", ()) for outcome in outcomes[1:])
