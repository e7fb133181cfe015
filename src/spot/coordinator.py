"""What the coordinator knows: queue, results, event log, metrics and news, behind plain method calls.

No Ray, no threads, no waiting: `host.Host` puts it behind Ray, `inline.InlineCluster` calls it directly.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from src.core.clock import Clock, RunClock, monotonic_s, wall_s
from src.core.events import JsonLines, read_jsonl
from src.core.protocols import Engine
from src.core.types import (
    Commit,
    Lease,
    Member,
    PolicyVersion,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
    WorkReport,
)
from src.spot import messages as m
from src.spot import weights
from src.spot.cost import Ledger
from src.spot.scheduler import Scheduler

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"
WEIGHTS_FOLDER = "weights"
HEARTBEATS = 5
"""Signs of life that fit into the silence after which a worker counts as frozen: some may be late or lost."""
NEWS_KEPT = 20_000
"""Rows of news that a slow reader may lag behind before it misses some."""


class CoordinatorLost(RuntimeError):
    """The coordinator died. Its state died with it: the job ends and goes on from its checkpoint."""

    def __init__(self) -> None:
        super().__init__("the coordinator died, and with it the queue of this run: resume from the last checkpoint")


@dataclass(frozen=True)
class News:
    """What was logged since a cursor; `cursor` is where to read on."""

    cursor: int
    events: list[dict[str, Any]]
    metrics: list[dict[str, Any]]


@dataclass(frozen=True)
class Introduction:
    """What a process must know of the run to take part in it."""

    run: str
    incarnation: int
    """How many times the run was started before."""
    weights_root: Path
    """Where policies are published."""
    elapsed_s: float
    """Seconds since the start of the run."""
    heartbeat_s: float
    """How often to show signs of life."""


@dataclass(frozen=True)
class Lost:
    """A worker that is no member any more, and the process that it was."""

    worker: str
    reason: str
    pid: int


@dataclass(frozen=True)
class Joined:
    """What a worker says of itself when it joins."""

    member: Member
    pid: int
    batch_size: int
    fingerprint: str
    kinds: frozenset[RequestKind] = m.EVERY_KIND
    watched: bool = True
    """Whether its silence means that it is frozen. Training ranks are silent for a whole training phase."""


RESERVED_KINDS = frozenset({RequestKind.ROLLOUT, RequestKind.EVAL})


def reserved(member: Member, engine: Engine) -> Joined:
    """A training rank joins: it serves only what its training waits for, and is silent while it trains."""
    return Joined(member, os.getpid(), engine.batch_size, engine.fingerprint, RESERVED_KINDS, watched=False)


class Coordinator:
    """Applies what the scheduler decides, keeps results until they are taken, and logs all of it.

    A run that goes on in the folder of an earlier one continues its event log and its time axis, under the
    next `incarnation`.

    Args:
        run: name of the run; it is part of every request key.
        folder: run folder: events.jsonl, metrics.jsonl and published weights are in it.
        scheduler: the decider.
        iteration: where the run goes on; metrics rows beyond it are cut off.
        ledger: adds up what the run costs, which is then logged with the metrics of each iteration.
        now: what the time axis of the run is read from.
        start_wall_s: when the run starts, in seconds since the epoch, if it is not now.
    """

    def __init__(
        self,
        *,
        run: str,
        folder: Path,
        scheduler: Scheduler,
        iteration: int = 0,
        ledger: Ledger | None = None,
        now: Clock = monotonic_s,
        start_wall_s: float | None = None,
    ) -> None:
        incarnation, elapsed_s = _earlier_life(folder / EVENTS_FILE, ledger)
        self.now = RunClock(elapsed_s=elapsed_s, now=now)
        self.stop_requested = False
        self.granted: dict[str, Lease] = {}
        """Leases that were granted and not yet fetched, by worker."""
        self.lost: deque[Lost] = deque()
        """Workers that were lost and not yet noticed by whoever replaces them."""
        self._run = run
        self._incarnation = incarnation
        self._weights_root = folder / WEIGHTS_FOLDER
        self._scheduler = scheduler
        self._ledger = ledger
        self._priced = iteration
        self._members: dict[str, Joined] = {}
        self._noticed: set[str] = set()
        self._expected_s: dict[str, float] = {}
        self._staff: int | None = None
        self._results: dict[RequestKey, SampleResult] = {}
        self._retired: list[PolicyVersion] = []
        self._news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=NEWS_KEPT)
        self._told = 0
        self._events = JsonLines(folder / EVENTS_FILE)
        self._metrics = JsonLines(folder / METRICS_FILE)
        self.record(
            "run_started",
            run=run,
            incarnation=incarnation,
            iteration=iteration,
            start_wall_s=wall_s() if start_wall_s is None else start_wall_s,
        )
        weights.remove(self._weights_root, weights.versions(self._weights_root))  # of an earlier life
        self.resume(iteration)

    def introduce(self) -> Introduction:
        heartbeat_s = self._scheduler.heartbeat_timeout_s / HEARTBEATS
        return Introduction(self._run, self._incarnation, self._weights_root, self.now(), heartbeat_s)

    # Workers

    def expect(self, worker: str) -> None:
        """The worker is wanted from now on: the log tells how long it took to its first lease."""
        self._expected_s[worker] = self.now()

    def staff(self, workers: int) -> None:
        """So many spot workers live or are still to come, says who starts them."""
        self._staff = workers

    @property
    def is_forsaken(self) -> bool:
        """No spot worker lives, and none is to come."""
        return self._staff == 0 and self.workers() == 0

    def join(self, joined: Joined) -> Introduction:
        """The worker is a member from now on."""
        member = joined.member
        self._do(m.Join(member, joined.batch_size, joined.kinds, joined.watched))
        self._members[member.name] = joined
        self.record(
            "worker_joined",
            worker=member.name,
            **asdict(member),
            pid=joined.pid,
            fingerprint=joined.fingerprint,
        )
        return self.introduce()

    def leave(self, worker: str, reason: str) -> bool:
        """The worker is gone, say those who watch it. Returns whether it was a member until now."""
        return bool(self._do(m.Leave(worker, reason)))

    def heartbeat(self, worker: str) -> None:
        self._do(m.Heartbeat(worker))

    def pull(self, worker: str) -> bool:
        """Asks for a lease, which appears in `granted`, now or later; False if the worker is no member any
        more."""
        return not any(isinstance(action, m.Dismiss) for action in self._do(m.Pull(worker)))

    def withdraw(self, worker: str) -> None:
        """The worker no longer waits for a lease."""
        self._do(m.Withdraw(worker))

    def notice(self, worker: str, grace_s: float) -> None:
        """The worker will be gone in `grace_s` seconds."""
        self._do(m.Notice(worker, self.now() + grace_s))

    def commit(self, worker: str, lease: int, step: int, commits: Sequence[Commit]) -> None:
        """Takes how far a worker is with a lease, and from where it could go on elsewhere."""
        self._do(m.Commits(worker, lease, step, commits))

    def push(self, worker: str, lease: int, results: Sequence[SampleResult], report: WorkReport) -> None:
        """Takes what the worker made under a lease."""
        for action in self._do(m.Results(worker, lease, results)):
            if isinstance(action, m.Finish):
                self.record("lease_done", **_describe(worker, action.lease), **asdict(report))

    def tick(self) -> bool:
        """To be called a few times a second: finds frozen workers and leases that are over. Returns whether there were
        any."""
        return bool(self._do(m.Tick()))

    def is_wanted(self, worker: str) -> bool:
        """Whether the worker may get leases: it is a member and under no notice."""
        return worker in self._members and worker not in self._noticed

    def checksum(self, version: PolicyVersion) -> str:
        """Of a published policy that was not retired."""
        return self._scheduler.checksum(version)

    def workers(self) -> int:
        """Live spot workers."""
        return sum(joined.member.role == "spot" for joined in self._members.values())

    # The trainer

    def publish(self, version: PolicyVersion, checksum: str, size_bytes: int, publish_s: float) -> list[PolicyVersion]:
        """Policy `version` can be pulled from now on; returns those whose weights may be deleted."""
        self._do(m.Publish(version, checksum))
        self.record(
            "policy_published",
            version=str(version),
            checksum=checksum,
            bytes=size_bytes,
            publish_s=publish_s,
        )
        retired, self._retired = self._retired, []
        return retired

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        event = m.Submit(requests)
        actions = self._scheduler.handle(self.now(), event)
        for (kind, iteration), count in Counter((r.key.kind, r.key.iteration) for r in requests).items():
            self.record("submitted", **_batch(kind, iteration), count=count)
        self._apply(actions)

    def complete(self, keys: Iterable[RequestKey]) -> bool:
        """Whether every key has its result."""
        return all(key in self._results for key in keys)

    def close(self, keys: Sequence[RequestKey]) -> list[SampleResult]:
        """Hands out the results that have come, in order of the keys, and forgets the keys."""
        results = [self._results.pop(key) for key in keys if key in self._results]
        self._do(m.Close(keys))
        return results

    def give_up(self, keys: Iterable[RequestKey]) -> None:
        """Nobody waits any longer for those that have no result: no worker is left to make them."""
        missing = Counter((key.kind, key.iteration) for key in keys if key not in self._results)
        for (kind, iteration), count in missing.items():
            self.record("wait_given_up", **_batch(kind, iteration), missing=count)

    def stop(self, signal: str) -> None:
        """The user wants the job to finish and save."""
        if not self.stop_requested:
            self.stop_requested = True
            self.record("stop_requested", signal=signal)

    # Logs

    def record(self, kind: str, **fields: Any) -> None:
        """Appends one event to the event log."""
        row = {"time_s": round(self.now(), 6), "kind": kind, **fields}
        self._events.append(row)
        if self._ledger is not None:
            self._ledger.add(row)
        self._tell("event", row)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one row to the metrics."""
        cost: Mapping[str, float] = {}
        if self._ledger is not None and step > self._priced:
            self._priced = step
            cost = self._ledger.cost.metrics()
        row = {"step": step, "time_s": round(self.now(), 6), **metrics, **cost}
        self._metrics.append(row)
        self._tell("metrics", row)

    def resume(self, iteration: int) -> None:
        """The run goes on at `iteration`: metrics beyond it, of work that was lost, are cut off."""
        path = self._metrics.path
        self._metrics.close()
        kept = [row for row in read_jsonl(path) if row["step"] <= iteration]
        draft = path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in kept))
        os.replace(draft, path)
        self._metrics = JsonLines(path)

    def shutdown(self) -> None:
        """Closes the log files."""
        self._events.close()
        self._metrics.close()

    def has_news(self, cursor: int) -> bool:
        return self._told > cursor

    def news(self, cursor: int) -> News:
        """Events and metrics that were logged since `cursor` (0 at first)."""
        fresh = min(self._told - cursor, len(self._news))
        rows = list(islice(self._news, len(self._news) - fresh, None))
        return News(
            self._told,
            [row for feed, row in rows if feed == "event"],
            [row for feed, row in rows if feed == "metrics"],
        )

    def _tell(self, feed: str, row: dict[str, Any]) -> None:
        self._news.append((feed, row))
        self._told += 1

    # Applying decisions

    def _do(self, event: m.Event) -> list[m.Action]:
        actions = self._scheduler.handle(self.now(), event)
        self._apply(actions)
        return actions

    def _apply(self, actions: Iterable[m.Action]) -> None:
        for action in actions:
            match action:
                case m.Grant(worker, lease, after):
                    self._grant(worker, lease, after)
                case m.Accept(result):
                    self._results[result.key] = result
                case m.Reject(worker, key, reason):
                    self.record("result_rejected", worker=worker, **_sample(key), reason=reason)
                case m.Fail(key, attempts, error):
                    self._results[key] = SampleResult(key, worker="", weights_checksum="", error=error)
                    self.record("request_failed", **_sample(key), attempts=attempts, error=error)
                case m.Revoke():
                    self._revoke(action)
                case m.Warned(worker, deadline_s, unfinished):
                    self._noticed.add(worker)
                    grace_s = round(deadline_s - self.now(), 6)
                    self.record("notice", worker=worker, grace_s=grace_s, requests=unfinished)
                case m.Lose(worker, reason, unfinished):
                    self._noticed.discard(worker)
                    self.lost.append(Lost(worker, reason, self._members.pop(worker).pid))
                    self.record("worker_lost", worker=worker, reason=reason, requests=unfinished)
                case m.Forget(kind, iteration, accepted, dropped):
                    self.record("closed", **_batch(kind, iteration), accepted=accepted, dropped=dropped)
                case m.Retire(version):
                    self._retired.append(version)
                case m.Finish() | m.Dismiss() | m.Progress():
                    pass  # for the worker that asked: see push, pull and commit

    def _grant(self, worker: str, lease: Lease, after: Sequence[int]) -> None:
        self.granted[worker] = lease
        fields: dict[str, Any] = {"version": str(lease.policy)}
        if worker in self._expected_s:
            fields["start_s"] = round(self.now() - self._expected_s.pop(worker), 6)
        self.record("lease_granted", **_describe(worker, lease), **fields)
        if lease.resume:
            self.record("lease_resumed", **_describe(worker, lease), step=lease.step, after=list(after))

    def _revoke(self, revoked: m.Revoke) -> None:
        if self.granted.get(revoked.worker) is revoked.lease:
            del self.granted[revoked.worker]
        self.record(
            "lease_lost",
            **{**_describe(revoked.worker, revoked.lease), "count": revoked.unfinished},
            reason=revoked.reason,
            committed_steps=revoked.committed_steps,
            lost_steps=revoked.lost_steps,
        )


def _earlier_life(events: Path, ledger: Ledger | None) -> tuple[int, float]:
    """(incarnation, seconds so far) of the run that goes on, from the event log that is there; the ledger reads it."""
    if not events.exists():
        return 0, 0.0
    incarnation, elapsed_s = 0, 0.0
    for event in read_jsonl(events):
        incarnation += event["kind"] == "run_started"
        elapsed_s = max(elapsed_s, event["time_s"])
        if ledger is not None:
            ledger.add(event)
    return incarnation, elapsed_s


def _batch(kind: RequestKind, iteration: int) -> dict[str, Any]:
    return {"request_kind": kind.name.lower(), "iteration": iteration}


def _sample(key: RequestKey) -> dict[str, Any]:
    return {**_batch(key.kind, key.iteration), "instance": key.instance, "seed": key.seed}


def _describe(worker: str, lease: Lease) -> dict[str, Any]:
    iteration = lease.requests[0].key.iteration
    return {
        "lease": lease.id,
        "worker": worker,
        **_batch(lease.kind, iteration),
        "count": len(lease.requests),
    }
