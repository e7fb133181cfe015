from __future__ import annotations

import threading

import pytest

from src.core.types import Lease, Member, PolicyVersion, RequestKind
from src.spot import weights
from src.spot.coordinator import Introduction
from src.spot.worker import Worker
from tests.spot.fakes import FakeEngine, requests, reward, saves

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
MEMBER = Member("n", 0)


class Script:
    """A transport that hands out the given leases, one after the other, and remembers what it is told."""

    def __init__(self, root, leases=()) -> None:
        self.root = root
        self.leases = list(leases)
        self.told = []
        self.beat = threading.Event()

    def join(self, joined):
        self.told.append(("join", joined.member.name, joined.batch_size, joined.fingerprint))
        return Introduction("run", 0, self.root, 0.0)

    def pull(self, worker):
        return self.leases.pop(0) if self.leases else None

    def push(self, worker, lease, results, report):
        self.told.append(("push", worker, lease, [(r.key.seed, r.reward, r.weights_checksum) for r in results]))

    def heartbeat(self, worker):
        self.beat.set()


class CountingEngine(FakeEngine):
    loads = 0

    def load_weights(self, folder):
        self.loads += 1
        return super().load_weights(folder)


def lease(id: int, policy: PolicyVersion, seed: int) -> Lease:
    made = requests(RequestKind.EXPLORE, 1, policy=policy, first=seed)
    return Lease(id, tuple(made), deadline_s=60.0)


def test_it_serves_each_lease_under_the_leases_policy(tmp_path):
    weights.publish(tmp_path, V0, saves("old"))
    weights.publish(tmp_path, V1, saves("new"))
    leases = [lease(0, V0, 5), lease(1, V0, 6), lease(2, V1, 7), lease(3, V0, 8)]
    engine, transport = CountingEngine(), Script(tmp_path, leases)
    Worker(member=MEMBER, engine=engine, transport=transport).run()

    def served(id, seed, sum_):
        key = lease(id, V0, seed).requests[0].key
        return ("push", MEMBER.name, id, [(seed, reward(key, sum_), sum_)])

    assert transport.told == [
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
    with pytest.raises(ValueError, match="not what was published"):
        Worker(member=MEMBER, engine=FakeEngine(), transport=transport).run()
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

    transport = Patient(tmp_path)
    Worker(member=MEMBER, engine=FakeEngine(), transport=transport, heartbeat_s=0.01).run()
    pulse = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    for thread in pulse:
        thread.join(5)
        assert not thread.is_alive()
