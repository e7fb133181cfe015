"""Whatever happens in whatever order: nothing is lost or counts twice, nobody idles, priorities hold, and a loss costs
no more steps than were made since the last commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from src.core.types import Lease, Member, PolicyVersion, RequestKey, RequestKind, SampleResult, SampleSpec
from src.spot import messages as m
from src.spot.scheduler import Scheduler
from tests.spot import mutants
from tests.spot.bench import commit
from tests.spot.fakes import SPEC, requests

ATTEMPTS, LEASES = 3, 5
COMMIT_EVERY = 2
SPECS = (SPEC, SampleSpec(steps=4, stochastic_steps=(0, 1)))
FRESH = (RequestKind.ROLLOUT, RequestKind.EVAL, RequestKind.AUDIT)
RESERVED = frozenset({RequestKind.ROLLOUT, RequestKind.EVAL})


class SchedulerMachine(RuleBasedStateMachine):
    """Random events against a naive model, which is a list of what is open, who holds it, and how far it is."""

    scheduler_class = Scheduler

    @initialize(target_s=st.sampled_from([0.0, 2.0]))
    def start(self, target_s: float) -> None:
        self.scheduler = self.scheduler_class(
            lease_s=30,
            heartbeat_timeout_s=10,
            max_attempts=ATTEMPTS,
            max_leases=LEASES,
            keep_versions=2,
            lease_target_s=target_s,
        )
        self.now_s = 0.0
        self.seeds = 0
        self.lives = 0
        self.version = PolicyVersion(0, 0)
        self.newest: list[PolicyVersion] = []
        self.workers: dict[str, frozenset[RequestKind]] = {}
        self.gone: list[str] = []
        self.waiting: set[str] = set()
        self.pending: set[RequestKey] = set()
        self.held: dict[RequestKey, int] = {}
        self.done: set[RequestKey] = set()
        self.closed: list[RequestKey] = []
        self.failures: Counter[RequestKey] = Counter()
        self.granted_times: Counter[RequestKey] = Counter()
        self.spoiler: dict[RequestKey, str] = {}
        self.leases: dict[int, tuple[str, Lease]] = {}
        self.history: list[tuple[str, Lease]] = []
        self.retired: set[PolicyVersion] = set()
        self.noticed: dict[str, float] = {}
        self.committed: dict[RequestKey, int] = {}
        self.at: dict[int, int] = {}  # the step before which each lease is
        self.publish()
        for batch_size in (1, 3, 4):
            self.join(batch_size, RESERVED if batch_size == 1 else m.EVERY_KIND)

    # What happens

    @precondition(lambda self: len(self.workers) < 6)
    @rule(batch_size=st.integers(1, 4), kinds=st.sampled_from([m.EVERY_KIND, RESERVED]))
    def join(self, batch_size: int, kinds: frozenset[RequestKind]) -> None:
        member = Member("node", self.lives)
        self.lives += 1
        self.workers[member.name] = kinds
        self.tell(m.Join(member, batch_size, kinds, watched=kinds is not RESERVED))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), reason=st.sampled_from(["killed", "left", "failed"]))
    def leave(self, data: st.DataObject, reason: str) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        if reason == "failed":
            for lease in [id for id, (holder, _) in self.leases.items() if holder == worker]:
                self.spoil(worker, [key for key, holder in self.held.items() if holder == lease])
        self.tell(m.Leave(worker, reason))

    def spoil(self, worker: str, keys: Iterable[RequestKey]) -> None:
        """An attempt at each of these counts as failed."""
        for key in keys:
            self.failures[key] += 1
            self.spoiler[key] = worker

    @rule(some=st.integers(0, 3))
    def pull(self, some: int) -> None:
        for worker in sorted(self.workers)[some:]:
            if worker in self.noticed:
                assert self.tell(m.Pull(worker)) == [m.Dismiss(worker)]
            else:
                self.waiting.add(worker)
                self.tell(m.Pull(worker))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def pull_of_the_dead(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.gone))
        assert self.scheduler.handle(self.now_s, m.Pull(worker)) == [m.Dismiss(worker)]

    @precondition(lambda self: len(self.waiting) > 1)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.remove(worker)
        self.tell(m.Withdraw(worker))

    @rule(
        kind=st.sampled_from(RequestKind),
        count=st.integers(1, 9),
        spec=st.sampled_from(SPECS),
        data=st.data(),
    )
    def submit(self, kind: RequestKind, count: int, spec: SampleSpec, data: st.DataObject) -> None:
        policies = self.newest[-2:] if kind is RequestKind.EXPLORE else self.newest[-1:]
        policy = data.draw(st.sampled_from(policies))
        made = requests(kind, count, policy=policy, first=self.seeds, spec=spec)
        self.seeds += count
        self.pending |= {request.key for request in made}
        self.tell(m.Submit(made))

    @precondition(lambda self: not any(key.kind in FRESH for key in {*self.pending, *self.held}))
    @rule()
    def publish(self) -> None:
        self.newest.append(self.version)
        self.tell(m.Publish(self.version, str(self.version)))
        self.version = PolicyVersion(0, self.version.iteration + 1)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def work(self, data: st.DataObject, steps: int) -> None:
        """A worker makes some steps of a lease, with a commit before every second one."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        worker, held = self.leases[lease]
        for _ in range(min(steps, held.requests[0].spec.steps - self.at[lease])):
            self.at[lease] += 1
            self.commit(worker, held, due=self.at[lease] % COMMIT_EVERY == 0)

    def commit(self, worker: str, lease: Lease, *, due: bool) -> None:
        step = self.at[lease.id]
        made = [commit(request.key, step, str(request.key.policy)) for request in lease.requests] if due else []
        mine = [key for key, holder in self.held.items() if holder == lease.id]
        new = {key for key in mine if self.committed.get(key, lease.step) < step} if due else set()
        counted = sum(progress.accepted for progress in self.tell(m.Commits(worker, lease.id, step, made)))
        assert counted == len(new)
        self.committed.update(dict.fromkeys(new, step))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), step=st.integers(0, 5), wrong=st.booleans(), impostor=st.booleans())
    def bad_commits(self, data: st.DataObject, step: int, wrong: bool, impostor: bool) -> None:
        """With the wrong weights, from a worker that does not hold the requests, or of a lease that is over."""
        worker, lease = data.draw(st.sampled_from(self.history))
        if lease.id in self.leases and not (wrong or impostor):
            return
        checksum = "wrong" if wrong else str(lease.policy)
        made = [commit(request.key, step, checksum) for request in lease.requests]
        told = self.at[lease.id] if lease.id in self.leases else step
        for progress in self.tell(m.Commits("impostor" if impostor else worker, lease.id, told, made)):
            assert progress.accepted == 0

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), grace_s=st.sampled_from([1.0, 6.0, float("inf")]))
    def notice(self, data: st.DataObject, grace_s: float) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        known, waiting = worker in self.noticed, worker in self.waiting
        if grace_s < float("inf"):
            self.noticed[worker] = min(self.noticed.get(worker, grace_s + self.now_s), self.now_s + grace_s)
            self.waiting.discard(worker)
        actions = self.tell(m.Notice(worker, self.now_s + grace_s))
        told = not known and grace_s < float("inf")
        assert [type(action) for action in actions] == [m.Warned] * told + [m.Dismiss] * (told and waiting)

    @precondition(lambda self: self.noticed)
    @rule(data=st.data())
    def heed_the_notice(self, data: st.DataObject) -> None:
        """The worker commits what it has, gives it back, and leaves: no step is lost."""
        worker = data.draw(st.sampled_from(sorted(self.noticed)))
        for holder, lease in list(self.leases.values()):
            if holder == worker:
                self.commit(worker, lease, due=True)
                actions = self.tell(m.Results(worker, lease.id, ()))
                assert all(a.lost_steps == 0 for a in actions if isinstance(a, m.Revoke))
        actions = self.tell(m.Leave(worker, "left"))
        assert actions[0] == m.Lose(worker, "preempted", 0)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), error=st.booleans(), wrong=st.booleans(), recent=st.booleans())
    def push(self, data: st.DataObject, error: bool, wrong: bool, recent: bool) -> None:
        """Results of a lease, current or long over, of all or some of its requests, good or bad."""
        worker, lease = self.history[-1] if recent else data.draw(st.sampled_from(self.history))
        count = data.draw(st.integers(0, len(lease.requests)))
        for request in lease.requests[:count]:
            if (error or wrong) and self.held.get(request.key) == lease.id:
                self.spoil(worker, [request.key])
                if error:
                    self.committed.pop(request.key, None)
        self.tell(m.Results(worker, lease.id, results(lease, worker, wrong, error)[:count]))

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def push_of_an_impostor(self, data: st.DataObject) -> None:
        _, lease = data.draw(st.sampled_from(self.history))
        actions = self.tell(m.Results("impostor", lease.id, results(lease, "impostor")))
        assert all(isinstance(action, m.Reject) for action in actions)

    @precondition(lambda self: self.pending or self.held or self.done)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        open_keys = sorted({*self.pending, *self.held, *self.done}, key=lambda key: key.seed)
        keys = data.draw(st.lists(st.sampled_from(open_keys), unique=True, max_size=12))
        for key in keys:
            self.pending.discard(key)
            self.held.pop(key, None)
            self.done.discard(key)
            self.committed.pop(key, None)
        self.closed += keys
        forgotten = self.tell(m.Close(keys))
        assert sum(f.accepted + f.dropped for f in forgotten if isinstance(f, m.Forget)) == len(keys)

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0, 31.0]), data=st.data())
    def time_passes(self, seconds: float, data: st.DataObject) -> None:
        self.now_s += seconds
        for worker in sorted(self.workers):
            if data.draw(st.booleans()):
                self.tell(m.Heartbeat(worker))
        self.tell(m.Tick())
        assert all(gone_s >= self.now_s for gone_s in self.noticed.values())

    # What must follow

    def tell(self, event: m.Event) -> list[m.Action]:
        actions = self.scheduler.handle(self.now_s, event)
        for action in actions:
            match action:
                case m.Grant(worker, lease):
                    self.granted(worker, lease)
                case m.Accept(result):
                    assert result.error is None
                    assert result.weights_checksum == str(result.key.policy)
                    self.settle(result.key)
                case m.Fail(key, attempts, _):
                    assert attempts == self.failures[key]
                    assert attempts == ATTEMPTS or self.granted_times[key] == LEASES
                    self.held.pop(key, None)
                    self.settle(key)
                case m.Finish(_, lease):
                    self.end(lease.id)
                case m.Revoke():
                    self.revoked(action)
                case m.Lose(worker, reason):
                    noticed = self.noticed.pop(worker, None) is not None
                    assert (reason == "preempted") == (noticed and reason != "failed")
                    del self.workers[worker]
                    self.waiting.discard(worker)
                    self.gone.append(worker)
                case m.Retire(version):
                    assert version not in self.newest[-2:]
                    self.retired.add(version)
        return actions

    def granted(self, worker: str, lease: Lease) -> None:
        keys = [request.key for request in lease.requests]
        assert worker in self.waiting
        assert worker not in self.noticed
        assert all(self.committed.get(key, 0) == lease.step for key in keys), "it goes on elsewhere than committed"
        assert [commit.key for commit in lease.resume] == (keys if lease.step else [])
        assert set(keys) <= self.pending
        assert len({(key.kind, key.policy) for key in keys}) == 1
        assert len({request.spec for request in lease.requests}) == 1
        assert lease.kind in self.workers[worker]
        urgent = [key for key in self.pending if key.kind < lease.kind and key.kind in self.workers[worker]]
        assert not urgent, "something more urgent was passed over"
        if any(self.spoiler.get(key) == worker for key in keys):
            alike = [key for key in self.pending if key.kind == lease.kind]
            assert all(self.spoiler.get(key) == worker for key in alike), "it got what it spoilt, and need not have"
        assert lease.kind is RequestKind.EXPLORE or lease.policy == self.newest[-1]
        self.waiting.remove(worker)
        for key in keys:
            self.pending.remove(key)
            self.held[key] = lease.id
            self.granted_times[key] += 1
            assert self.granted_times[key] <= LEASES
            assert self.failures[key] < ATTEMPTS
        self.leases[lease.id] = (worker, lease)
        self.at[lease.id] = lease.step
        self.history.append((worker, lease))

    def settle(self, key: RequestKey) -> None:
        assert key in self.pending or key in self.held or self.is_over(key)
        assert key not in self.done, "it counted twice"
        assert key not in self.closed, "it counted after it was closed"
        self.pending.discard(key)
        self.held.pop(key, None)
        self.committed.pop(key, None)
        self.done.add(key)

    def revoked(self, revoke: m.Revoke) -> None:
        mine = [key for key, holder in self.held.items() if holder == revoke.lease.id]
        assert revoke.unfinished == len(mine)
        kept = sum(self.committed.get(key, 0) - revoke.lease.step for key in mine)
        assert revoke.committed_steps == kept
        assert 0 <= revoke.lost_steps <= COMMIT_EVERY * len(mine), "more was lost than since the last commit"
        self.end(revoke.lease.id)

    def end(self, lease: int) -> None:
        """What the lease still held is pending again, unless it has failed for good."""
        if lease in self.leases:
            del self.leases[lease]
            for key in [key for key, holder in self.held.items() if holder == lease]:
                del self.held[key]
                if self.is_over(key):
                    self.committed.pop(key, None)
                else:
                    self.pending.add(key)

    def is_over(self, key: RequestKey) -> bool:
        """It has been tried often enough."""
        return self.failures[key] >= ATTEMPTS or self.granted_times[key] >= LEASES

    @invariant()
    def nobody_idles(self) -> None:
        for worker in self.waiting:
            assert worker in self.workers
            assert not any(key.kind in self.workers[worker] for key in self.pending)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.scheduler.unfinished == len(self.pending) + len(self.held)
        assert not {key.policy for key in self.pending} & self.retired
        assert not {lease.policy for _, lease in self.leases.values()} & self.retired

    def teardown(self) -> None:
        """One good worker brings whatever is left to its end."""
        for worker in sorted(self.workers):
            self.tell(m.Leave(worker, "killed"))
        self.join(4, m.EVERY_KIND)
        worker = next(iter(self.workers))
        while self.pending:
            self.waiting.add(worker)
            grants = self.tell(m.Pull(worker))
            assert [type(action) for action in grants] == [m.Grant], "it is never made"
            (grant,) = grants
            self.tell(m.Results(worker, grant.lease.id, results(grant.lease, worker)))
        assert self.scheduler.unfinished == 0


def results(lease: Lease, worker: str, wrong: bool = False, failed: bool = False) -> list[SampleResult]:
    keys = [request.key for request in lease.requests]
    error = "it failed" if failed else None
    return [SampleResult(key, worker, "wrong" if wrong else str(key.policy), error=error) for key in keys]


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
test_any_order_of_events = SchedulerMachine.TestCase


def run(machine: type[SchedulerMachine], sequences: int) -> None:
    """Fails with the first sequence of events that breaks a rule; does not look for a shorter one."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=50,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=checks,
            database=None,
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_sequences() -> None:
    run(SchedulerMachine, 10_000)


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: mutant.__name__)
def test_the_machine_finds_each_mutation(mutant: type[Scheduler]) -> None:
    class Mutated(SchedulerMachine):
        scheduler_class = mutant

    with pytest.raises((AssertionError, KeyError)):
        run(Mutated, 2000)
