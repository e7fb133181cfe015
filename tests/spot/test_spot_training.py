"""Which spot nodes trained when, from the event log."""

from __future__ import annotations

from typing import Any

from src.spot.cost import Account, cost_of
from src.spot.prices import FixedPrices
from src.spot.spot_training import SpotTraining


def event(time_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, **fields}


def regrouped(time_s: float, *members: str, after_s: float = 0.0) -> dict[str, Any]:
    return event(time_s, "regrouped", team="ranks", members=list(members), regroup_s=after_s)


STARTED = [event(0.0, "rank_started", rank=0, worker="r", node=None)] + [
    event(0.0, "rank_started", rank=rank, worker=worker, node=node)
    for rank, (worker, node) in enumerate([("a", "n1"), ("b", "n1"), ("c", "n2")], start=1)
]
TRAINED = [
    event(0.0, "run_started"),
    event(0.0, "node_came", node="n1", gpus=2),
    *STARTED,
    event(9.0, "phase_started", name="train", iteration=0),
    event(10.0, "phase", name="train", iteration=0, start_s=9.0, end_s=10.0),  # the reserved one alone
    regrouped(11.0, "r", "a", "b", "c"),
    event(12.0, "phase_started", name="rollout", iteration=1),
    event(13.0, "phase", name="rollout", iteration=1, start_s=12.0, end_s=13.0),
    event(20.0, "phase_started", name="train", iteration=1),
    regrouped(25.0, "r", "a", "b", after_s=1.0),  # c is killed at 24
    event(26.0, "regrouped", team="sp0", members=["x"], regroup_s=0.0),
    event(30.0, "phase", name="train", iteration=1, start_s=20.0, end_s=29.5),
    regrouped(31.0, "r"),
    event(32.0, "phase_started", name="train", iteration=2),
    event(33.0, "phase", name="train", iteration=2, start_s=32.0, end_s=33.0),
]


def spans() -> list[Any]:
    training = SpotTraining()
    return [span for each in TRAINED for span in training.add(each)]


def test_a_span_lasts_as_long_as_the_phase_and_the_ranks():
    assert spans() == [
        {"iteration": 1, "nodes": ["n1", "n2"], "gpus": 3, "start_s": 20.0, "end_s": 24.0, "lost": False},
        {"iteration": 1, "nodes": ["n1"], "gpus": 2, "start_s": 25.0, "end_s": 29.5, "lost": False},
    ]


def test_what_spot_ranks_train_is_paid_at_the_spot_price_and_the_rest_is_idle():
    prices = FixedPrices(reserved_usd_per_gpu_hour=3600.0, spot_usd_per_gpu_hour=36.0)
    events = TRAINED + [event(33.0, "spot_trained", **span) for span in spans()[1:]]
    cost = cost_of(events, prices=prices)
    assert cost.gpu_s[Account("spot", "train")] == 2 * 4.5
    assert cost.gpu_s[Account("spot", "idle")] == 2 * 33.0 - 9.0
    assert abs(cost.spot_usd - 66.0 * 0.01) < 1e-9
    assert cost.gpu_s[Account("reserved", "train")] == 1.0 + 9.5 + 1.0
