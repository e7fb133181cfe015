"""A training rank's view of everybody else, over Ray (`core.protocols.Cluster`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from src.core.clock import RunClock
from src.core.protocols import Engine
from src.core.types import (
    Lease,
    Member,
    PolicyVersion,
    RequestKind,
    SampleRequest,
    SampleResult,
    WorkReport,
)
from src.spot import session, weights
from src.spot.coordinator import CoordinatorLost, Joined
from src.spot.session import ray

T = TypeVar("T")

RESERVED_KINDS = frozenset({RequestKind.ROLLOUT, RequestKind.EVAL})
"""What a training rank serves itself; the rest would only keep it from training."""


def call(method: Any, *arguments: Any) -> Any:
    """Calls a method of the coordinator and waits. Raises CoordinatorLost if that process is dead."""
    try:
        return ray.get(method.remote(*arguments))
    except ray.exceptions.RayActorError as error:
        raise CoordinatorLost from error


class RayTransport:
    """A spot worker's way to the coordinator (`worker.Transport`)."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def join(self, joined: Joined) -> None:
        call(self._host.join, joined)

    def pull(self, worker: str) -> Lease | None:
        lease: Lease | None = call(self._host.pull, worker)
        return lease

    def push(self, worker: str, lease: int, results: Sequence[SampleResult], report: WorkReport) -> None:
        call(self._host.push, worker, lease, results, report)

    def heartbeat(self, worker: str) -> None:
        self._host.heartbeat.remote(worker)


class RayCluster:
    """The cluster as a training rank sees it. All methods raise CoordinatorLost when the coordinator is dead.

    Args:
        engine: makes samples with the weights under training, which are never loaded from `weights_root`: its
        results must carry the checksum that `save` returned when they were published.
        weights_root: folder in which policies are published.
        rank: number of this rank.
        wait_s: how long to wait for the job's Ray to start.
    """

    def __init__(self, *, engine: Engine, weights_root: Path, rank: int = 0, wait_s: float = 120.0) -> None:
        self._engine = engine
        self._weights_root = weights_root
        self._host = session.connect(wait_s=wait_s)
        self.run, self.incarnation, elapsed_s = call(self._host.introduce)
        self.now = RunClock(elapsed_s=elapsed_s)
        member = Member("local", rank, self.incarnation, "reserved")
        self._name = member.name
        call(
            self._host.join,
            Joined(member, os.getpid(), engine.batch_size, engine.fingerprint, RESERVED_KINDS, watched=False),
        )

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        start_s = self.now()
        published = weights.publish(self._weights_root, version, save)
        publish_s = self.now() - start_s
        old = call(self._host.publish, version, published.checksum, published.bytes, publish_s)
        weights.remove(self._weights_root, old)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        call(self._host.submit, requests)

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        self.submit(requests)
        keys = [request.key for request in requests]
        while (lease := call(self._host.work, self._name, keys)) is not None:
            results, report = self._engine.serve(lease.requests, self._name)
            call(self._host.push, self._name, lease.id, results, report)
        return self.close(requests, wait_s=0.0)

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        results: list[SampleResult] = call(self._host.close, [request.key for request in requests], wait_s)
        return results

    def workers(self) -> int:
        return int(call(self._host.workers))

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        start_s = self.now()
        try:
            yield
        finally:
            self.record("phase", name=name, iteration=iteration, start_s=start_s, end_s=self.now())

    def record(self, kind: str, **fields: Any) -> None:
        call(self._host.record, kind, fields)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        call(self._host.log_metrics, step, metrics)

    def should_stop(self) -> bool:
        return bool(call(self._host.should_stop))

    def resume(self, iteration: int) -> None:
        """The run goes on at `iteration`: metrics beyond it are cut off."""
        call(self._host.resume, iteration)
