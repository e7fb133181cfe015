"""The queue: which worker makes which samples, told as a pure state machine.

`Scheduler.handle(now_s, event) -> actions` reads no clock, starts no thread and does no input or output, so
the real driver, a simulation and a test run the very same decisions. Every event costs amortised constant
time per request it names; only `Publish` looks at all open leases.

Rules
- Workers pull. A worker that finds nothing waits, in order of arrival, until a request comes that it may
  serve.
- The smallest request kind goes first. Within a kind first come, first served, batched by policy and spec.
- ROLLOUT, EVAL and AUDIT are made by the newest published policy only; EXPLORE by the one in its key, which
  is at most one publication behind when it is submitted.
- A lease is one forward pass: `batch_size` requests of its worker, or what is left. More would leave others
  idle at the tail of a phase; less would gain nothing, since an engine pads every pass to `batch_size`.
- A lease ends with its results, at its deadline, or with its worker. What it leaves unfinished goes back to
  the head of the queue; after `max_attempts` leases a request has failed for good.
- A result is accepted once per key, from whoever was leased that key, even late, if it was made with the
  weights that were published.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from src.core.types import (
    Lease,
    PolicyVersion,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
)
from src.spot.messages import (
    Accept,
    Action,
    Close,
    Dismiss,
    Event,
    Fail,
    Finish,
    Forget,
    Grant,
    Heartbeat,
    Join,
    Leave,
    Lose,
    Publish,
    Pull,
    Reject,
    Results,
    Retire,
    Revoke,
    Submit,
    Tick,
    Withdraw,
)
from src.spot.queue import RequestQueue


@dataclass(slots=True)
class _Task:
    """A request until it is closed. Pending: neither `holder` nor `done`."""

    request: SampleRequest
    granted: list[tuple[str, int]] = field(default_factory=list)
    """(worker, lease) of every attempt."""
    holder: int | None = None
    """The lease that holds it now."""
    done: bool = False
    """It has a result, or has failed."""
    error: str = "no result came back"


@dataclass(slots=True)
class _Worker:
    batch_size: int
    kinds: tuple[RequestKind, ...]
    leases: set[int] = field(default_factory=set)


class Scheduler:
    """See the rules at the top of this module.

    Args:
        lease_s: how long a worker may hold a lease.
        heartbeat_timeout_s: silence after which a watched worker counts as frozen.
        max_attempts: leases per request.
        keep_versions: published policies that are never retired, counted from the newest.
    """

    def __init__(
        self,
        *,
        lease_s: float = 120.0,
        heartbeat_timeout_s: float = 10.0,
        max_attempts: int = 5,
        keep_versions: int = 3,
    ) -> None:
        for name, value in (("lease_s", lease_s), ("heartbeat_timeout_s", heartbeat_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
        if keep_versions < 2:
            raise ValueError(f"keep_versions must be at least 2, got {keep_versions}: EXPLORE may be one behind")
        self.lease_s = lease_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.max_attempts = max_attempts
        self.keep_versions = keep_versions
        self._versions: dict[PolicyVersion, str] = {}  # version -> checksum, oldest first
        self._tasks: dict[RequestKey, _Task] = {}
        self._unfinished: Counter[RequestKind] = Counter()
        self._queue = RequestQueue()
        self._workers: dict[str, _Worker] = {}
        self._seen_s: OrderedDict[str, float] = OrderedDict()  # watched workers, longest silent first
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._leases: OrderedDict[int, Grant] = OrderedDict()  # outstanding, nearest deadline first
        self._next_lease = 0

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest published policy."""
        return next(reversed(self._versions), None)

    @property
    def unfinished(self) -> int:
        """Requests that wait for a result."""
        return self._unfinished.total()

    def handle(self, now_s: float, event: Event) -> list[Action]:
        """Takes one event and returns what follows from it, in order.

        `now_s` never decreases. Raises ValueError, and changes nothing, for what a correct caller never does:
        a second worker of the same name, a key that is open already, a policy that is unknown, too old or
        going backwards.
        """
        match event:
            case Heartbeat(worker):
                return self._heard(now_s, worker)
            case Pull(worker):
                return self._pull(now_s, worker)
            case Results(worker, lease, results):
                return self._results(now_s, worker, lease, results)
            case Submit(requests):
                return self._submit(now_s, requests)
            case Close(keys):
                return self._close(keys)
            case Tick():
                return self._tick(now_s)
            case Withdraw(worker):
                self._waiting.pop(worker, None)
                return []
            case Publish(version, checksum):
                return self._publish(version, checksum)
            case Join():
                return self._join(now_s, event)
            case Leave(worker, reason):
                return self._lose(now_s, worker, reason)

    # Workers

    def _join(self, now_s: float, join: Join) -> list[Action]:
        name = join.member.name
        if name in self._workers:
            raise ValueError(f"worker {name} has joined already")
        if join.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {join.batch_size}")
        self._workers[name] = _Worker(join.batch_size, tuple(sorted(join.kinds)))
        if join.watched:
            self._seen_s[name] = now_s
        return []

    def _heard(self, now_s: float, worker: str) -> list[Action]:
        if worker in self._seen_s:
            self._seen_s[worker] = now_s
            self._seen_s.move_to_end(worker)
        return []

    def _lose(self, now_s: float, worker: str, reason: str) -> list[Action]:
        gone = self._workers.pop(worker, None)
        if gone is None:
            return []
        self._seen_s.pop(worker, None)
        self._waiting.pop(worker, None)
        revoked = [self._revoke(lease, reason) for lease in sorted(gone.leases, reverse=True)]
        unfinished = sum(revoke.unfinished for revoke, _ in revoked)
        actions: list[Action] = [Lose(worker, reason, unfinished)]
        for revoke, failed in revoked:
            actions += [revoke, *failed]
        return actions + self._dispatch(now_s)

    def _tick(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        while self._seen_s and now_s - next(iter(self._seen_s.values())) > self.heartbeat_timeout_s:
            actions += self._lose(now_s, next(iter(self._seen_s)), "frozen")
        while self._leases and now_s > next(iter(self._leases.values())).lease.deadline_s:
            revoke, failed = self._revoke(next(iter(self._leases)), "deadline")
            actions += [revoke, *failed]
        return actions + self._dispatch(now_s)

    # Policies

    def _publish(self, version: PolicyVersion, checksum: str) -> list[Action]:
        newest = self.newest
        if newest is not None and version <= newest:
            raise ValueError(f"policy {version} is not newer than the published {newest}")
        for kind in (RequestKind.ROLLOUT, RequestKind.EVAL, RequestKind.AUDIT):
            if count := self._unfinished[kind]:
                raise ValueError(f"policy {version} would replace the one that {count} open {kind.name}s need")
        self._versions[version] = checksum
        used = {grant.lease.policy for grant in self._leases.values()}
        used |= self._queue.policies()
        old = list(self._versions)[: -self.keep_versions]
        retired = [known for known in old if known not in used]
        for known in retired:
            del self._versions[known]
        return [Retire(known) for known in retired]

    def _check_policy(self, key: RequestKey) -> None:
        allowed = list(islice(reversed(self._versions), 2 if key.kind is RequestKind.EXPLORE else 1))
        if key.policy not in allowed:
            state = "an older one" if key.policy in self._versions else "not known"
            names = " or ".join(map(str, allowed)) or "none yet"
            raise ValueError(f"{key.kind.name} needs a published policy ({names}); {key.policy} is {state}")

    # Requests

    def _submit(self, now_s: float, requests: Sequence[SampleRequest]) -> list[Action]:
        keys = {request.key for request in requests}
        if len(keys) < len(requests):
            raise ValueError("the same request is submitted twice")
        for request in requests:
            if request.key in self._tasks:
                raise ValueError(f"request is open already: {request.key}")
            self._check_policy(request.key)
        for request in requests:
            self._tasks[request.key] = _Task(request)
            self._unfinished[request.key.kind] += 1
            self._queue.append(request)
        return self._dispatch(now_s)

    def _close(self, keys: Iterable[RequestKey]) -> list[Action]:
        accepted: Counter[tuple[RequestKind, int]] = Counter()
        closed: Counter[tuple[RequestKind, int]] = Counter()
        for key in keys:
            task = self._tasks.pop(key, None)
            if task is None:
                continue
            closed[key.kind, key.iteration] += 1
            if task.done:
                accepted[key.kind, key.iteration] += 1
            else:
                self._settle(task)
        return [Forget(*group, accepted[group], count - accepted[group]) for group, count in closed.items()]

    def _results(self, now_s: float, worker: str, lease: int, results: Sequence[SampleResult]) -> list[Action]:
        self._heard(now_s, worker)
        actions: list[Action] = []
        grant = self._leases.get(lease)
        outstanding = grant is not None and grant.worker == worker
        for result in results:
            task = self._tasks.get(result.key)
            reason = self._objection(task, worker, lease, result)
            if reason == "unknown" and grant is not None and outstanding:
                reason = "closed" if any(r.key == result.key for r in grant.lease.requests) else reason
            if reason is not None:
                actions.append(Reject(worker, result.key, reason))
                if task is not None and task.holder == lease:
                    task.error = f"result of {worker} rejected: {reason}"
            elif task is not None and result.error is not None:
                task.error = result.error
            elif task is not None:
                self._settle(task)
                actions.append(Accept(result))
        if grant is not None and outstanding:
            self._end(grant)
            actions += [Finish(worker, grant.lease), *self._give_back(grant.lease)]
        return actions + self._dispatch(now_s)

    def _objection(self, task: _Task | None, worker: str, lease: int, result: SampleResult) -> str | None:
        """Why a result does not count, or None."""
        if task is None:
            return "unknown"
        if task.done:
            return "duplicate"
        if (worker, lease) not in task.granted:
            return "not leased"
        if result.error is None and result.weights_checksum != self._versions[result.key.policy]:
            return "checksum"
        return None

    # Leases

    def _pull(self, now_s: float, worker: str) -> list[Action]:
        if worker not in self._workers:
            return [Dismiss(worker)]
        self._heard(now_s, worker)
        self._waiting[worker] = None
        return self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> list[Action]:
        """Gives work to those who wait, in order of arrival."""
        grants = []
        for name in self._waiting:
            if not self._queue:
                break
            worker = self._workers[name]
            if batch := self._queue.take(worker.kinds, worker.batch_size):
                lease = Lease(self._next_lease, batch, now_s + self.lease_s)
                self._next_lease += 1
                grants.append(Grant(name, lease))
        for grant in grants:
            self._hand_over(grant)
        return list(grants)

    def _hand_over(self, grant: Grant) -> None:
        worker, lease = grant.worker, grant.lease
        del self._waiting[worker]
        self._leases[lease.id] = grant
        self._workers[worker].leases.add(lease.id)
        for request in lease.requests:
            task = self._tasks[request.key]
            task.holder = lease.id
            task.granted.append((worker, lease.id))

    def _end(self, grant: Grant) -> None:
        del self._leases[grant.lease.id]
        if grant.worker in self._workers:
            self._workers[grant.worker].leases.discard(grant.lease.id)

    def _revoke(self, lease: int, reason: str) -> tuple[Revoke, list[Fail]]:
        grant = self._leases[lease]
        unfinished = 0
        for request in grant.lease.requests:
            task = self._tasks.get(request.key)
            if task is not None and task.holder == lease:
                unfinished += 1
                task.error = f"lease of {grant.worker} ended: {reason}"
        self._end(grant)
        return Revoke(grant.worker, grant.lease, unfinished, reason), self._give_back(grant.lease)

    def _give_back(self, lease: Lease) -> list[Fail]:
        """Puts what the lease left unfinished back to the head of its queue, in order, or gives it up."""
        failed = []
        for request in reversed(lease.requests):
            task = self._tasks.get(request.key)
            if task is None or task.holder != lease.id:
                continue
            task.holder = None
            attempts = len(task.granted)
            if attempts >= self.max_attempts:
                self._settle(task)
                failed.append(Fail(request.key, attempts, task.error))
            else:
                self._queue.prepend(request)
        return failed[::-1]

    def _settle(self, task: _Task) -> None:
        """The request needs no more work, wherever it is."""
        task.done = True
        task.holder = None
        self._unfinished[task.request.key.kind] -= 1
        self._queue.discard(task.request)
