"""What the coordinator knows: queue, results, planner and logs, behind plain method calls.

No Ray, no threads, no waiting: `host.Host` puts it behind Ray, `inline.InlineCluster` calls it directly.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from src.core.clock import Clock, monotonic_s, wall_s
from src.core.stats import mean
from src.core.types import (
    Commit,
    Exploration,
    Lease,
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
from src.spot.exploring import OpenExploration, PlannerFeed, asked_rows, decisions, opening
from src.spot.members import Introduction, Joined, Lost, Store
from src.spot.planning.protocol import Action as Plan
from src.spot.planning.protocol import Planner
from src.spot.planning.simple import NoExploration
from src.spot.run_log import RunLog
from src.spot.scheduler import Scheduler
from src.spot.spot_training import SpotTraining
from src.spot.teams import Teams

WEIGHTS_FOLDER = "weights"
HEARTBEATS = 5
"""Signs of life that fit into the silence after which a worker counts as frozen: some may be late or lost."""


class CoordinatorLost(RuntimeError):
    """The coordinator died. Its state died with it: the job ends and goes on from its checkpoint."""

    def __init__(self) -> None:
        super().__init__("the coordinator died, and with it the queue of this run: resume from the last checkpoint")


class Coordinator:
    """Applies what scheduler and planner decide, keeps results until they are taken, and logs all of it.

    The planner is told whatever is logged (`exploring.PlannerFeed`); what it asks for is then submitted.

    Args:
        run: name of the run; it is part of every request key.
        folder: run folder: events.jsonl, metrics.jsonl and published weights are in it.
        scheduler: decides who makes which samples.
        planner: decides what is explored while exploration is open; nothing if None.
        store: through which elastic groups form, if there are to be any.
        iteration, ledger: see `RunLog`.
        now: what the time axis of the run is read from.
        start_wall_s: when the run starts, in seconds since the epoch, if it is not now.
    """

    def __init__(
        self,
        *,
        run: str,
        folder: Path,
        scheduler: Scheduler,
        planner: Planner | None = None,
        store: Store | None = None,
        iteration: int = 0,
        ledger: Ledger | None = None,
        now: Clock = monotonic_s,
        start_wall_s: float | None = None,
    ) -> None:
        self.log = RunLog(folder, iteration=iteration, ledger=ledger, now=now)
        self.now = self.log.now
        self.stop_requested = False
        self.granted: dict[str, Lease] = {}
        """Leases that were granted and not yet fetched, by worker."""
        self.lost: deque[Lost] = deque()
        """Workers that were lost and not yet noticed by whoever replaces them."""
        self._run = run
        self._weights_root = folder / WEIGHTS_FOLDER
        self._scheduler = scheduler
        self.teams = Teams(heartbeat_timeout_s=scheduler.heartbeat_timeout_s)
        """The elastic groups. What is told to them takes effect with `regroup`."""
        self._store = store
        self._feed = PlannerFeed(planner or NoExploration())
        self._plans: list[Plan] = []
        """What the planner wants and has not got yet."""
        self._exploring: OpenExploration | None = None
        self._training = SpotTraining()
        self._members: dict[str, Joined] = {}
        self._noticed: set[str] = set()
        self._expected_s: dict[str, float] = {}
        self._join_by_s: dict[str, float] = {}  # of those who have not come yet
        self._staff: int | None = None
        self._ticked_s = 0.0
        self._results: dict[RequestKey, SampleResult] = {}
        self._retired: list[PolicyVersion] = []
        self._behind_rollouts: list[Callable[[], None]] = []
        """What waits until rollouts are queued."""
        self.record(
            "run_started",
            run=run,
            incarnation=self.log.incarnation,
            iteration=iteration,
            start_wall_s=wall_s() if start_wall_s is None else start_wall_s,
        )
        weights.remove(self._weights_root, weights.versions(self._weights_root))  # of an earlier life

    def introduce(self) -> Introduction:
        heartbeat_s = self._scheduler.heartbeat_timeout_s / HEARTBEATS
        port = self._store.port if self._store else None
        return Introduction(self._run, self.log.incarnation, self._weights_root, self.now(), heartbeat_s, port)

    # Workers

    def expect(self, worker: str, within_s: float) -> None:
        """The worker is wanted from now on: the log tells how long it took to its first lease. Who has not come
        `within_s` seconds after this was told for the last time is lost."""
        self._expected_s.setdefault(worker, self.now())
        self._join_by_s[worker] = self.now() + within_s

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
        self._join_by_s.pop(member.name, None)
        self.record(
            "worker_joined",
            worker=member.name,
            **asdict(member),
            pid=joined.pid,
            fingerprint=joined.fingerprint,
            batch_size=joined.batch_size,
        )
        return self.introduce()

    def leave(self, worker: str, reason: str) -> bool:
        """The worker is gone, say those who watch it. Returns whether it was of any use: a member until now, or one
        of a team."""
        self._join_by_s.pop(worker, None)
        teamed = self.teams.dead(self.now(), worker)
        was_member = bool(self._do(m.Leave(worker, reason)))
        self._explore()
        return was_member or teamed

    def stand_down(self, worker: str) -> None:
        """The worker leads its team no longer: it is no member, and what it holds goes to others."""
        self._do(m.Leave(worker, "left"))
        self._explore()

    def heartbeat(self, worker: str) -> None:
        self.teams.heartbeat(self.now(), worker)
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
        self.teams.notice(self.now(), worker)
        self._do(m.Notice(worker, self.now() + grace_s))
        self._explore()

    def commit(self, worker: str, lease: int, step: int, commits: Sequence[Commit]) -> bool:
        """Takes how far a worker is with a lease, and from where it could go on elsewhere; returns whether it is to go
        on: somebody still waits for it, the worker is under no notice, and its team stays as it is."""
        self._do(m.Commits(worker, lease, step, commits))
        goes_on = worker not in self._noticed and not self.teams.is_changing(worker)
        return goes_on and self._scheduler.is_wanted(lease)

    def push(self, worker: str, lease: int, results: Sequence[SampleResult], report: WorkReport) -> None:
        """Takes what the worker made under a lease."""
        actions = self._do(m.Results(worker, lease, results))
        for action in actions:
            if isinstance(action, m.Finish):
                self._log("lease_done", **_describe(worker, action.lease), **vars(report))
        if accepted := [action.result for action in actions if isinstance(action, m.Accept)]:
            self._log("results_accepted", worker=worker, **_accepted(accepted))
        self._explore()

    def tick(self) -> bool:
        """To be called a few times a second: finds frozen workers, leases that are over, and whether nobody is left who
        could go on with the training. Returns whether there were any workers or leases of that kind."""
        late = self.now() - self._ticked_s > self._scheduler.heartbeat_timeout_s
        self._ticked_s = self.now()
        for member in self._members if late else ():  # this process stood still: whom it has not heard may have spoken
            self._do(m.Heartbeat(member))
        changed = bool(self._do(m.Tick()))
        for member in [] if late else self.teams.silence(self.now()):
            changed = True
            if member not in self._members:
                self.lost.append(Lost(member, "frozen"))
            elif not self._members[member].watched:  # else the scheduler sees it
                self._do(m.Leave(member, "frozen"))
        for worker in [name for name, by_s in self._join_by_s.items() if self.now() > by_s and not late]:
            changed = True
            del self._join_by_s[worker]
            self.lost.append(Lost(worker, "absent"))
            self._log("worker_failed", worker=worker, error="it did not join in time")
        if self.teams.is_ending:
            self.stop("SIGTERM")
        self._explore()
        return changed

    # Elastic groups

    def enlist(self, team: str, member: str) -> None:
        """The member is warm, belongs to no group, and waits for a generation with it."""
        self._join_by_s.pop(member, None)
        self.teams.enlist(self.now(), team, member)

    def died(self, member: str) -> None:
        """The member's process has ended: nobody waits for it any more. How it ended, `leave` tells later."""
        self.teams.dead(self.now(), member)

    def broken(self, member: str, generation: int) -> None:
        """The member has dropped the group of this generation after an error."""
        self.teams.broken(self.now(), member, generation)

    def boundary(self, member: str, generation: int, *, admits: bool = True) -> bool:
        """See `Teams.boundary`."""
        return self.teams.boundary(self.now(), member, generation, admits=admits)

    def regroup(self) -> bool:
        """Forms the generations whose time has come; returns whether there were any."""
        formed = self.teams.advance(self.now())
        for made in formed:
            generation = made.generation
            for follower in generation.members[1:]:
                self._expected_s.pop(follower, None)  # its first lease, if it ever leads, does not tell how it started
            self.record(
                "regrouped",
                team=made.team,
                generation=generation.number,
                members=list(generation.members),
                stayed=generation.stayed,
                regroup_s=round(self.now() - made.broken_s, 6),
            )
        return bool(formed)

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
        self._behind_rollouts.clear()  # for an older policy
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

    def submit(self, requests: Sequence[SampleRequest], *, behind_rollouts: bool = False) -> None:
        if behind_rollouts:
            self._behind_rollouts.append(partial(self.submit, requests))
            return
        event = m.Submit(requests)
        actions = self._scheduler.handle(self.now(), event)
        counts = Counter((request.key.kind, request.key.iteration) for request in requests)
        for (kind, iteration), count in counts.items():
            self._log("submitted", **_batch(kind, iteration), count=count)
        self._apply(actions)
        if any(kind is RequestKind.ROLLOUT for kind, _ in counts):
            behind, self._behind_rollouts = self._behind_rollouts, []
            for follow in behind:
                follow()

    def has(self, key: RequestKey) -> bool:
        """Whether the key has its result."""
        return key in self._results

    def complete(self, keys: Iterable[RequestKey]) -> bool:
        """Whether every key has its result."""
        return all(map(self.has, keys))

    def close(self, keys: Sequence[RequestKey]) -> list[SampleResult]:
        """Hands out the results that have come, in order of the keys, and forgets the keys."""
        results = [self._results.pop(key) for key in keys if key in self._results]
        self._do(m.Close(keys))
        return results

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        """From now on the planner may ask for seeds."""
        if behind_rollouts:
            self._behind_rollouts.append(partial(self.open_exploration, exploration))
            return
        if self._exploring is not None:
            raise ValueError(f"exploration for iteration {self._exploring.iteration} is still open")
        self._exploring = OpenExploration(exploration)
        gpus = [joined.member.gpus for joined in self._members.values() if joined.member.role == "spot"]
        self.record(
            "exploration_opened",
            **opening(exploration),
            reserved_usd_per_hour=self.log.usd_per_hour("reserved"),
            spot_usd_per_hour=self.log.usd_per_hour("spot") * (mean(gpus) if gpus else 1),
        )

    @property
    def explores(self) -> Sequence[RequestKey]:
        """What the planner has asked for."""
        return self._exploring.keys if self._exploring is not None else ()

    def close_exploration(self) -> list[SampleResult]:
        """Hands out what was explored, in the order in which it was asked for; what has not come is dropped."""
        closing = self._exploring
        if closing is None:
            return []
        results = self.close(closing.keys)
        self._exploring = None
        self.record("exploration_closed", iteration=closing.iteration, asked=len(closing.keys), came=len(results))
        self.log.log_metrics(closing.iteration, {**closing.metrics(len(results)), **self._feed.metrics})
        return results

    def planner_state(self) -> Mapping[str, Any]:
        """What the planner has learnt, in JSON types."""
        return self._feed.state_dict()

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        """Takes over what `planner_state` gave, before the first exploration is opened."""
        self._feed.load_state_dict(state)

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
        """Appends one event to the event log, and does what the planner makes of it."""
        self._log(kind, **fields)
        self._explore()

    def shutdown(self) -> None:
        """Closes the log files."""
        self.log.close()

    def _log(self, kind: str, **fields: Any) -> None:
        event = self.log.record(kind, **fields)
        self._plans += self._feed.add(event)
        for span in self._training.add(event):
            self._log("spot_trained", **span)

    # Applying decisions

    def _do(self, event: m.Event) -> list[m.Action]:
        actions = self._scheduler.handle(self.now(), event)
        self._apply(actions)
        return actions

    def _explore(self) -> None:
        """Does what the planner wants."""
        exploring, (asked, stopped) = self._exploring, decisions(self._plans)
        self._plans = []
        if exploring is None:
            return
        if asked:
            self._log("explore_asked", iteration=exploring.iteration, seeds=asked_rows(asked))
            self.submit(exploring.ask(asked))
        for reason in stopped:
            self._log("explore_stopped", iteration=exploring.iteration, reason=reason)

    def _apply(self, actions: Iterable[m.Action]) -> None:
        for action in actions:
            match action:
                case m.Progress() | m.Finish() | m.Dismiss():
                    pass  # for the worker that asked: see commit, push and pull
                case m.Accept(result):
                    self._results[result.key] = result
                case m.Grant(worker, lease, after):
                    self._grant(worker, lease, after)
                case m.Reject(worker, key, reason):
                    self._log("result_rejected", worker=worker, **_sample(key), reason=reason)
                case m.Fail(key, attempts, error):
                    self._results[key] = SampleResult(key, worker="", weights_checksum="", error=error)
                    self._log("request_failed", **_sample(key), attempts=attempts, error=error)
                case m.Revoke():
                    self._revoke(action)
                case m.Warned(worker, deadline_s, unfinished):
                    self._noticed.add(worker)
                    grace_s = round(deadline_s - self.now(), 6)
                    self._log("notice", worker=worker, grace_s=grace_s, requests=unfinished)
                case m.Lose(worker, reason, unfinished):
                    self._noticed.discard(worker)
                    del self._members[worker]
                    self.lost.append(Lost(worker, reason))
                    self._log("worker_lost", worker=worker, reason=reason, requests=unfinished)
                case m.Forget(kind, iteration, accepted, dropped):
                    self._log("closed", **_batch(kind, iteration), accepted=accepted, dropped=dropped)
                case m.Retire(version):
                    self._retired.append(version)

    def _grant(self, worker: str, lease: Lease, after: Sequence[int]) -> None:
        self.granted[worker] = lease
        fields: dict[str, Any] = {"version": str(lease.policy)}
        if worker in self._expected_s:
            fields["start_s"] = round(self.now() - self._expected_s.pop(worker), 6)
        self._log("lease_granted", **_describe(worker, lease), **fields)
        if lease.resume:
            self._log("lease_resumed", **_describe(worker, lease), step=lease.step, after=list(after))

    def _revoke(self, revoked: m.Revoke) -> None:
        if self.granted.get(revoked.worker) is revoked.lease:
            del self.granted[revoked.worker]
        self._log(
            "lease_lost",
            **{**_describe(revoked.worker, revoked.lease), "count": revoked.unfinished},
            reason=revoked.reason,
            committed_steps=revoked.committed_steps,
            lost_steps=revoked.lost_steps,
        )


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


def _accepted(results: Sequence[SampleResult]) -> dict[str, Any]:
    """Results of one lease. A reward that is no number is none."""
    key = results[0].key
    rows = [(r.key.instance, r.key.seed, r.reward if math.isfinite(r.reward) else None) for r in results]
    return {**_batch(key.kind, key.iteration), "results": rows}
