"""A scheduler on the bench: its decisions as short lines, to be compared exactly."""

from __future__ import annotations

from src.core.types import Blob, Commit, Member, PolicyVersion, RequestKind, SampleResult, Trajectory
from src.spot import messages as m
from src.spot.scheduler import Scheduler
from tests.spot.fakes import requests

ROLLOUT, EVAL, AUDIT, EXPLORE = RequestKind
V0, V1, V2, V3, V4 = (PolicyVersion(0, iteration) for iteration in range(5))
CHECKSUMS = {version: f"sum{version}" for version in (V0, V1, V2, V3, V4)}


class Bench:
    """A scheduler that is told things in few words, and answers in few words."""

    def __init__(self, **settings) -> None:
        self.scheduler = Scheduler(**settings)
        self.now_s = 0.0
        self.leases = {}

    def __call__(self, event: m.Event) -> list[str]:
        return [self._told(action) for action in self.scheduler.handle(self.now_s, event)]

    def join(self, *names: str, batch_size: int = 4, kinds=m.EVERY_KIND, watched: bool = True) -> None:
        for name in names:
            assert self(m.Join(Named(name), batch_size, kinds, watched)) == []

    def publish(self, version: PolicyVersion) -> list[str]:
        return self(m.Publish(version, CHECKSUMS[version]))

    def submit(self, kind: RequestKind, count: int, policy: PolicyVersion = V0, **more) -> list[str]:
        return self(m.Submit(requests(kind, count, policy=policy, **more)))

    def pull(self, *names: str) -> list[str]:
        return [told for name in names for told in self(m.Pull(name))]

    def push(self, name: str, lease: int, *, skip: int = 0, error=None, checksum=None) -> list[str]:
        """Pushes results of a lease, but for its last `skip` requests."""
        leased = self.leases[lease].requests
        results = [
            SampleResult(r.key, name, checksum or CHECKSUMS[r.key.policy], error=error)
            for r in leased[: len(leased) - skip]
        ]
        return self(m.Results(name, lease, results))

    def commit(self, name: str, lease: int, step: int, *, told: int | None = None, checksum=None) -> list[str]:
        """Commits of all requests of a lease before a step; the worker tells that it is at `told`."""
        made = [commit(r.key, step, checksum or CHECKSUMS[r.key.policy]) for r in self.leases[lease].requests]
        return self(m.Commits(name, lease, step if told is None else told, made))

    def close(self, kind: RequestKind, count: int, policy: PolicyVersion = V0, **more) -> list[str]:
        return self(m.Close([r.key for r in requests(kind, count, policy=policy, **more)]))

    def _told(self, action: m.Action) -> str:
        match action:
            case m.Grant(worker, lease):
                self.leases[lease.id] = lease
                seeds = " ".join(str(request.key.seed) for request in lease.requests)
                at = f" from step {lease.step}" if lease.step else ""
                return f"{worker} gets {lease.id}: {lease.kind.name} {seeds}{at}"
            case m.Finish(worker, lease):
                return f"{worker} finished {lease.id}"
            case m.Revoke(worker, lease, unfinished, reason, committed, lost):
                steps = f", {committed} steps kept, {lost} lost" if committed else ""
                return f"{worker} lost {lease.id} ({reason}): {unfinished} unfinished{steps}"
            case m.Progress(worker, lease, accepted, refused):
                return f"{accepted} commits of {lease} by {worker}, {refused} refused"
            case m.Warned(worker, deadline_s, unfinished):
                return f"{worker} goes at {deadline_s:g} with {unfinished}"
            case m.Accept(result):
                return f"accept {result.key.seed}"
            case m.Reject(worker, key, reason):
                return f"reject {key.seed} of {worker}: {reason}"
            case m.Fail(key, attempts, error):
                return f"fail {key.seed} after {attempts}: {error}"
            case m.Lose(worker, reason, unfinished):
                return f"{worker} is gone ({reason}) with {unfinished}"
            case m.Dismiss(worker):
                return f"dismiss {worker}"
            case m.Forget(kind, iteration, accepted, dropped):
                return f"closed {kind.name} {iteration}: {accepted} accepted, {dropped} dropped"
            case m.Retire(version):
                return f"retire {version}"


class Named(Member):
    """A member whose whole name is given."""

    def __init__(self, name: str) -> None:
        super().__init__(node=name, slot=0)

    @property
    def name(self) -> str:
        return self.node


def commit(key, step: int, checksum: str) -> Commit:
    """A commit with nothing in it."""
    nothing = Blob("float32", (0,), b"")
    return Commit(key, step, nothing, Trajectory(nothing, nothing, nothing, "fake"), checksum)
