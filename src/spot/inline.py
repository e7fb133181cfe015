"""A cluster in one process, without Ray: for tests, debugging and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from src.core.clock import Clock
from src.core.protocols import Engine
from src.core.types import (
    Commit,
    Exploration,
    Lease,
    Member,
    PolicyVersion,
    SampleRequest,
    SampleResult,
)
from src.spot import weights
from src.spot.coordinator import Coordinator
from src.spot.members import reserved
from src.spot.worker import Worker

T = TypeVar("T")


class InlineCluster:
    """`core.protocols.Cluster` under the same coordinator and scheduler as the real one, one thing at a time.

    `collect` is served by the trainer's engine alone. Spot workers do their part when it is closed, all of
    it, in turns of one lease, whatever `wait_s` is: the outcome depends on nothing but the requests.

    Args:
        engine: the trainer's; see `client.RayCluster`.
        spot_engines: one per spot worker, each with its own weights.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        engine: Engine,
        spot_engines: Sequence[Engine] = (),
    ) -> None:
        introduction = coordinator.introduce()
        self.run = introduction.run
        self.incarnation = introduction.incarnation
        self.now: Clock = coordinator.now
        self._weights_root = introduction.weights_root
        self._coordinator = coordinator
        self._engine = engine
        joined = reserved(Member("local", 0, self.incarnation, "reserved"), engine)
        self._name = joined.member.name
        coordinator.join(joined)
        self._spot = [
            Worker(
                member=Member("local", slot),
                engine=spot_engine,
                transport=_Direct(coordinator),
            )
            for slot, spot_engine in enumerate(spot_engines)
        ]
        for worker in self._spot:
            worker.join()

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        start_s = self._coordinator.now()
        published = weights.publish(self._weights_root, version, save)
        publish_s = self._coordinator.now() - start_s
        old = self._coordinator.publish(version, published.checksum, published.bytes, publish_s)
        weights.remove(self._weights_root, old)

    def submit(self, requests: Sequence[SampleRequest], *, behind_rollouts: bool = False) -> None:
        self._coordinator.submit(requests, behind_rollouts=behind_rollouts)

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        self.submit(requests)
        while (lease := _pull(self._coordinator, self._name)) is not None:
            results, report = self._engine.serve(lease.requests, self._name, resume=lease.resume)
            self._coordinator.push(self._name, lease.id, results, report)
        return self._coordinator.close([request.key for request in requests])

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        keys = [request.key for request in requests]
        self._serve_until(lambda: self._coordinator.complete(keys))
        return self._coordinator.close(keys)

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        self._coordinator.open_exploration(exploration, behind_rollouts=behind_rollouts)

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        self._serve_until(lambda: self._coordinator.complete(self._coordinator.explores))
        return self._coordinator.close_exploration()

    def planner_state(self) -> Mapping[str, Any]:
        return self._coordinator.planner_state()

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        self._coordinator.restore_planner(state)

    def _serve_until(self, done: Callable[[], bool]) -> None:
        """Spot workers do their part."""
        busy = list(self._spot)
        while busy and not done():
            worker = busy.pop(0)
            lease = _pull(self._coordinator, worker.name)
            if lease is not None:
                worker.serve(lease)
                busy.append(worker)

    def workers(self) -> int:
        return self._coordinator.workers()

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        self.record("phase_started", name=name, iteration=iteration)
        start_s = self._coordinator.now()
        try:
            yield
        finally:
            end_s = self._coordinator.now()
            self.record("phase", name=name, iteration=iteration, start_s=start_s, end_s=end_s)

    def lead(self, act: Callable[[], T]) -> T:
        return act()

    def record(self, kind: str, **fields: Any) -> None:
        self._coordinator.record(kind, **fields)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._coordinator.log.log_metrics(step, metrics)

    def should_stop(self) -> bool:
        return self._coordinator.stop_requested


class _Direct:
    """`worker.Transport` without anything in between."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.join = coordinator.join
        self.push = coordinator.push
        self.notice = coordinator.notice
        self.heartbeat = coordinator.heartbeat

    def pull(self, worker: str) -> Lease | None:
        return _pull(self._coordinator, worker)

    def commit(self, worker: str, lease: int, step: int, commits: Sequence[Commit]) -> None:
        self._coordinator.commit(worker, lease, step, commits)

    def is_dropped(self) -> bool:
        return False  # nothing else happens meanwhile


def _pull(coordinator: Coordinator, worker: str) -> Lease | None:
    coordinator.pull(worker)
    coordinator.withdraw(worker)
    return coordinator.granted.pop(worker, None)
