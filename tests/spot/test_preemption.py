"""Commits, notices and the size of leases: the scheduler's exact decisions."""

from __future__ import annotations

import math

import pytest

from src.spot import messages as m
from src.spot.sizing import Speed, lease_size
from tests.spot.bench import EVAL, EXPLORE, ROLLOUT, V0, V1, V2, Bench


@pytest.fixture
def bench() -> Bench:
    """With version 0.0 published and workers a and b; samples have 4 steps."""
    bench = Bench(lease_s=60, heartbeat_timeout_s=10)
    bench.publish(V0)
    bench.join("a", "b")
    return bench


# Commits


def test_a_request_goes_on_from_its_commit_on_another_worker(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a", "b")
    assert bench.commit("a", 0, 2) == ["4 commits of 0 by a, 0 refused"]
    assert bench(m.Leave("a", "killed")) == [
        "a is gone (killed) with 4",
        "a lost 0 (killed): 4 unfinished, 8 steps kept, 4 lost",
        "b gets 1: ROLLOUT 0 1 2 3 from step 2",
    ]
    lease = bench.leases[1]
    assert [(commit.key, commit.step) for commit in lease.resume] == [(r.key, 2) for r in lease.requests]
    assert bench.push("b", 1) == ["accept 0", "accept 1", "accept 2", "accept 3", "b finished 1"]


def test_a_lease_knows_whose_work_it_goes_on_with(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a")
    bench.commit("a", 0, 1)
    bench(m.Leave("a", "killed"))
    (grant,) = bench.scheduler.handle(0.0, m.Pull("b"))
    assert (grant.after, grant.lease.step) == ((0,), 1)


def test_steps_beyond_the_last_commit_are_lost_and_the_step_in_hand_too(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a")
    bench.commit("a", 0, 1)
    assert bench(m.Commits("a", 0, 2)) == []
    assert bench(m.Leave("a", "killed"))[1] == "a lost 0 (killed): 4 unfinished, 4 steps kept, 8 lost"


def test_after_the_last_step_there_is_no_step_in_hand(bench):
    bench.submit(ROLLOUT, 1)
    bench.pull("a")
    bench.commit("a", 0, 4)
    assert bench(m.Leave("a", "killed"))[1] == "a lost 0 (killed): 1 unfinished, 4 steps kept, 0 lost"
    assert bench.pull("b") == ["b gets 1: ROLLOUT 0 from step 4"]


def test_requests_before_different_steps_do_not_share_a_lease(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a")
    bench.commit("a", 0, 3)
    bench.submit(ROLLOUT, 3, first=4)
    assert bench(m.Leave("a", "killed"))[0] == "a is gone (killed) with 4"
    bench.join("c")
    assert bench.pull("b", "c") == ["b gets 1: ROLLOUT 0 1 2 3 from step 3", "c gets 2: ROLLOUT 4 5 6"]


def test_commits_only_go_forward(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a")
    assert bench.commit("a", 0, 2) == ["2 commits of 0 by a, 0 refused"]
    assert bench.commit("a", 0, 2) == ["0 commits of 0 by a, 2 refused"]
    assert bench.commit("a", 0, 1) == ["0 commits of 0 by a, 2 refused"]
    assert bench.commit("a", 0, 5) == ["0 commits of 0 by a, 2 refused"]  # there are 4 steps
    assert bench.commit("a", 0, 3, told=2) == ["2 commits of 0 by a, 0 refused"]  # it told 5 before


def test_a_commit_beyond_what_was_told_does_not_count(bench):
    bench.submit(ROLLOUT, 1)
    bench.pull("a")
    assert bench.commit("a", 0, 3, told=2) == ["0 commits of 0 by a, 1 refused"]


def test_only_the_holder_commits(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a")
    assert bench.commit("b", 0, 2) == ["0 commits of 0 by b, 2 refused"]
    bench(m.Leave("a", "killed"))
    assert bench.commit("a", 0, 2) == ["0 commits of 0 by a, 2 refused"]
    assert bench.pull("b") == ["b gets 1: ROLLOUT 0 1"]
    assert bench.commit("a", 0, 3) == ["0 commits of 0 by a, 2 refused"]
    assert bench.commit("a", 1, 3) == ["0 commits of 1 by a, 2 refused"]


def test_commits_with_the_wrong_weights_do_not_count(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a")
    assert bench.commit("a", 0, 2, checksum="other") == ["0 commits of 0 by a, 2 refused"]


def test_a_closed_request_loses_its_commit(bench):
    bench.submit(EXPLORE, 2)
    bench.pull("a")
    bench.commit("a", 0, 2)
    assert bench.close(EXPLORE, 1) == ["closed EXPLORE 0: 0 accepted, 1 dropped"]
    assert bench.commit("a", 0, 3) == ["1 commits of 0 by a, 1 refused"]
    bench.submit(EXPLORE, 1)
    assert bench.pull("b") == ["b gets 1: EXPLORE 0"]


def test_a_committed_exploration_stays_with_its_policy(bench):
    bench.submit(EXPLORE, 2)
    bench.pull("a")
    bench.commit("a", 0, 2)
    bench.publish(V1), bench.publish(V2)
    bench.submit(EXPLORE, 2, policy=V2, first=2)
    bench(m.Leave("a", "killed"))
    bench.join("c")
    assert bench.pull("b", "c") == ["b gets 1: EXPLORE 0 1 from step 2", "c gets 2: EXPLORE 2 3"]
    assert (bench.leases[1].policy, bench.leases[2].policy) == (V0, V2)


def test_a_sample_that_failed_starts_from_the_beginning(bench):
    bench.submit(ROLLOUT, 1)
    bench.pull("a")
    bench.commit("a", 0, 3)
    bench.push("a", 0, error="the latents are not finite")
    assert bench.pull("b") == ["b gets 1: ROLLOUT 0"]


def test_a_step_renews_the_deadline_and_a_repeated_word_does_not(bench):
    bench.submit(ROLLOUT, 8)
    bench.pull("a", "b")
    bench.now_s = 50
    bench(m.Commits("a", 0, 1))
    bench.now_s = 61
    bench(m.Heartbeat("a")), bench(m.Heartbeat("b"))
    assert bench(m.Tick()) == ["b lost 1 (deadline): 4 unfinished"]
    bench(m.Commits("a", 0, 1))
    bench.now_s = 111
    bench(m.Heartbeat("a")), bench(m.Heartbeat("b"))
    assert bench(m.Tick()) == ["a lost 0 (deadline): 4 unfinished"]


def test_leases_are_bounded_with_commits_too():
    bench = Bench(max_leases=5)
    bench.publish(V0)
    bench.submit(ROLLOUT, 1)
    for life in range(5):
        bench.join(f"w{life}")
        bench.pull(f"w{life}")
        bench.commit(f"w{life}", life, min(life + 1, 4))
        told = bench(m.Leave(f"w{life}", "killed"))
    assert told[-1] == "fail 0 after 0: given up after 5 leases: lease of w4 ended: killed"
    assert bench.scheduler.unfinished == 0


# Notices


def test_nobody_is_sent_to_a_worker_under_notice(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a", "b")
    assert bench(m.Notice("a", 30)) == ["a goes at 30 with 4"]
    assert bench(m.Notice("b", 30)) == ["b goes at 30 with 0", "dismiss b"]
    assert bench.pull("a", "b") == ["dismiss a", "dismiss b"]
    assert bench.submit(ROLLOUT, 1, first=4) == []
    bench.join("c")
    assert bench.pull("c") == ["c gets 1: ROLLOUT 4"]


def test_a_worker_under_notice_may_finish(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a")
    bench(m.Notice("a", 30))
    assert bench.push("a", 0) == ["accept 0", "accept 1", "a finished 0"]
    assert bench(m.Leave("a", "left")) == ["a is gone (preempted) with 0"]


def test_a_worker_under_notice_commits_gives_back_and_loses_no_step(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a", "b")
    bench(m.Notice("a", 30))
    bench.commit("a", 0, 3)
    assert bench.push("a", 0, skip=4) == [
        "a lost 0 (preempted): 4 unfinished, 12 steps kept, 0 lost",
        "b gets 1: ROLLOUT 0 1 2 3 from step 3",
    ]


def test_samples_that_failed_under_notice_are_no_preempted_work(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a")
    bench.commit("a", 0, 3)
    bench(m.Notice("a", 30))
    assert bench.push("a", 0, error="the latents are not finite") == ["a finished 0"]
    assert bench.pull("b") == ["b gets 1: ROLLOUT 0 1"]


def test_a_lease_may_be_given_back_without_a_notice(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a")
    bench.commit("a", 0, 3)
    assert bench.push("a", 0, skip=2) == ["a lost 0 (given back): 2 unfinished, 6 steps kept, 0 lost"]


def test_staggered_notices_are_one_and_the_earliest_deadline_counts(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a")
    assert bench(m.Notice("a", 9)) == ["a goes at 9 with 4"]
    assert bench(m.Notice("a", 5)) == bench(m.Notice("a", 12)) == []
    bench.now_s = 5
    assert bench(m.Tick()) == []
    bench.now_s = 6
    assert bench(m.Tick()) == ["a is gone (preempted) with 4", "a lost 0 (preempted): 4 unfinished"]


def test_a_risk_is_no_notice(bench):
    assert bench(m.Notice("a", math.inf)) == []
    bench.submit(EVAL, 1)
    assert bench.pull("a") == ["a gets 0: EVAL 0"]


def test_a_notice_for_a_worker_that_is_gone_is_late(bench):
    bench(m.Leave("a", "killed"))
    assert bench(m.Notice("a", 5)) == []


@pytest.mark.parametrize(
    ("noticed", "told", "reason"),
    [
        (True, "killed", "preempted"),
        (True, "left", "preempted"),
        (True, "failed", "failed"),
        (False, "killed", "killed"),
    ],
)
def test_a_preemption_is_no_crash(bench, noticed, told, reason):
    if noticed:
        bench(m.Notice("a", 30))
    assert bench(m.Leave("a", told)) == [f"a is gone ({reason}) with 0"]


def test_whoever_comes_back_gets_work_again(bench):
    bench(m.Notice("a", 1)), bench(m.Notice("b", 1))
    bench(m.Leave("a", "killed")), bench(m.Leave("b", "killed"))
    bench.submit(ROLLOUT, 1)
    assert bench.scheduler.unfinished == 1
    bench.join("a")
    assert bench.pull("a") == ["a gets 0: ROLLOUT 0"]


# The size of leases


def test_leases_follow_each_workers_measured_speed():
    bench = Bench(lease_target_s=2.0)
    bench.publish(V0)
    bench.join("fast", "slow", batch_size=2)
    bench.submit(EXPLORE, 100)
    assert bench.pull("fast", "slow") == ["fast gets 0: EXPLORE 0 1", "slow gets 1: EXPLORE 2 3"]
    bench.now_s = 0.5  # 0.125 s per step
    bench.push("fast", 0)
    assert bench.pull("fast") == ["fast gets 2: EXPLORE 4 5 6 7 8 9 10 11"]
    bench.now_s = 1.5
    bench.push("slow", 1)
    assert bench.pull("slow") == ["slow gets 3: EXPLORE 12 13"]


def test_a_resumed_lease_is_sized_by_the_steps_that_are_left():
    bench = Bench(lease_target_s=1.0)
    bench.publish(V0)
    bench.join("a", "b", batch_size=1)
    bench.submit(EXPLORE, 8)
    bench.pull("a")
    bench.now_s = 1.0
    bench.push("a", 0)
    assert bench.pull("a") == ["a gets 1: EXPLORE 1"]
    bench.commit("a", 1, 2)
    bench(m.Notice("b", 9)), bench(m.Leave("b", "left"))
    bench.push("a", 1, skip=1)
    assert bench.pull("a") == ["a gets 2: EXPLORE 1 from step 2"]


def test_the_tail_is_split_among_all_who_may_serve_it():
    bench = Bench(lease_target_s=1000.0)
    bench.publish(V0)
    bench.join("a", "b", batch_size=2)
    bench.submit(EXPLORE, 2)
    bench.pull("a")
    bench.now_s = 1.0
    bench.push("a", 0)
    bench.submit(EXPLORE, 13, first=2)
    assert bench.pull("a") == ["a gets 1: EXPLORE 2 3 4 5 6 7 8 9"]  # half, in whole passes
    bench(m.Notice("b", 99))
    bench.push("a", 1)
    assert bench.pull("a") == ["a gets 2: EXPLORE 10 11 12 13 14"]  # nobody else is left


@pytest.mark.parametrize(
    ("queued", "workers", "pass_step_s", "expected"),
    [
        (100, 1, None, 4),
        (100, 1, 0.1, 8),  # 0.5 s per pass
        (100, 1, 10.0, 4),
        (100, 1, 0.0, 100),
        (9, 2, 0.0, 8),
        (8, 2, 0.0, 4),
        (1, 50, 0.0, 4),
    ],
)
def test_the_size_of_a_lease(queued, workers, pass_step_s, expected):
    made = lease_size(queued=queued, steps=5, batch_size=4, workers=workers, speed=Speed(pass_step_s), target_s=1.0)
    assert made == expected


def test_speed_is_a_running_mean():
    speed = Speed()
    speed.measured(8.0, passes=2, steps=4)
    assert speed.pass_step_s == 1.0
    speed.measured(3.0, passes=1, steps=0)  # only decoding was left
    assert speed.pass_step_s == 2.0
