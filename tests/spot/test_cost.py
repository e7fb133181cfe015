from __future__ import annotations

import pytest

from src.spot.cost import Cost, Ledger, cost_of

PRICES = {"reserved_usd_per_gpu_hour": 36.0, "spot_usd_per_gpu_hour": 3.6}
"""One and a tenth of a cent per second."""


def joined(time_s: float, worker: str, role: str = "spot"):
    return {"time_s": time_s, "kind": "worker_joined", "worker": worker, "role": role}


def lost(time_s: float, worker: str):
    return {"time_s": time_s, "kind": "worker_lost", "worker": worker}


def event(time_s: float, kind: str):
    return {"time_s": time_s, "kind": kind}


def test_reserved_gpus_are_paid_for_all_the_time_and_spot_from_joined_to_lost():
    events = [
        event(0, "run_started"),
        joined(10, "rank", "reserved"),
        joined(20, "a"),
        joined(30, "b"),
        lost(50, "a"),
        event(100, "run_ended"),
    ]
    cost = cost_of(events, **PRICES, reserved_gpus=2)
    assert cost == Cost(reserved_s=200, spot_s=30 + 70, reserved_usd=pytest.approx(2.0), spot_usd=pytest.approx(0.1))
    assert cost.usd == pytest.approx(2.1)


def test_workers_of_a_killed_run_are_paid_for_until_its_last_event():
    events = [
        event(0, "run_started"),
        joined(0, "a"),
        event(40, "phase"),
        event(41, "run_started"),
        joined(51, "b"),
        lost(61, "b"),
    ]
    assert cost_of(events, **PRICES).spot_s == 40 + 10


def test_the_cost_is_right_at_any_moment():
    ledger = Ledger(**PRICES)
    assert ledger.cost.usd == 0
    ledger.add(joined(10, "a"))
    ledger.add(event(20, "phase"))
    assert (ledger.cost.reserved_s, ledger.cost.spot_s) == (20, 10)
    ledger.add(lost(25, "a"))
    ledger.add(lost(25, "a"))
    assert (ledger.cost.reserved_s, ledger.cost.spot_s) == (25, 15)


def test_spot_may_be_dearer_but_not_free_money():
    with pytest.raises(ValueError, match="spot_usd_per_gpu_hour must not be negative, got -1"):
        Ledger(reserved_usd_per_gpu_hour=1, spot_usd_per_gpu_hour=-1)
