"""What the scheduler is told and what it answers: its events and actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from src.core.types import (
    Commit,
    Lease,
    Member,
    PolicyVersion,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
)

EVERY_KIND = frozenset(RequestKind)


# What happens


@dataclass(frozen=True)
class Join:
    """A worker came. It serves only `kinds`; if it is `watched`, it counts as frozen when its heartbeats
    stop."""

    member: Member
    batch_size: int
    kinds: frozenset[RequestKind] = EVERY_KIND
    watched: bool = True


@dataclass(frozen=True)
class Leave:
    """A worker is gone: it left, was killed, or failed."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Heartbeat:
    worker: str


@dataclass(frozen=True)
class Pull:
    """A worker wants a lease: at once if there is work, else as soon as there is."""

    worker: str


@dataclass(frozen=True)
class Withdraw:
    """A worker no longer waits for a lease."""

    worker: str


@dataclass(frozen=True)
class Publish:
    version: PolicyVersion
    checksum: str


@dataclass(frozen=True)
class Submit:
    requests: Sequence[SampleRequest]


@dataclass(frozen=True)
class Results:
    """What a worker made under a lease; requests that it leaves out count as unfinished."""

    worker: str
    lease: int
    results: Sequence[SampleResult]


@dataclass(frozen=True)
class Commits:
    """How far a worker is with a lease: before `step`, and from where its requests can go on without it."""

    worker: str
    lease: int
    step: int
    commits: Sequence[Commit] = ()


@dataclass(frozen=True)
class Notice:
    """A worker will be gone at `deadline_s`. Infinite: it only has become more likely, which changes nothing."""

    worker: str
    deadline_s: float


@dataclass(frozen=True)
class Close:
    """Forgets requests: open ones are dropped, and whatever comes for them later is rejected."""

    keys: Sequence[RequestKey]


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Join | Leave | Heartbeat | Pull | Withdraw | Publish | Submit | Results | Commits | Notice | Close | Tick


# What is to be done about it


@dataclass(frozen=True)
class Grant:
    worker: str
    lease: Lease
    after: tuple[int, ...] = ()
    """Leases that had some of these requests before."""


@dataclass(frozen=True)
class Finish:
    """The lease came back with its results."""

    worker: str
    lease: Lease


@dataclass(frozen=True)
class Revoke:
    """The lease ended without its results; `unfinished` of its requests were still open."""

    worker: str
    lease: Lease
    unfinished: int
    reason: str
    committed_steps: int
    """Denoising steps (sample x step) of this lease from which the unfinished requests go on."""
    lost_steps: int
    """Those that must be repeated, as far as the worker told; the step in hand counts."""


@dataclass(frozen=True)
class Progress:
    """So many commits count from now on; the others came from a worker that does not hold their request, were not
    ahead of what is there, or were made with the wrong weights."""

    worker: str
    lease: int
    accepted: int
    refused: int


@dataclass(frozen=True)
class Warned:
    """The worker gets no more leases: it will be gone at `deadline_s`, with `unfinished` open requests if not
    before."""

    worker: str
    deadline_s: float
    unfinished: int


@dataclass(frozen=True)
class Accept:
    result: SampleResult


@dataclass(frozen=True)
class Reject:
    """The result counts for nothing: its key is `unknown`, `closed`, `duplicate` or `not leased` to that
    worker, or the `checksum` of its weights is not the published one."""

    worker: str
    key: RequestKey
    reason: str


@dataclass(frozen=True)
class Fail:
    """The request was tried often enough: so many attempts failed by themselves."""

    key: RequestKey
    attempts: int
    error: str


@dataclass(frozen=True)
class Lose:
    """The worker is no member any more; it held `unfinished` open requests."""

    worker: str
    reason: str
    unfinished: int


@dataclass(frozen=True)
class Dismiss:
    """The worker that pulls gets no more leases and is to end: it was declared frozen, then thawed, or is under
    notice."""

    worker: str


@dataclass(frozen=True)
class Forget:
    """Requests of one kind and batch were closed: so many had a result, so many were dropped."""

    kind: RequestKind
    iteration: int
    accepted: int
    dropped: int


@dataclass(frozen=True)
class Retire:
    """Nobody will need these weights again."""

    version: PolicyVersion


Action = Grant | Finish | Revoke | Progress | Warned | Accept | Reject | Fail | Lose | Dismiss | Forget | Retire
