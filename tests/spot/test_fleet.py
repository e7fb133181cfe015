"""Real processes on a real Ray: kills, freezes, and who finishes the work."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import pytest

from src.core.types import RequestKind
from src.spot.reaper import members
from tests.sockets import LOOPBACK, listening
from tests.spot.conftest import BATCH_SIZE, Run, until
from tests.spot.fakes import requests, reward

ROLLOUT, EVAL, AUDIT, EXPLORE = RequestKind
pytestmark = pytest.mark.timeout(60)


def assert_each_made_once(run: Run, made, asked) -> None:
    assert [result.key for result in made] == [request.key for request in asked]
    assert all(result.error is None for result in made)
    assert all(result.reward == reward(result.key, result.weights_checksum) for result in made)


def test_rank_and_spot_workers_share_a_rollout_and_workers_explore(run: Run):
    run.both_workers()
    policy = run.publish()
    explores = requests(EXPLORE, 16, policy=policy, iteration=policy.iteration + 1)
    run.cluster.submit(explores)
    rollouts = requests(ROLLOUT, 48, policy=policy, iteration=policy.iteration)
    made = run.cluster.collect(rollouts)
    assert_each_made_once(run, made, rollouts)
    roles = Counter(result.worker.split("-")[0] for result in made)
    assert roles["reserved"] >= BATCH_SIZE
    assert roles["spot"] >= 2 * BATCH_SIZE
    explored = run.cluster.close(explores, wait_s=20)
    assert_each_made_once(run, explored, explores)
    assert {result.worker.split("-")[0] for result in explored} == {"spot"}
    assert run.cluster.workers() == 2


def test_the_parent_gets_the_news(run: Run):
    run.cluster.log_metrics(7, {"train/reward": 0.25})
    run.cluster.record("evaluated", iteration=7, reward=0.5, judge=0.4, images=3)
    news = run.fleet.news(0, wait_s=5)
    assert [row["train/reward"] for row in news.metrics if row["step"] == 7] == [0.25]
    assert news.events[0]["kind"] == "run_started"
    assert news.events[-1]["kind"] == "evaluated"
    assert run.fleet.news(news.cursor, wait_s=0.1).events == []


def test_a_killed_worker_costs_its_unfinished_requests_and_comes_back(run: Run):
    run.both_workers()
    policy = run.publish()
    asked = requests(EXPLORE, 40, policy=policy, iteration=policy.iteration + 1)
    before = len(run.events("lease_granted"))
    run.cluster.submit(asked)
    victim, pid = run.busy_worker()
    os.kill(pid, signal.SIGKILL)
    made = run.cluster.close(asked, wait_s=20)
    assert_each_made_once(run, made, asked)

    (lost,) = run.events("worker_lost", worker=victim)
    assert (lost["reason"], lost["requests"]) == ("killed", BATCH_SIZE)
    granted = sum(event["count"] for event in run.events("lease_granted")[before:])
    assert granted == len(asked) + lost["requests"]

    successor = f"{victim.split('.')[0]}.{int(victim.split('.')[1]) + 1}"
    until(lambda: successor in run.pids(), within_s=20, what=f"{successor} after {victim}")
    again = requests(EXPLORE, 24, policy=policy, iteration=policy.iteration + 1, first=100)
    run.cluster.submit(again)
    made = run.cluster.close(again, wait_s=20)
    assert_each_made_once(run, made, again)
    assert successor in {result.worker for result in made}


def test_a_frozen_worker_is_found_killed_and_replaced(run: Run, thaw: list[int]):
    run.both_workers()
    policy = run.publish()
    asked = requests(EXPLORE, 24, policy=policy, iteration=policy.iteration + 1)
    run.cluster.submit(asked)
    victim, pid = run.busy_worker()
    thaw.append(pid)
    os.kill(pid, signal.SIGSTOP)
    made = run.cluster.close(asked, wait_s=20)
    assert_each_made_once(run, made, asked)
    (lost,) = run.events("worker_lost", worker=victim)
    assert (lost["reason"], lost["requests"]) == ("frozen", BATCH_SIZE)
    until(lambda: not os.path.exists(f"/proc/{pid}"), within_s=5, what="death of the frozen process")
    assert victim not in run.both_workers()


def test_an_error_in_the_fleet_is_told_and_workers_are_still_replaced(run: Run, monkeypatch, caplog):
    victim, pid = next(iter(run.both_workers().items()))
    raised = threading.Event()

    def refuse() -> None:
        raised.set()
        monkeypatch.undo()
        raise ValueError("the coordinator refuses")

    monkeypatch.setattr(run.fleet, "_keep_spares", refuse)
    assert raised.wait(10)
    os.kill(pid, signal.SIGKILL)
    until(lambda: run.events("worker_lost", worker=victim), within_s=20, what="its loss")
    run.both_workers()
    (record,) = [record for record in caplog.records if record.name == "src.spot.fleet" and record.exc_info]
    assert str(record.exc_info[1]) == "the coordinator refuses"


def test_with_all_workers_killed_the_rank_makes_everything(run: Run):
    policy = run.publish()
    for pid in run.both_workers().values():
        os.kill(pid, signal.SIGKILL)
    asked = requests(EVAL, 12, policy=policy, iteration=policy.iteration)
    assert_each_made_once(run, run.cluster.collect(asked), asked)
    run.both_workers()


def test_what_the_coordinator_refuses_is_an_error_at_the_caller(run: Run):
    policy = run.publish()
    run.publish()
    with pytest.raises(ValueError, match="is an older one") as raised:
        run.cluster.submit(requests(ROLLOUT, 1, policy=policy, iteration=policy.iteration))
    assert type(raised.value) is ValueError


def test_all_servers_of_the_job_listen_on_loopback(run: Run):
    addresses = listening([os.getpid(), *members(run.fleet.scratch)])
    assert addresses
    assert addresses.keys() <= LOOPBACK
