"""What the scheduler keeps of requests, workers and leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from src.core.types import Commit, Lease, RequestKind, SampleRequest
from src.spot.sizing import Speed


@dataclass(slots=True)
class Task:
    """A request until it is closed. Pending: neither `holder` nor `done`."""

    request: SampleRequest
    granted: list[tuple[str, int]] = field(default_factory=list)
    """(worker, lease) of every attempt."""
    holder: int | None = None
    """The lease that holds it now."""
    done: bool = False
    """It has a result, or has failed."""
    commit: Commit | None = None
    failures: int = 0
    """Attempts that count."""
    spoilt_by: str = ""
    """The worker of the last of them."""
    error: str = "no result came back"

    @property
    def step(self) -> int:
        """Where it goes on."""
        return 0 if self.commit is None else self.commit.step


@dataclass(slots=True)
class WorkerState:
    batch_size: int
    kinds: tuple[RequestKind, ...]
    leases: set[int] = field(default_factory=set)
    speed: Speed = field(default_factory=Speed)
    gone_s: float = inf
    """When it will be gone, if it is under notice."""


@dataclass(slots=True)
class OpenLease:
    """A lease that is outstanding."""

    worker: str
    lease: Lease
    granted_s: float
    deadline_s: float
    step: int
    """How far it is, as the worker told."""
