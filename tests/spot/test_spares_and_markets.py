"""Real processes that are given notice, killed, frozen and brought back."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from src.core.types import RequestKind
from src.spot import market as mk
from tests.spot.conftest import BATCH_SIZE, Run, make_coordinator, until
from tests.spot.fakes import FakeEngine, requests, reward

EXPLORE, ROLLOUT = RequestKind.EXPLORE, RequestKind.ROLLOUT
LEASE_S = 1.2
make_slow_engine = partial(FakeEngine, batch_size=BATCH_SIZE, lease_s=LEASE_S)


@contextmanager
def started(
    folder: Path, *, commit_every: int, engine=make_slow_engine, patience_s: float = 30.0, **fleet
) -> Iterator[Run]:
    from src.spot.client import RayCluster
    from src.spot.fleet import Fleet
    from src.spot.process import WorkerSettings

    settings = WorkerSettings(commit_every=commit_every, grace_s=5.0)
    coordinator = partial(make_coordinator, folder, heartbeat_timeout_s=patience_s)
    with Fleet(coordinator=coordinator, engine=engine, settings=settings, **fleet) as fleet:
        fleet.start()
        mine = engine()
        yield Run(folder, fleet, RayCluster(fleet.host, engine=mine), mine)


def assert_made_once(made, asked) -> None:
    assert [result.key for result in made] == [request.key for request in asked]
    assert all(result.error is None for result in made)
    assert all(result.reward == reward(result.key, result.weights_checksum) for result in made)


def assert_every_loss_went_on_where_it_was_committed(run: Run, *, commit_every: int) -> None:
    granted = {event["lease"]: event for event in run.events("lease_granted")}
    start = {event["lease"]: event["step"] for event in run.events("lease_resumed")}
    for lost in run.events("lease_lost"):
        assert 0 <= lost["lost_steps"] <= commit_every * lost["count"]
        kept, rest = divmod(lost["committed_steps"], max(1, lost["count"]))
        step = start.get(lost["lease"], 0) + kept
        heirs = [e for e in run.events("lease_resumed") if lost["lease"] in e["after"]]
        assert rest == 0
        assert all(heir["step"] == step for heir in heirs)
        cut_off = lost["request_kind"] == "explore" and run.events("closed", iteration=lost["iteration"])[0]["dropped"]
        late = lost["reason"] == "frozen"  # it may have thawed and delivered
        assert bool(heirs) == (step > 0 and lost["count"] > 0) or cut_off or late
        assert all(granted[heir["lease"]]["version"] == granted[lost["lease"]]["version"] for heir in heirs)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_notice_costs_no_step_and_a_kill_at_most_one_and_a_spare_takes_over(tmp_path):
    with started(tmp_path, commit_every=1, spot_workers=2, spares=1) as run:
        run.both_workers()
        policy = run.publish()
        for number, reason in ((signal.SIGTERM, "preempted"), (signal.SIGKILL, "killed")):
            until(lambda: run.fleet._spares and run.fleet._spares[0].has_caught_up, within_s=60, what="a spare")
            asked = requests(EXPLORE, 24, policy=policy, iteration=policy.iteration + 1, first=100 * number)
            run.cluster.submit(asked)
            victim, pid = run.busy_worker()
            time.sleep(0.5 * LEASE_S)
            hit_s = time.monotonic()
            os.kill(pid, number)
            heir = f"{victim.split('.')[0]}.{int(victim.split('.')[1]) + 1}"
            until(lambda heir=heir: run.events("lease_granted", worker=heir), within_s=30, what=f"a lease of {heir}")
            took_s = time.monotonic() - hit_s
            assert_made_once(run.cluster.close(asked, wait_s=60), asked)
            (lost,) = run.events("worker_lost", worker=victim)
            assert lost["reason"] == reason
            (lease,) = run.events("lease_lost", worker=victim)
            assert lease["committed_steps"] > 0
            assert lease["lost_steps"] == (0 if reason == "preempted" else lease["count"])
            first = run.events("lease_granted", worker=heir)[0]
            assert 0 < first["start_s"] < took_s < 10
            print(f"{reason}: first lease of the spare {took_s:.2f} s after the blow, start_s {first['start_s']:.2f}")
        assert len(run.events("notice")) == 1
        assert_every_loss_went_on_where_it_was_committed(run, commit_every=1)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nobody_waits_for_workers_that_are_not_replaced(tmp_path):
    with started(tmp_path, commit_every=1, spot_workers=2, respawn=False) as run:
        pids = run.both_workers()
        policy = run.publish()
        asked = requests(EXPLORE, 400, policy=policy, iteration=policy.iteration + 1)
        run.cluster.submit(asked)
        until(lambda: len(run.events("lease_done")) >= 2, within_s=60, what="some results")
        killer = threading.Timer(1.0, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids.values()])
        killer.start()
        made = run.cluster.close(asked, wait_s=150)
        killer.join()
        assert 2 * BATCH_SIZE <= len(made) < len(asked)
        (given_up,) = run.events("wait_given_up")
        assert (given_up["request_kind"], given_up["missing"]) == ("explore", len(asked) - len(made))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_spare_that_is_frozen_when_it_is_needed_is_replaced(tmp_path, thaw, monkeypatch):
    from src.spot import fleet
    from src.spot.session import ray

    monkeypatch.setattr(fleet, "_JOIN_S", 3.0)
    with started(tmp_path, commit_every=1, spot_workers=1, spares=1) as run:
        until(lambda: run.fleet._spares and run.fleet._spares[0].is_ready, within_s=60, what="a spare")
        ((victim, pid),) = run.pids().items()
        spare = ray.get(run.fleet._spares[0]._pid)
        thaw.append(spare)
        os.kill(spare, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        until(lambda: set(run.pids()) - {victim}, within_s=60, what="another worker")
        assert [event["worker"] for event in run.events("worker_failed")] == [victim.replace(".0", ".1")]
        assert list(run.pids()) == [victim.replace(".0", ".2")]
        assert not os.path.exists(f"/proc/{spare}")


class Broken(FakeEngine):
    """Cannot load its weights."""

    def load_weights(self, folder: Path) -> str:
        raise RuntimeError("no such model")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nobody_waits_for_workers_that_always_fail(tmp_path):
    with started(tmp_path, commit_every=1, engine=Broken, spot_workers=1) as run:
        policy = run.publish()
        asked = requests(EXPLORE, 8, policy=policy, iteration=policy.iteration + 1)
        run.cluster.submit(asked)
        assert run.cluster.close(asked, wait_s=200) == []
        assert [e["missing"] for e in run.events("wait_given_up")] == [8]
        assert [e["error"] for e in run.events("worker_failed")] == ["RuntimeError: no such model"] * 3


class Puppet:
    """A market that does what it is told: however slow the machine is, nothing happens too early."""

    nodes = ("node0", "node1")
    next_s = math.inf

    def __init__(self) -> None:
        self.will_do: deque[mk.Action] = deque()

    def handle(self, now_s: float, event: mk.Event) -> list[mk.Action]:
        if isinstance(event, mk.Start):
            return [mk.Return(node) for node in self.nodes]
        return [self.will_do.popleft() for _ in range(len(self.will_do))]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_follow_a_market_down_to_zero_and_up_again(tmp_path):
    market = Puppet()
    with started(tmp_path, commit_every=2, spot_workers=1, spares=1, market=market) as run:
        until(lambda: len(run.pids()) == 2, within_s=60, what="two workers")
        policy = run.publish()
        asked = requests(EXPLORE, 40, policy=policy, iteration=policy.iteration + 1)
        run.cluster.submit(asked)
        until(lambda: len(run.events("lease_granted")) >= 3, within_s=60, what="work for both")
        market.will_do += [mk.Notice(node, 60.0) for node in market.nodes]
        until(lambda: len(run.events("worker_lost")) == 2, within_s=30, what="both to give way")
        market.will_do += [mk.Kill(node) for node in market.nodes]
        assert [event["reason"] for event in run.events("worker_lost")] == ["preempted"] * 2
        assert {event["lost_steps"] for event in run.events("lease_lost")} == {0}  # they had time to commit
        assert run.cluster.workers() == 0
        time.sleep(1.0)
        assert run.cluster.workers() == 0
        threading.Timer(1.0, lambda: market.will_do.append(mk.Return("node1"))).start()
        assert_made_once(run.cluster.close(asked, wait_s=90), asked)  # it waits while there is nobody
        assert [event["worker"] for event in run.events("notice")] == ["spot-node0-0.0", "spot-node1-0.0"]
        assert [e["worker"] for e in run.events("worker_joined", role="spot")][2:] == ["spot-node1-0.1"]
        assert_every_loss_went_on_where_it_was_committed(run, commit_every=2)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_frozen_worker_under_notice_is_killed_at_its_deadline(tmp_path, thaw):
    market = Puppet()
    with started(tmp_path, commit_every=1, spot_workers=1, market=market) as run:
        until(lambda: len(run.pids()) == 2, within_s=60, what="two workers")
        policy = run.publish()
        asked = requests(EXPLORE, 16, policy=policy, iteration=policy.iteration + 1)
        run.cluster.submit(asked)
        victim, pid = run.busy_worker()
        thaw.append(pid)
        os.kill(pid, signal.SIGSTOP)
        market.will_do.append(mk.Notice(victim.split("-")[1], 0.5))
        until(lambda: run.events("worker_lost", worker=victim), within_s=20, what="its end")
        assert run.events("worker_lost", worker=victim)[0]["reason"] == "preempted"
        until(lambda: not os.path.exists(f"/proc/{pid}"), within_s=10, what="death of the frozen process")
        assert_made_once(run.cluster.close(asked, wait_s=90), asked)
        assert_every_loss_went_on_where_it_was_committed(run, commit_every=1)


class Chaos(threading.Thread):
    """Kills, freezes and warns random spot workers that are at work, each once; half of the frozen thaw before that is
    noticed."""

    def __init__(self, run: Run, seed: int, blows: int) -> None:
        super().__init__(name="chaos", daemon=True)
        self.rng = random.Random(seed)
        self.run_, self.blows = run, blows
        self.struck: list[int] = []
        self.dealt: Counter[str] = Counter()

    def run(self) -> None:
        while self.dealt.total() < self.blows:
            time.sleep(self.rng.uniform(0.05, 0.5))
            pids = sorted(self.at_work() - set(self.struck))
            if not pids:
                continue
            pid, number = self.rng.choice(pids), self.rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self.dealt[number.name] += 1
                self.struck.append(pid)
                if number is signal.SIGSTOP and self.rng.random() < 0.5:
                    time.sleep(0.5)
                    os.kill(pid, signal.SIGCONT)
                    self.struck.remove(pid)
                    self.dealt["SIGCONT"] += 1

    def at_work(self) -> set[int]:
        """Processes of workers that hold a lease."""
        over = {event["lease"] for kind in ("lease_done", "lease_lost") for event in self.run_.events(kind)}
        busy = {event["worker"] for event in self.run_.events("lease_granted") if event["lease"] not in over}
        return {pid for worker, pid in self.run_.pids().items() if worker in busy}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_chaos(tmp_path):
    """Sixty blows: every sample is made exactly once, whatever is killed, frozen or warned."""
    engine = partial(FakeEngine, batch_size=BATCH_SIZE, lease_s=0.4)
    with started(tmp_path, commit_every=1, engine=engine, patience_s=3.0, spot_workers=4, spares=2) as run:
        chaos = Chaos(run, seed=3, blows=60)
        chaos.start()
        explored = rolled_out = 0
        while chaos.is_alive():
            policy = run.publish()
            explores = requests(EXPLORE, 64, policy=policy, iteration=policy.iteration + 1)
            run.cluster.submit(explores)
            rollouts = requests(ROLLOUT, 16, policy=policy, iteration=policy.iteration)
            made = run.cluster.collect(rollouts)
            assert_made_once(made, rollouts)
            found = run.cluster.close(explores, wait_s=20.0)
            assert len({result.key for result in found}) == len(found)
            assert {result.key for result in found} <= {request.key for request in explores}
            assert all(r.reward == reward(r.key, r.weights_checksum) for r in found if r.error is None)
            explored, rolled_out = explored + len(found), rolled_out + len(made)
        assert chaos.dealt.total() >= 60
        until(lambda: len(run.pids()) == 4, within_s=120, what="all workers back")
        policy = run.publish()
        last = requests(EXPLORE, 32, policy=policy, iteration=policy.iteration + 1)
        run.cluster.submit(last)
        assert_made_once(run.cluster.close(last, wait_s=60), last)
        assert_every_loss_went_on_where_it_was_committed(run, commit_every=1)
        reasons = Counter(event["reason"] for event in run.events("worker_lost"))
        assert {"killed", "preempted", "frozen"} <= set(reasons)
        assert not [e for e in run.events("result_rejected") if e["reason"] in ("unknown", "checksum")]
        attempts = [event["attempts"] for event in run.events("request_failed")]
        assert all(count == 5 for count in attempts)
        print(f"{dict(chaos.dealt)}: lost {dict(reasons)}, {rolled_out} rollouts, {explored} explorations")
