"""The queue: which worker makes which samples, told as a pure state machine.

`Scheduler.handle(now_s, event) -> actions` reads no clock, starts no thread and does no input or output, so
the real driver, a simulation and a test run the very same decisions. An event costs amortised constant time per
request it names, and whatever may free work looks at each waiting worker; `Publish` looks at all open leases.

Rules
- Workers pull. A worker that finds nothing waits, in order of arrival, until a request comes that it may
  serve.
- The smallest request kind goes first. Within a kind first come, first served, batched by policy and spec.
- ROLLOUT, EVAL and AUDIT are made by the newest published policy only; EXPLORE by the one in its key, which
  is at most one publication behind when it is submitted.
- A lease holds requests of one kind, policy, spec and committed step: as many as `sizing` says.
- A lease ends with its results, with its worker, or when it made no step for `lease_s`. What it leaves unfinished
  goes back to the head of the queue.
- A request is attempted `max_attempts` times. An attempt counts when it fails by itself: its result is an error or is
  rejected, or its worker fails by itself. A preemption, kill, freeze or missed deadline says nothing about the request
  and counts for nothing; but after `max_leases` leases, whatever became of them, it is given up too.
- Among equally urgent requests a worker gets those last whose attempt it has just spoilt, and others who wait for
  them go first.
- A commit counts if it comes from the worker that holds the request and is ahead of the one before. A request goes on
  from its commit, on any worker; its key names its policy, so never under another one. A sample that failed starts
  from the beginning.
- A worker may give a lease back when all of its requests were closed: it is then `dropped`.
- A worker under notice gets nothing more. It may finish or commit what it holds; at its deadline at the latest it is
  gone, as `preempted`. Of several notices the earliest deadline counts.
- A result is accepted once per key, from whoever was leased that key, even late, if it was made with the
  weights that were published.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set
from math import inf

from src.core.types import (
    Commit,
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
    Commits,
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
    Notice,
    Progress,
    Publish,
    Pull,
    Reject,
    Results,
    Retire,
    Revoke,
    Submit,
    Tick,
    Warned,
    Withdraw,
)
from src.spot.queue import RequestQueue
from src.spot.records import OpenLease, Task, WorkerState
from src.spot.sizing import lease_size, passes_of
from src.spot.versions import PolicyVersions


class Scheduler:
    """See the rules at the top of this module.

    Args:
        lease_s: how long a worker may hold a lease without making a step. Long beside anything that it does meanwhile
            (loading weights, a step, decoding and scoring): who dies or freezes is found by its heartbeats, earlier.
        heartbeat_timeout_s: silence after which a watched worker counts as frozen.
        max_attempts: failures of a request.
        max_leases: leases of a request, so that none goes round for ever.
        keep_versions: published policies that are never retired, counted from the newest.
        lease_target_s: what a lease should take; 0 makes every lease one forward pass.
    """

    def __init__(
        self,
        *,
        lease_s: float = 120.0,
        heartbeat_timeout_s: float = 10.0,
        max_attempts: int = 5,
        max_leases: int = 50,
        keep_versions: int = 3,
        lease_target_s: float = 0.0,
    ) -> None:
        for name, value in (("lease_s", lease_s), ("heartbeat_timeout_s", heartbeat_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
        if max_leases < max_attempts:
            raise ValueError(f"max_leases must be at least max_attempts={max_attempts}, got {max_leases}")
        if not lease_target_s >= 0:
            raise ValueError(f"lease_target_s must not be negative, got {lease_target_s}")
        self.lease_s = lease_s
        self.lease_target_s = lease_target_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.max_attempts = max_attempts
        self.max_leases = max_leases
        self._versions = PolicyVersions(keep_versions)
        self._tasks: dict[RequestKey, Task] = {}
        self._unfinished: Counter[RequestKind] = Counter()
        self._queue = RequestQueue()
        self._workers: dict[str, WorkerState] = {}
        self._seen_s: OrderedDict[str, float] = OrderedDict()  # watched workers, longest silent first
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._serving: Counter[RequestKind] = Counter()  # workers that may get leases of a kind
        self._noticed: dict[str, None] = {}
        self._leases: OrderedDict[int, OpenLease] = OrderedDict()  # nearest deadline first
        self._next_lease = 0

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest published policy."""
        return self._versions.newest

    def checksum(self, version: PolicyVersion) -> str:
        """Of a published policy that was not retired."""
        return self._versions.checksum(version)

    def is_wanted(self, lease: int) -> bool:
        """Whether somebody still waits for one of the lease's requests. One that has ended may still bring a result."""
        open_ = self._leases.get(lease)
        return open_ is None or any(self._holds(open_, request) for request in open_.lease.requests)

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
            case Commits(worker, lease, step, commits):
                return self._progress(now_s, worker, lease, step, commits)
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
            case Notice(worker, deadline_s):
                return self._notice(now_s, worker, deadline_s)
            case Leave(worker, reason):
                return self._lose(now_s, worker, reason)

    # Workers

    def _join(self, now_s: float, join: Join) -> list[Action]:
        name = join.member.name
        if name in self._workers:
            raise ValueError(f"worker {name} has joined already")
        if join.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {join.batch_size}")
        self._workers[name] = WorkerState(join.batch_size, tuple(sorted(join.kinds)))
        self._serving.update(join.kinds)
        if join.watched:
            self._seen_s[name] = now_s
        return []

    def _heard(self, now_s: float, worker: str) -> list[Action]:
        if worker in self._seen_s:
            self._seen_s[worker] = now_s
            self._seen_s.move_to_end(worker)
        return []

    def _notice(self, now_s: float, worker: str, deadline_s: float) -> list[Action]:
        state = self._workers.get(worker)
        if state is None or deadline_s == inf:
            return []
        known = worker in self._noticed
        state.gone_s = min(state.gone_s, deadline_s)
        if known:
            return []
        self._noticed[worker] = None
        self._serving.subtract(state.kinds)
        held = sum(self._held(self._leases[lease]) for lease in state.leases)
        warned = Warned(worker, deadline_s, held)
        if worker not in self._waiting:
            return [warned]
        del self._waiting[worker]
        return [warned, Dismiss(worker)]

    def _lose(self, now_s: float, worker: str, reason: str) -> list[Action]:
        gone = self._workers.pop(worker, None)
        if gone is None:
            return []
        self._seen_s.pop(worker, None)
        self._waiting.pop(worker, None)
        if worker in self._noticed:
            del self._noticed[worker]
            reason = reason if reason == "failed" else "preempted"
        else:
            self._serving.subtract(gone.kinds)
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
        for worker in [name for name in self._noticed if now_s > self._workers[name].gone_s]:
            actions += self._lose(now_s, worker, "preempted")
        while self._leases and now_s > next(iter(self._leases.values())).deadline_s:
            revoke, failed = self._revoke(next(iter(self._leases)), "deadline")
            actions += [revoke, *failed]
        return actions + self._dispatch(now_s)

    # Policies

    def _publish(self, version: PolicyVersion, checksum: str) -> list[Action]:
        self._versions.check_newer(version)
        for kind in (RequestKind.ROLLOUT, RequestKind.EVAL, RequestKind.AUDIT):
            if count := self._unfinished[kind]:
                raise ValueError(f"policy {version} would replace the one that {count} open {kind.name}s need")
        self._versions.publish(version, checksum)
        used = {open_.lease.policy for open_ in self._leases.values()} | self._queue.policies()
        return [Retire(known) for known in self._versions.retire(used)]

    # Requests

    def _submit(self, now_s: float, requests: Sequence[SampleRequest]) -> list[Action]:
        keys = {request.key for request in requests}
        if len(keys) < len(requests):
            raise ValueError("the same request is submitted twice")
        for request in requests:
            if request.key in self._tasks:
                raise ValueError(f"request is open already: {request.key}")
            self._versions.check(request.key)
        for request in requests:
            self._tasks[request.key] = Task(request)
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

    def _progress(self, now_s: float, worker: str, lease: int, step: int, commits: Sequence[Commit]) -> list[Action]:
        self._heard(now_s, worker)
        open_ = self._leases.get(lease)
        if open_ is None or open_.worker != worker:
            return [Progress(worker, lease, 0, len(commits))] if commits else []
        if step > open_.step:
            open_.step = step
            open_.deadline_s = now_s + self.lease_s
            self._leases.move_to_end(lease)
        accepted = 0
        for commit in commits:
            task = self._tasks.get(commit.key)
            if task is not None and task.holder == lease and self._counts(commit, task, open_):
                task.commit = commit
                accepted += 1
        return [Progress(worker, lease, accepted, len(commits) - accepted)] if commits else []

    def _counts(self, commit: Commit, task: Task, open_: OpenLease) -> bool:
        """Whether a commit of the request's holder is ahead, where the worker may be, and of the right weights."""
        right = commit.weights_checksum == self._versions.checksum(commit.key.policy)
        return right and task.step < commit.step <= min(open_.step, task.request.spec.steps)

    def _results(self, now_s: float, worker: str, lease: int, results: Sequence[SampleResult]) -> list[Action]:
        self._heard(now_s, worker)
        actions: list[Action] = []
        spoilt: set[RequestKey] = set()
        open_ = self._leases.get(lease)
        outstanding = open_ is not None and open_.worker == worker
        for result in results:
            task = self._tasks.get(result.key)
            error, reason = result.error, self._objection(task, worker, lease, result)
            if reason == "unknown" and open_ is not None and outstanding:
                reason = "closed" if any(r.key == result.key for r in open_.lease.requests) else reason
            if reason is not None:
                actions.append(Reject(worker, result.key, reason))
                error = f"result of {worker} rejected: {reason}"
            elif task is not None and error is None:
                self._settle(task)
                actions.append(Accept(result))
            if task is not None and task.holder == lease and outstanding and error is not None:
                spoilt.add(result.key)
                task.error = error
                if reason is None:
                    task.commit = None
        if open_ is not None and outstanding:
            actions += self._returned(now_s, open_, spoilt) if results else self._given_back(open_)
        return actions + self._dispatch(now_s)

    def _returned(self, now_s: float, open_: OpenLease, spoilt: Set[RequestKey]) -> list[Action]:
        """The lease came back from its worker with results."""
        worker, lease = self._workers[open_.worker], open_.lease
        worker.speed.measured(
            now_s - open_.granted_s,
            passes=passes_of(len(lease.requests), worker.batch_size),
            steps=lease.requests[0].spec.steps - lease.step,
        )
        self._end(open_)
        return [Finish(open_.worker, lease), *self._give_back(open_, spoilt)]

    def _given_back(self, open_: OpenLease) -> list[Action]:
        """The lease came back from its worker with nothing but commits, as is to be expected after a notice, and when
        all of its requests were closed."""
        reason = "given back" if self._held(open_) else "dropped"
        if open_.worker in self._noticed:
            reason = "preempted"
        revoke, failed = self._revoke(open_.lease.id, reason, in_hand=0)
        return [revoke, *failed]

    def _objection(self, task: Task | None, worker: str, lease: int, result: SampleResult) -> str | None:
        """Why a result does not count, or None."""
        if task is None:
            return "unknown"
        if task.done:
            return "duplicate"
        if (worker, lease) not in task.granted:
            return "not leased"
        if result.error is None and result.weights_checksum != self._versions.checksum(result.key.policy):
            return "checksum"
        return None

    # Leases

    def _pull(self, now_s: float, worker: str) -> list[Action]:
        if worker not in self._workers or worker in self._noticed:
            return [Dismiss(worker)]
        self._heard(now_s, worker)
        self._waiting[worker] = None
        return self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> list[Action]:
        """Gives work to those who wait, in order of arrival; what they spoilt themselves only if nobody else takes
        it."""
        if not self._queue:
            return []
        grants = [
            self._grant(now_s, name, batch)
            for choosy in (True, False)
            for name in list(self._waiting)
            if self._queue and (batch := self._take(name, choosy=choosy))
        ]
        return list(grants)

    def _take(self, name: str, *, choosy: bool) -> tuple[SampleRequest, ...]:
        worker = self._workers[name]
        return self._queue.take(
            worker.kinds,
            lambda kind, queued, steps: lease_size(
                queued=queued,
                steps=steps,
                batch_size=worker.batch_size,
                workers=self._serving[kind],
                speed=worker.speed,
                target_s=self.lease_target_s,
            ),
            worker=name,
            choosy=choosy,
        )

    def _grant(self, now_s: float, worker: str, batch: tuple[SampleRequest, ...]) -> Grant:
        tasks = [self._tasks[request.key] for request in batch]
        commits = tuple(task.commit for task in tasks if task.commit is not None)
        deadline_s = now_s + self.lease_s
        lease = Lease(self._next_lease, batch, deadline_s, commits)
        self._next_lease += 1
        self._leases[lease.id] = OpenLease(worker, lease, now_s, deadline_s, lease.step)
        self._workers[worker].leases.add(lease.id)
        del self._waiting[worker]
        after = {task.granted[-1][1] for task in tasks if task.granted}
        for task in tasks:
            task.holder = lease.id
            task.granted.append((worker, lease.id))
        return Grant(worker, lease, tuple(sorted(after)))

    def _held(self, open_: OpenLease) -> int:
        """Requests of the lease that are still open and its own."""
        return sum(self._holds(open_, request) for request in open_.lease.requests)

    def _holds(self, open_: OpenLease, request: SampleRequest) -> bool:
        task = self._tasks.get(request.key)
        return task is not None and task.holder == open_.lease.id

    def _end(self, open_: OpenLease) -> None:
        del self._leases[open_.lease.id]
        if open_.worker in self._workers:
            self._workers[open_.worker].leases.discard(open_.lease.id)

    def _revoke(self, lease: int, reason: str, *, in_hand: int = 1) -> tuple[Revoke, list[Fail]]:
        """Ends a lease; `in_hand` steps beyond what its worker told were begun."""
        open_ = self._leases[lease]
        spoilt = {request.key for request in open_.lease.requests} if reason == "failed" else set()
        unfinished = committed = lost = 0
        for request in open_.lease.requests:
            task = self._tasks.get(request.key)
            if task is not None and task.holder == lease:
                unfinished += 1
                committed += task.step - open_.lease.step
                lost += min(open_.step + in_hand, request.spec.steps) - task.step
                task.error = f"lease of {open_.worker} ended: {reason}"
        self._end(open_)
        revoke = Revoke(open_.worker, open_.lease, unfinished, reason, committed, lost)
        return revoke, self._give_back(open_, spoilt)

    def _give_back(self, open_: OpenLease, spoilt: Set[RequestKey]) -> list[Fail]:
        """Puts what the lease left unfinished back to the head of its queue, in order, or gives it up.

        `spoilt` are those whose attempt counts.
        """
        failed = []
        for request in reversed(open_.lease.requests):
            task = self._tasks.get(request.key)
            if task is None or task.holder != open_.lease.id:
                continue
            task.holder = None
            if request.key in spoilt:
                task.failures += 1
                task.spoilt_by = open_.worker
            if task.failures >= self.max_attempts:
                failed.append(Fail(request.key, task.failures, task.error))
            elif len(task.granted) >= self.max_leases:
                error = f"given up after {len(task.granted)} leases: {task.error}"
                failed.append(Fail(request.key, task.failures, error))
            else:
                self._queue.prepend(request, task.step, task.spoilt_by)
                continue
            self._settle(task)
        return failed[::-1]

    def _settle(self, task: Task) -> None:
        """The request needs no more work, wherever it is."""
        if task.holder is None:
            self._queue.discard(task.request, task.step, task.spoilt_by)
        task.done = True
        task.holder = None
        task.commit = None
        self._unfinished[task.request.key.kind] -= 1
