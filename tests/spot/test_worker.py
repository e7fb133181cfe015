from __future__ import annotations

import math
import threading
import time

import pytest

from src.core.types import Lease, Member, PolicyVersion, RequestKind
from src.spot import weights
from src.spot.market import Notice
from src.spot.members import Introduction
from src.spot.worker import Worker
from tests.spot.fakes import FakeEngine, requests, reward, saves

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
MEMBER = Member("n", 0)


class Script:
    """A transport that hands out the given leases, one after the other, and remembers what it is told."""

    def __init__(self, root, leases=(), heartbeat_s=2.0) -> None:
        self.root, self.heartbeat_s = root, heartbeat_s
        self.leases = list(leases)
        self.told = []
        self.beat = threading.Event()

    def join(self, joined):
        self.told.append(("join", joined.member.name, joined.batch_size, joined.fingerprint))
        return Introduction("run", 0, self.root, 0.0, heartbeat_s=self.heartbeat_s)

    def pull(self, worker):
        return self.leases.pop(0) if self.leases else None

    def commit(self, worker, lease, step, commits):
        self.told.append(("commit", lease, step, [commit.step for commit in commits]))

    def is_dropped(self):
        return False

    def notice(self, worker, grace_s):
        self.told.append(("notice", worker, grace_s))

    def push(self, worker, lease, results, report):
        self.told.append(("push", worker, lease, [(r.key.seed, r.reward, r.weights_checksum) for r in results]))

    def heartbeat(self, worker):
        self.beat.set()


class CountingEngine(FakeEngine):
    loads = 0

    def load_weights(self, folder):
        self.loads += 1
        return super().load_weights(folder)


def lease(id: int, policy: PolicyVersion, seed: int, resume=()) -> Lease:
    made = requests(RequestKind.EXPLORE, 1, policy=policy, first=seed)
    return Lease(id, tuple(made), deadline_s=60.0, resume=resume)


def test_it_serves_each_lease_under_the_leases_policy(tmp_path):
    weights.publish(tmp_path, V0, saves("old"))
    weights.publish(tmp_path, V1, saves("new"))
    leases = [lease(0, V0, 5), lease(1, V0, 6), lease(2, V1, 7), lease(3, V0, 8)]
    engine, transport = CountingEngine(), Script(tmp_path, leases)
    Worker(member=MEMBER, engine=engine, transport=transport).run()

    def served(id, seed, sum_):
        key = lease(id, V0, seed).requests[0].key
        return ("push", MEMBER.name, id, [(seed, reward(key, sum_), sum_)])

    assert [told for told in transport.told if told[0] != "commit"] == [
        ("join", MEMBER.name, 4, "fake"),
        served(0, 5, "old"),
        served(1, 6, "old"),
        served(2, 7, "new"),
        served(3, 8, "old"),
    ]
    assert engine.loads == 3


def test_damaged_weights_end_the_worker_and_nothing_is_made_with_them(tmp_path):
    published = weights.publish(tmp_path, V0, saves("abc"))
    (published.folder / "weights.txt").write_text("ab")
    transport = Script(tmp_path, [lease(0, V0, 1)])
    with pytest.raises(ValueError, match=r"weights\.txt is truncated or altered"):
        Worker(member=MEMBER, engine=FakeEngine(), transport=transport).run()
    assert [told[0] for told in transport.told] == ["join"]


def test_an_engine_that_holds_other_weights_than_were_published_ends_the_worker(tmp_path):
    class Forgetful(FakeEngine):
        def load_weights(self, folder):
            super().load_weights(folder)
            self.weights = "what it held before"
            return self.weights

    weights.publish(tmp_path, V0, saves("abc"))
    transport = Script(tmp_path, [lease(0, V0, 1)])
    with pytest.raises(ValueError, match=r"weights 0\.0: the engine holds what it held before .* abc was published"):
        Worker(member=MEMBER, engine=Forgetful(), transport=transport).run()
    assert [told[0] for told in transport.told] == ["join"]


def test_a_load_that_fails_is_not_taken_for_the_policy(tmp_path):
    class FailsOnce(CountingEngine):
        def load_weights(self, folder):
            checksum = super().load_weights(folder)
            if self.loads == 2:
                raise RuntimeError("out of memory")
            return checksum

    for version in (V0, V1):
        weights.publish(tmp_path, version, saves(str(version)))
    engine = FailsOnce()
    worker = Worker(member=MEMBER, engine=engine, transport=Script(tmp_path))
    worker.join()
    worker.serve(lease(0, V0, 1))
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.serve(lease(1, V1, 2))
    worker.serve(lease(2, V0, 3))
    assert engine.loads == 3


def test_it_shows_that_it_lives_while_it_waits_and_not_after(tmp_path):
    class Patient(Script):
        def pull(self, worker):
            assert self.beat.wait(5), "no heartbeat within 5 s"
            return None

    transport = Patient(tmp_path, heartbeat_s=0.01)
    Worker(member=MEMBER, engine=FakeEngine(), transport=transport).run()
    pulse = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    for thread in pulse:
        thread.join(5)
        assert not thread.is_alive()


# Commits and notices: samples have 4 steps


@pytest.fixture
def published(tmp_path):
    weights.publish(tmp_path, V0, saves("w"))
    return tmp_path


def test_it_commits_every_so_many_steps(published):
    transport = Script(published, [lease(0, V0, 1)])
    Worker(member=MEMBER, engine=FakeEngine(), transport=transport, commit_every=2, now=lambda: 0.0).run()
    # the first word goes out at once, and then only commits do, for the clock stands still
    assert transport.told[1:-1] == [("commit", 0, 1, []), ("commit", 0, 2, [2]), ("commit", 0, 4, [4])]


def test_a_slow_worker_tells_every_step(published):
    ticks = iter(range(100))
    transport = Script(published, [lease(0, V0, 1)])
    Worker(member=MEMBER, engine=FakeEngine(), transport=transport, now=lambda: float(next(ticks))).run()
    assert transport.told[1:-1] == [("commit", 0, step, []) for step in (1, 2, 3, 4)]


def test_it_goes_on_from_what_was_committed(published):
    first = Script(published, [lease(0, V0, 1)])
    kept = []
    first.commit = lambda worker, id, step, commits: kept.extend(commits)
    Worker(member=MEMBER, engine=FakeEngine(), transport=first, commit_every=3).run()
    engine, second = FakeEngine(), Script(published, [lease(1, V0, 1, resume=tuple(kept[:1]))])
    reports = []
    second.push = lambda worker, id, results, report: reports.append((len(results), report.steps))
    Worker(member=MEMBER, engine=engine, transport=second).run()
    assert reports == [(1, 1)]


class Notices:
    """A source that gives its notices one after the other, when it is told to."""

    def __init__(self, *graces_s: float) -> None:
        self.graces_s = list(graces_s)
        self.go = threading.Event()

    def wait(self, timeout_s):
        if self.graces_s and self.go.wait(timeout_s):
            return Notice("n", self.graces_s.pop(0))
        return None


def test_at_a_notice_it_finishes_the_step_commits_gives_back_and_ends(published):
    source = Notices(2.5)
    transport = Script(published, [lease(0, V0, 1), lease(1, V0, 2)])

    class Slow(FakeEngine):
        """Gets its notice in its second step."""

        def serve(self, requests, worker, *, on_step, should_yield, **how):
            def told(step, commits):
                on_step(step, commits)
                source.go.set()

            def yields():
                if source.go.is_set() and transport.told[-1][0] == "commit":
                    until(should_yield)
                return should_yield()

            return super().serve(requests, worker, on_step=told, should_yield=yields, **how)

    Worker(member=MEMBER, engine=Slow(), transport=transport, notices=[source]).run()
    assert ("notice", MEMBER.name, 2.5) in transport.told
    told = [row for row in transport.told if row[0] != "notice"]
    assert told[1:] == [("commit", 0, 1, []), ("commit", 0, 2, [2]), ("push", MEMBER.name, 0, [])]
    assert len(transport.leases) == 1


def test_a_risk_is_no_notice(published):
    source = Notices(math.inf)
    source.go.set()
    transport = Script(published, [lease(0, V0, 1)])
    transport.pull = lambda worker: until(lambda: not source.graces_s) and Script.pull(transport, worker)
    Worker(member=MEMBER, engine=FakeEngine(), transport=transport, notices=[source]).run()
    assert [row[0] for row in transport.told if row[0] != "commit"] == ["join", "push"]


def test_a_lease_that_comes_with_the_notice_is_given_back_untouched(published):
    source = Notices(1.0)
    transport = Script(published, [lease(0, V0, 1)])

    def pull(worker):
        source.go.set()
        until(lambda: ("notice", MEMBER.name, 1.0) in transport.told)
        return Script.pull(transport, worker)

    transport.pull = pull
    engine = CountingEngine()
    Worker(member=MEMBER, engine=engine, transport=transport, notices=[source]).run()
    assert transport.told[-1] == ("push", MEMBER.name, 0, [])
    assert engine.loads == 0


def until(found) -> bool:
    deadline_s = time.monotonic() + 5
    while not found():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return True


def test_a_lease_that_nobody_waits_for_is_given_back_at_the_next_step_and_the_next_one_is_served(tmp_path):
    class CutOff(Script):
        """Nobody waits for lease 0 any more once its worker has told of step 2."""

        cut = False

        def commit(self, worker, lease, step, commits):
            super().commit(worker, lease, step, commits)
            self.cut = (lease, step) == (0, 2)

        def is_dropped(self):
            return self.cut

        def push(self, worker, lease, results, report):
            super().push(worker, lease, results, report)
            self.cut = False

    weights.publish(tmp_path, V0, saves("abc"))
    transport = CutOff(tmp_path, [lease(0, V0, 1), lease(1, V0, 2)])
    Worker(member=MEMBER, engine=FakeEngine(), transport=transport, commit_every=1).run()
    pushed = [(told[2], [seed for seed, *_ in told[3]]) for told in transport.told if told[0] == "push"]
    assert pushed == [(0, []), (1, [2])]
    assert [told[2] for told in transport.told if told[0] == "commit" and told[1] == 0] == [1, 2, 3]
