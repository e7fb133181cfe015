"""A worker: pulls leases, makes their samples with its own engine and weights, and pushes the results."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Protocol

from src.core.protocols import Engine
from src.core.types import Lease, Member, PolicyVersion, SampleResult, WorkReport
from src.spot import weights
from src.spot.coordinator import Introduction, Joined


class Transport(Protocol):
    """A worker's way to the coordinator."""

    def join(self, joined: Joined) -> Introduction:
        """Becomes a member."""

    def pull(self, worker: str) -> Lease | None:
        """Waits for a lease; None tells the worker to end."""

    def push(self, worker: str, lease: int, results: Sequence[SampleResult], report: WorkReport) -> None:
        """Delivers results."""

    def heartbeat(self, worker: str) -> None:
        """Shows that the worker lives; does not wait."""


class Worker:
    """One engine that serves whatever it is leased.

    Args:
        heartbeat_s: seconds between signs of life.
    """

    def __init__(
        self,
        *,
        member: Member,
        engine: Engine,
        transport: Transport,
        heartbeat_s: float = 2.0,
    ) -> None:
        self.name = member.name
        self._member = member
        self._engine = engine
        self._transport = transport
        self._heartbeat_s = heartbeat_s
        self._held: PolicyVersion | None = None

    def join(self) -> None:
        engine = self._engine
        joined = Joined(self._member, os.getpid(), engine.batch_size, engine.fingerprint)
        self._weights_root = self._transport.join(joined).weights_root

    def run(self) -> None:
        """Joins and serves until it is told to end. Raises what the engine raises: the worker is then
        lost."""
        self.join()
        ended = threading.Event()
        pulse = threading.Thread(target=self._beat, args=(ended,), name="heartbeat", daemon=True)
        pulse.start()
        try:
            while (lease := self._transport.pull(self.name)) is not None:
                self.serve(lease)
        finally:
            ended.set()

    def serve(self, lease: Lease) -> None:
        """Makes the samples of one lease under its policy and delivers them."""
        if lease.policy != self._held:
            self._held = None  # a load that fails half-way leaves no policy in the engine
            self._engine.load_weights(weights.verify(self._weights_root, lease.policy).folder)
            self._held = lease.policy
        results, report = self._engine.serve(lease.requests, self.name)
        self._transport.push(self.name, lease.id, results, report)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(self._heartbeat_s):
            self._transport.heartbeat(self.name)


def give_way(*, niceness: int, cpus: Sequence[int] = ()) -> None:
    """Puts this process behind others that want the same cores, and onto `cpus` if any are given."""
    os.nice(niceness)
    if cpus:
        os.sched_setaffinity(0, cpus)
