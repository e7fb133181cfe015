"""Round durations and samples that cost nothing, and a virtual cluster made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from src.core.types import SampleRequest, SampleResult
from src.sim.cluster import VirtualCluster
from src.sim.fleet import VirtualFleet
from src.sim.shape import ClusterShape
from src.sim.timeline import Timeline
from src.spot.coordinator import Coordinator
from src.spot.market import Market
from src.spot.scheduler import Scheduler
from tests.spot.fakes import reward


@dataclass(frozen=True)
class Round:
    """One second per sample and step, halved in a group of two; everything else in round numbers, too."""

    publish_s: float = 2.0
    load_s: float = 1.0
    regroup_s: float = 3.0
    commit_s: float = 0.0
    start_s: float = 60.0

    def denoise_s(self, samples: int, steps: int, degree: int) -> float:
        return samples * steps / degree

    def finish_s(self, samples: int, degree: int) -> float:
        return 0.5 * samples / degree

    updates: int = 2

    def update_s(self, gpus: int) -> float:
        return 40.0 / gpus


class Cheap:
    """The fake engine's rewards; remembers who made what."""

    def __init__(self) -> None:
        self.weights = ""
        self.made: list[SampleRequest] = []

    def make(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        self.made += requests
        return [
            SampleResult(request.key, "worker", self.weights, reward=reward(request.key, self.weights))
            for request in requests
        ]

    def saves(self, weights: str) -> Callable[[Path], str]:
        def save(folder: Path) -> str:
            (folder / "weights.txt").write_text(weights)
            self.weights = weights
            return weights

        return save


SHAPE = ClusterShape(reserved_gpus=2, gpus_per_node=2, batch_size=2, commit_every=2)


def virtual_cluster(
    folder: Path, *, nodes: int = 1, market: Market | None = None, durations: Round | None = None, **shape
) -> VirtualCluster:
    """With `cluster.samples`, `cluster.timeline` and `cluster.coordinator` to look at."""
    timeline, samples, durations = Timeline(), Cheap(), durations or Round()
    coordinator = Coordinator(
        run="run", folder=folder, scheduler=Scheduler(lease_s=float("inf")), now=timeline, start_wall_s=0.0
    )
    fleet = VirtualFleet(
        timeline=timeline,
        coordinator=coordinator,
        durations=durations,
        samples=samples,
        shape=replace(SHAPE, **shape),
        nodes=nodes,
        market=market,
    )
    cluster = VirtualCluster(
        timeline=timeline, coordinator=coordinator, fleet=fleet, durations=durations, samples=samples
    )
    cluster.samples, cluster.timeline, cluster.coordinator = samples, timeline, coordinator
    return cluster
