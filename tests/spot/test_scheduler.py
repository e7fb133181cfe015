"""The scheduler's rules, each as the exact list of its decisions."""

from __future__ import annotations

import pytest

from src.core.types import SampleSpec
from src.spot import messages as m
from src.spot.scheduler import Scheduler
from tests.spot.bench import AUDIT, EVAL, EXPLORE, ROLLOUT, V0, V1, V2, V3, V4, Bench
from tests.spot.fakes import requests


@pytest.fixture
def bench() -> Bench:
    """With version 0.0 published and workers a and b."""
    bench = Bench(lease_s=60, heartbeat_timeout_s=10)
    bench.publish(V0)
    bench.join("a", "b")
    return bench


def test_a_lease_is_one_forward_pass_in_order_of_submission(bench):
    bench.submit(ROLLOUT, 10)
    assert bench.pull("a", "b", "a", "b") == [
        "a gets 0: ROLLOUT 0 1 2 3",
        "b gets 1: ROLLOUT 4 5 6 7",
        "a gets 2: ROLLOUT 8 9",
    ]


def test_workers_wait_in_order_of_arrival_until_there_is_work(bench):
    assert bench.pull("b", "a") == []
    assert bench.submit(EVAL, 5) == ["b gets 0: EVAL 0 1 2 3", "a gets 1: EVAL 4"]


def test_who_is_lost_while_waiting_gets_nothing(bench):
    bench.pull("a", "b")
    assert bench(m.Leave("a", "killed")) == ["a is gone (killed) with 0"]
    assert bench.submit(EVAL, 5) == ["b gets 0: EVAL 0 1 2 3"]


def test_who_withdraws_gets_nothing(bench):
    bench.pull("a", "b")
    assert bench(m.Withdraw("a")) == []
    assert bench.submit(EVAL, 5) == ["b gets 0: EVAL 0 1 2 3"]


def test_the_smallest_kind_goes_first(bench):
    for kind in (EXPLORE, AUDIT, EVAL, ROLLOUT):
        bench.submit(kind, 1)
    assert bench.pull("a", "a", "a", "a") == [
        "a gets 0: ROLLOUT 0",
        "a gets 1: EVAL 0",
        "a gets 2: AUDIT 0",
        "a gets 3: EXPLORE 0",
    ]


def test_a_worker_gets_only_the_kinds_it_serves(bench):
    bench.join("rank", kinds=frozenset({ROLLOUT, EVAL}))
    bench.submit(EXPLORE, 1)
    assert bench.pull("rank") == []
    assert bench.pull("a") == ["a gets 0: EXPLORE 0"]
    assert bench.submit(ROLLOUT, 1) == ["rank gets 1: ROLLOUT 0"]


def test_requests_of_different_specs_do_not_share_a_lease(bench):
    bench.submit(ROLLOUT, 3)
    bench.submit(ROLLOUT, 3, first=3, spec=SampleSpec(steps=4, stochastic_steps=(2, 3)))
    bench.submit(ROLLOUT, 1, first=6)
    assert bench.pull("a", "b") == ["a gets 0: ROLLOUT 0 1 2 6", "b gets 1: ROLLOUT 3 4 5"]


def test_results_finish_a_lease(bench):
    bench.submit(ROLLOUT, 3)
    bench.pull("a")
    assert bench.push("a", 0) == ["accept 0", "accept 1", "accept 2", "a finished 0"]
    assert bench.close(ROLLOUT, 3) == ["closed ROLLOUT 0: 3 accepted, 0 dropped"]
    assert bench.scheduler.unfinished == 0


def test_what_a_result_leaves_out_goes_to_the_head_of_the_queue(bench):
    bench.submit(ROLLOUT, 8)
    bench.pull("a")
    bench.pull("b")
    bench.submit(ROLLOUT, 4, first=8)
    assert bench.push("a", 0, skip=2) == ["accept 0", "accept 1", "a finished 0"]
    assert bench.pull("a") == ["a gets 2: ROLLOUT 2 3 8 9"]


def test_a_lost_workers_requests_go_to_those_who_wait(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a", "b")
    assert bench(m.Leave("a", "killed")) == [
        "a is gone (killed) with 4",
        "a lost 0 (killed): 4 unfinished",
        "b gets 1: ROLLOUT 0 1 2 3",
    ]
    assert bench(m.Leave("a", "killed")) == []


def test_a_lost_workers_results_still_count_until_others_have_them(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a")
    bench(m.Leave("a", "killed"))
    assert bench.push("a", 0, skip=2) == ["accept 0", "accept 1"]
    assert bench.pull("b") == ["b gets 1: ROLLOUT 2 3"]
    assert bench.push("a", 0) == [
        "reject 0 of a: duplicate",
        "reject 1 of a: duplicate",
        "accept 2",
        "accept 3",
    ]
    assert bench.push("b", 1) == ["reject 2 of b: duplicate", "reject 3 of b: duplicate", "b finished 1"]
    assert bench.scheduler.unfinished == 0


def test_silence_is_a_frozen_worker_and_any_word_is_a_heartbeat(bench):
    bench.submit(ROLLOUT, 8)
    bench.pull("a", "b")
    bench.now_s = 8
    bench(m.Heartbeat("b"))
    bench.now_s = 10
    assert bench(m.Tick()) == []
    bench.now_s = 10.5
    assert bench(m.Tick()) == ["a is gone (frozen) with 4", "a lost 0 (frozen): 4 unfinished"]
    assert bench.pull("a") == ["dismiss a"]
    bench.push("b", 1)
    bench.now_s = 20
    assert bench(m.Tick()) == []


def test_an_unwatched_worker_may_be_silent(bench):
    bench.join("rank", watched=False)
    bench.now_s = 1000
    assert bench(m.Tick()) == ["a is gone (frozen) with 0", "b is gone (frozen) with 0"]
    bench.submit(EVAL, 1)
    assert bench.pull("rank") == ["rank gets 0: EVAL 0"]


def test_a_lease_ends_at_its_deadline_but_its_worker_stays(bench):
    bench.submit(ROLLOUT, 4)
    bench.pull("a", "b")
    bench.now_s = 61
    bench(m.Heartbeat("a")), bench(m.Heartbeat("b"))
    assert bench(m.Tick()) == ["a lost 0 (deadline): 4 unfinished", "b gets 1: ROLLOUT 0 1 2 3"]
    assert bench.push("a", 0) == ["accept 0", "accept 1", "accept 2", "accept 3"]
    bench.submit(ROLLOUT, 1, first=9)
    assert bench.pull("a") == ["a gets 2: ROLLOUT 9"]


def test_a_failed_sample_is_tried_again_and_then_given_up(bench):
    bench = Bench(max_attempts=2)
    bench.publish(V0)
    bench.join("a")
    bench.submit(ROLLOUT, 2)
    assert bench.pull("a") == ["a gets 0: ROLLOUT 0 1"]
    assert bench.push("a", 0, error="no text found") == ["a finished 0"]
    assert bench.pull("a") == ["a gets 1: ROLLOUT 0 1"]
    assert bench.push("a", 1, skip=1, error="no text found") == ["a finished 1", "fail 0 after 2: no text found"]
    assert bench.pull("a") == ["a gets 2: ROLLOUT 1"]  # it was left out the second time, which is no failure
    bench.push("a", 2)
    assert bench.close(ROLLOUT, 2) == ["closed ROLLOUT 0: 2 accepted, 0 dropped"]


def lose(bench: Bench, reason: str, name: str, lease: int) -> list[str]:
    """The holder of the only request is lost."""
    match reason:
        case "preempted":
            bench(m.Notice(name, bench.now_s + 1))
            bench.now_s += 1.5
            return bench(m.Tick())
        case "given back":
            bench(m.Notice(name, bench.now_s + 1))
            return bench.push(name, lease, skip=1)
        case "frozen":
            bench.now_s += 11
            return bench(m.Tick())
        case "deadline":
            bench.now_s += 61
            bench(m.Heartbeat(name))
            return bench(m.Tick())
        case _:
            return bench(m.Leave(name, reason))


@pytest.mark.parametrize("reason", ["killed", "left", "preempted", "given back", "frozen", "deadline"])
def test_what_becomes_of_workers_is_no_failure_of_their_requests(reason):
    bench = Bench(lease_s=60, heartbeat_timeout_s=10, max_attempts=2, max_leases=50)
    bench.publish(V0)
    bench.submit(ROLLOUT, 1)
    for life in range(49):
        bench.join(f"w{life}")
        assert bench.pull(f"w{life}") == [f"w{life} gets {life}: ROLLOUT 0"]
        assert not [told for told in lose(bench, reason, f"w{life}", life) if told.startswith("fail")]
    bench.join("w49")
    bench.pull("w49")
    (failed,) = [told for told in lose(bench, reason, "w49", 49) if told.startswith("fail")]
    assert failed.startswith("fail 0 after 0: given up after 50 leases: lease of w49 ended: ")
    assert bench.scheduler.unfinished == 0


def test_a_request_fails_with_the_fifth_worker_that_fails_under_it():
    bench = Bench()
    bench.publish(V0)
    bench.submit(ROLLOUT, 1)
    for life in range(6):
        bench.join(f"w{life}")
        assert bench.pull(f"w{life}") == [f"w{life} gets {life}: ROLLOUT 0"]
        reason = "killed" if life == 2 else "failed"
        gone = [f"w{life} is gone ({reason}) with 1", f"w{life} lost {life} ({reason}): 1 unfinished"]
        failed = ["fail 0 after 5: lease of w5 ended: failed"] if life == 5 else []
        assert bench(m.Leave(f"w{life}", reason)) == gone + failed


def test_an_error_of_somebody_who_does_not_hold_the_request_is_no_attempt(bench):
    bench = Bench(max_attempts=1)
    bench.publish(V0)
    bench.join("a", "b")
    bench.submit(ROLLOUT, 1)
    bench.pull("a")
    assert bench.push("b", 0) == ["reject 0 of b: not leased"]
    bench(m.Leave("a", "killed"))
    assert bench.pull("b") == ["b gets 1: ROLLOUT 0"]
    assert bench.push("a", 0, error="late") == []
    assert bench.push("b", 1) == ["accept 0", "b finished 1"]


# Who gets what failed


def test_who_spoilt_a_request_gets_other_work_first(bench):
    bench.submit(ROLLOUT, 6)
    bench.pull("a")
    bench.push("a", 0, checksum="other")
    assert bench.pull("a", "b") == ["a gets 1: ROLLOUT 4 5", "b gets 2: ROLLOUT 0 1 2 3"]


def test_who_spoilt_a_request_lets_others_that_wait_go_first(bench):
    bench.submit(ROLLOUT, 1)
    bench.pull("a", "a", "b")  # a waits for another lease, and came before b
    assert bench.push("a", 0, error="no text found") == ["a finished 0", "b gets 1: ROLLOUT 0"]


def test_who_spoilt_a_request_gets_it_again_if_there_is_nobody_else(bench):
    bench.submit(ROLLOUT, 1)
    bench.submit(EXPLORE, 1)
    bench.pull("a")
    bench.push("a", 0, error="no text found")
    assert bench.pull("a") == ["a gets 1: ROLLOUT 0"]  # what is less urgent waits
    bench.push("a", 1)
    assert bench.pull("a") == ["a gets 2: EXPLORE 0"]


def test_wrong_weights_are_rejected_and_made_again(bench):
    bench.submit(ROLLOUT, 2)
    bench.pull("a", "b")
    assert bench.push("a", 0, checksum="other") == [
        "reject 0 of a: checksum",
        "reject 1 of a: checksum",
        "a finished 0",
        "b gets 1: ROLLOUT 0 1",
    ]


def test_results_of_somebody_elses_lease_are_rejected(bench):
    bench.submit(ROLLOUT, 1)
    bench.pull("a")
    assert bench.push("b", 0) == ["reject 0 of b: not leased"]
    assert bench.push("a", 0) == ["accept 0", "a finished 0"]


def test_closed_requests_are_dropped_wherever_they_are(bench):
    bench.submit(EXPLORE, 9)
    bench.pull("a", "b")
    bench.push("a", 0, skip=1)
    assert bench.close(EXPLORE, 9) == ["closed EXPLORE 0: 3 accepted, 6 dropped"]
    assert bench.push("b", 1) == [*(f"reject {seed} of b: closed" for seed in (4, 5, 6, 7)), "b finished 1"]
    assert bench.push("b", 1) == [f"reject {seed} of b: unknown" for seed in (4, 5, 6, 7)]
    assert bench.pull("a") == []
    assert bench.close(EXPLORE, 9) == []
    assert bench.scheduler.unfinished == 0


def test_a_closed_request_may_come_again_and_its_old_lease_does_not_touch_it(bench):
    bench.submit(EXPLORE, 1)
    bench.pull("a")
    bench.close(EXPLORE, 1)
    assert bench.submit(EXPLORE, 1) == []
    assert bench.pull("b") == ["b gets 1: EXPLORE 0"]
    assert bench.push("a", 0) == ["reject 0 of a: not leased", "a finished 0"]
    assert bench.pull("a") == []
    assert bench.push("b", 1) == ["accept 0", "b finished 1"]


def test_without_workers_requests_wait(bench):
    bench(m.Leave("a", "left")), bench(m.Leave("b", "left"))
    assert bench.submit(ROLLOUT, 2) == []
    assert bench.scheduler.unfinished == 2
    bench.join("c")
    assert bench.pull("c") == ["c gets 0: ROLLOUT 0 1"]


@pytest.mark.parametrize("kind", [ROLLOUT, EVAL, AUDIT])
def test_only_the_newest_policy_makes_what_must_be_fresh(bench, kind):
    bench.publish(V1)
    with pytest.raises(ValueError, match=r"needs a published policy \(0\.1\); 0\.0 is an older one"):
        bench.submit(kind, 1, policy=V0)
    with pytest.raises(ValueError, match=r"0\.2 is not known"):
        bench.submit(kind, 1, policy=V2)
    assert bench.scheduler.unfinished == 0


def test_exploration_may_be_one_policy_behind(bench):
    bench.publish(V1)
    bench.submit(EXPLORE, 1, policy=V0)
    bench.publish(V2)
    with pytest.raises(ValueError, match=r"\(0\.2 or 0\.1\); 0\.0 is an older one"):
        bench.submit(EXPLORE, 1, policy=V0, first=1)
    assert bench.pull("a") == ["a gets 0: EXPLORE 0"]
    assert bench.push("a", 0) == ["accept 0", "a finished 0"]


def test_policies_never_go_backwards(bench):
    bench.publish(V2)
    for version in (V2, V1):
        with pytest.raises(ValueError, match="not newer than the published"):
            bench.publish(version)


def test_a_policy_is_not_replaced_under_open_requests_that_need_it(bench):
    bench.submit(AUDIT, 3)
    with pytest.raises(ValueError, match="3 open AUDITs need"):
        bench.publish(V1)


def test_old_policies_are_retired_when_nobody_can_need_them():
    bench = Bench(keep_versions=2)
    bench.join("a")
    assert bench.publish(V0) == []
    bench.submit(EXPLORE, 6)
    bench.pull("a")
    assert bench.publish(V1) == []
    assert bench.publish(V2) == []  # 0.0 is leased
    bench(m.Leave("a", "killed"))
    assert bench.publish(V3) == ["retire 0.1"]  # requests for 0.0 are queued
    bench.close(EXPLORE, 6)
    assert bench.publish(V4) == ["retire 0.0", "retire 0.2"]


def test_a_key_is_open_once(bench):
    bench.submit(ROLLOUT, 1)
    with pytest.raises(ValueError, match="open already"):
        bench.submit(ROLLOUT, 2)
    with pytest.raises(ValueError, match="submitted twice"):
        bench(m.Submit(requests(EVAL, 1, policy=V0) * 2))
    assert bench.scheduler.unfinished == 1
    bench.close(ROLLOUT, 1)
    bench.submit(ROLLOUT, 1)


def test_a_name_joins_once(bench):
    with pytest.raises(ValueError, match="a has joined already"):
        bench.join("a")


@pytest.mark.parametrize(
    "settings",
    [
        {"lease_s": 0},
        {"heartbeat_timeout_s": -1},
        {"max_attempts": 0},
        {"max_leases": 4},
        {"keep_versions": 1},
        {"lease_target_s": -1},
    ],
)
def test_settings_are_checked(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name} must .*got {value}"):
        Scheduler(**settings)
