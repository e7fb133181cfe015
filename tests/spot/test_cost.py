from __future__ import annotations

import pytest

from src.spot.cost import Account, Ledger, cost_of
from src.spot.prices import FixedPrices, PriceTable

PRICES = FixedPrices(reserved_usd_per_gpu_hour=36.0, spot_usd_per_gpu_hour=3.6)
"""One and a tenth of a cent per second."""


def joined(time_s: float, worker: str, role: str = "spot"):
    return {"time_s": time_s, "kind": "worker_joined", "worker": worker, "role": role}


def lost(time_s: float, worker: str):
    return {"time_s": time_s, "kind": "worker_lost", "worker": worker}


def event(time_s: float, kind: str, **fields):
    return {"time_s": time_s, "kind": kind, **fields}


def granted(time_s: float, lease: int, worker: str, request_kind: str):
    return event(time_s, "lease_granted", lease=lease, worker=worker, request_kind=request_kind)


def done(time_s: float, lease: int, work_s: float):
    return event(time_s, "lease_done", lease=lease, denoise_s=work_s, decode_s=0.0, score_s=0.0)


def test_reserved_gpus_are_paid_for_all_the_time_and_spot_from_joined_to_lost():
    events = [
        event(0, "run_started"),
        joined(10, "rank", "reserved"),
        joined(20, "a"),
        joined(30, "b"),
        lost(50, "a"),
        event(100, "run_ended"),
    ]
    cost = cost_of(events, prices=PRICES, reserved_gpus=2)
    assert (cost.reserved_s, cost.spot_s) == (200, 30 + 70)
    assert (cost.reserved_usd, cost.spot_usd) == pytest.approx((2.0, 0.1))
    assert cost.usd == pytest.approx(2.1)
    assert cost.gpu_s == {Account("reserved", "idle"): 200, Account("spot", "idle"): 100}


def test_a_run_that_goes_on_without_a_market_pays_for_its_workers_again():
    events = [
        event(0, "run_started"),
        event(10, "node_came", node="n", gpus=2),
        joined(15, "a"),
        event(15, "run_started"),  # the earlier life was killed
        joined(30, "b"),
        lost(40, "b"),
        joined(50, "c"),
        event(55, "run_ended"),
    ]
    assert cost_of(events, prices=PRICES).spot_s == 2 * 5 + 10 + 5


def test_nodes_are_paid_for_from_their_coming_to_their_going_and_groups_for_each_of_their_gpus():
    events = [
        event(0, "run_started"),
        event(10, "node_came", node="n", gpus=2),
        {**joined(40, "a"), "gpus": 2},  # after a start of 30 s
        granted(40, 0, "a", "explore"),
        done(50, 0, 10.0),
        lost(60, "a"),
        event(70, "node_went", node="n"),
        event(80, "node_came", node="n", gpus=2),
        event(100, "run_ended"),
    ]
    cost = cost_of(events, prices=PRICES)
    assert cost.spot_s == 2 * (60 + 20)
    assert cost.gpu_s[Account("spot", "explore")] == 20
    assert cost.spot_usd == pytest.approx(0.16)


def test_where_the_time_went():
    events = [
        event(0, "run_started"),
        joined(0, "rank", "reserved"),
        joined(0, "a"),
        event(2, "policy_published", publish_s=1.5),
        granted(2, 0, "a", "rollout"),
        granted(2, 1, "rank", "rollout"),  # the rank's time is told by its phases
        done(6, 0, 3.0),
        done(6, 1, 4.0),
        event(6, "phase", name="rollout", iteration=0, start_s=2.0, end_s=6.0),
        granted(6, 2, "a", "explore"),
        event(14, "lease_lost", lease=2, worker="a", committed_steps=6, lost_steps=2),
        lost(14, "a"),
        event(14, "phase", name="train", iteration=0, start_s=6.0, end_s=13.0),
        event(16, "phase", name="evaluate", iteration=1, start_s=14.0, end_s=16.0),
    ]
    cost = cost_of(events, prices=PRICES, reserved_gpus=2)
    assert cost.gpu_s == {
        ("reserved", "sync"): 3,
        ("reserved", "rollout"): 8,
        ("reserved", "train"): 14,
        ("reserved", "eval"): 4,
        ("reserved", "idle"): 3,
        ("spot", "rollout"): 3,
        ("spot", "sync"): 1,
        ("spot", "explore"): 6,
        ("spot", "lost"): 2,
        ("spot", "idle"): 2,
    }
    assert cost.lost_steps == 2
    assert (cost.lost_s, cost.lost_usd) == pytest.approx((2, 0.002))
    assert cost.utilisation("spot") == pytest.approx(10 / 14)
    assert cost.utilisation("reserved") == pytest.approx(29 / 32)
    assert sum(cost.usd_of.values()) == pytest.approx(32 * 0.01 + 14 * 0.001)


def test_a_lease_that_was_given_back_without_a_step_was_idle():
    events = [
        joined(0, "a"),
        granted(0, 0, "a", "explore"),
        event(1, "lease_lost", lease=0, worker="a", committed_steps=0, lost_steps=0),
    ]
    assert cost_of(events, prices=PRICES).gpu_s[Account("spot", "idle")] == 1


def test_workers_of_a_killed_run_are_paid_for_until_its_last_event_and_their_work_is_lost():
    events = [
        event(0, "run_started"),
        joined(0, "a"),
        granted(10, 0, "a", "explore"),
        event(40, "stop_requested"),
        event(41, "run_started"),
        joined(51, "b"),
        granted(51, 0, "b", "explore"),
        done(61, 0, 10.0),
        lost(61, "b"),
    ]
    cost = cost_of(events, prices=PRICES)
    assert cost.spot_s == 40 + 10
    assert (cost.lost_s, cost.gpu_s[Account("spot", "explore")]) == (30, 10)


def test_the_cost_is_right_at_any_moment():
    ledger = Ledger(prices=PRICES)
    assert ledger.cost.usd == 0
    assert ledger.cost.utilisation("spot") != ledger.cost.utilisation("spot")  # NaN: there was none
    ledger.add(joined(10, "a"))
    ledger.add(granted(12, 0, "a", "explore"))
    ledger.add(event(20, "stop_requested"))
    assert (ledger.cost.reserved_s, ledger.cost.spot_s, ledger.cost.utilisation("spot")) == (20, 10, 0.8)
    ledger.add(lost(25, "a"))
    ledger.add(lost(25, "a"))
    assert (ledger.cost.reserved_s, ledger.cost.spot_s) == (25, 15)


def test_prices_may_change_and_spot_may_be_the_dearer_one():
    table = PriceTable({("here", "reserved"): [(0, 36.0)], ("here", "spot"): [(0, 36.0), (100, 72.0)]})
    cost = cost_of([joined(50, "a"), lost(150, "a")], prices=table, zone="here")
    assert (cost.reserved_usd, cost.spot_usd) == pytest.approx((1.5, 0.5 + 1.0))
    with pytest.raises(ValueError, match="zone=there"):
        Ledger(prices=table, zone="there")


def test_metrics_have_a_name_for_every_account():
    cost = cost_of([joined(0, "a"), event(4, "run_ended")], prices=PRICES)
    assert cost.metrics() == pytest.approx(
        {
            "cost/usd": 0.044,
            "cost/reserved_usd": 0.04,
            "cost/spot_usd": 0.004,
            "cost/reserved_utilisation": 0.0,
            "cost/spot_utilisation": 0.0,
            "cost/lost_usd": 0.0,
            "cost/lost_steps": 0.0,
            "cost/reserved_idle_s": 4.0,
            "cost/spot_idle_s": 4.0,
        }
    )


def test_exploration_that_was_cut_off_is_work_and_not_lost():
    events = [
        event(0, "run_started"),
        joined(0, "a"),
        granted(0, 0, "a", "explore"),
        event(6, "lease_lost", lease=0, worker="a", reason="dropped", committed_steps=0, lost_steps=0),
        event(10, "run_ended"),
    ]
    cost = cost_of(events, prices=PRICES)
    assert (cost.gpu_s[Account("spot", "explore")], cost.gpu_s[Account("spot", "idle")]) == (6, 4)
    assert cost.lost_s == 0


def test_training_on_spot_gpus_is_work_unless_it_is_made_again():
    events = [
        event(0, "node_came", node="n", gpus=2),
        event(30, "spot_trained", gpus=2, start_s=10, end_s=30, lost=False),
        event(35, "spot_trained", gpus=2, start_s=30, end_s=35, lost=True),
        event(40, "node_went", node="n"),
    ]
    cost = cost_of(events, prices=PRICES)
    spot = {phase: seconds for (role, phase), seconds in cost.gpu_s.items() if role == "spot"}
    assert spot == {"train": 40, "lost": 10, "idle": 30}
    assert cost.lost_usd == pytest.approx(10 * 0.001)
    assert cost.utilisation("spot") == 0.5
