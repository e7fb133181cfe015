import json
from pathlib import Path
from typing import Any

import pytest

from src.app.summary import five_lines, summarise, write_summary
from src.report.read import read_run
from src.spot.cost import Ledger
from src.spot.prices import FixedPrices
from tests.report.synthetic import write_run

PRICES = FixedPrices(reserved_usd_per_gpu_hour=3600.0, spot_usd_per_gpu_hour=360.0)


def ledger() -> Ledger:
    return Ledger(prices=PRICES)


def event(time_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, **fields}


def spot(time_s: float, worker: str, role: str = "spot") -> dict[str, Any]:
    return event(time_s, "worker_joined", worker=worker, role=role)


def trained(time_s: float, iteration: int) -> dict[str, Any]:
    return event(time_s, "phase", name="train", iteration=iteration, start_s=time_s - 1, end_s=time_s)


EVENTS = [
    event(0, "run_started", iteration=0),
    spot(0, "r0", role="reserved"),
    spot(2, "w0"),
    spot(2, "w1"),
    trained(3, 0),
    event(3, "explored", iteration=1, results=[1, 2, 3]),
    trained(4, 1),
    event(4, "explored", iteration=2, results=[1, 2]),
    event(3, "lease_granted", lease=0, worker="w1", request_kind="explore"),
    event(5, "worker_lost", worker="w1", reason="killed", requests=4),
    event(5, "lease_lost", lease=0, worker="w1", count=4, committed_steps=12, lost_steps=12),
    event(5, "request_failed"),
    # killed after two iterations with a checkpoint of the first
    event(5, "run_started", iteration=1),
    spot(5, "w2"),
    trained(6, 1),
    event(6, "explored", iteration=2, results=[1, 2, 3]),
    event(7, "run_ended", status="done", iteration=2),
    event(7, "worker_lost", worker="w2", reason="left", requests=0),
]

METRICS = [
    {"step": 0, "time_s": 1, "eval/reward": 0.4, "eval/judge": float("nan")},
    {
        "step": 1,
        "time_s": 3,
        "train/reward": 0.4,
        "explore/spearman": float("nan"),
        "explore/variance_kept": 0.9,
    },
    {"step": 2, "time_s": 6, "train/reward": 0.5, "explore/spearman": 0.8, "explore/variance_random": 0.1},
    {"step": 2, "time_s": 6, "explore/variance_kept": 0.3},
    {"step": 2, "time_s": 6, "eval/reward": 0.6, "eval/judge": 0.5},
]


def test_every_figure_is_recomputed_from_the_logs() -> None:
    summary = summarise(EVENTS, METRICS, ledger=ledger())
    assert summary == {
        "status": "done",
        "eval_reward_start": 0.4,
        "eval_reward_end": 0.6,
        "eval_judge_start": 0.5,
        "eval_judge_end": 0.5,
        "steps": 2,
        "repeated_iterations": 1,
        "wall_s": 7,
        "usd": pytest.approx(7 + 0.1 * (3 + 3 + 2)),
        "reserved_usd": pytest.approx(7),
        "spot_usd": pytest.approx(0.8),
        "reserved_utilisation": pytest.approx(3 / 7),
        "spot_utilisation": pytest.approx(1 / 8),
        "usd_per_point": pytest.approx(7.8 / 20),
        "gpu_s": {"reserved_train": 3, "reserved_idle": 4, "spot_lost": 1, "spot_explore": 1, "spot_idle": 6},
        "seeds_explored": 6,
        "preemptions": 1,
        "lost_samples": 4,
        "lost_steps": 12,
        "lost_usd": pytest.approx(0.1 * 1),
        "failed_samples": 1,
        "restarts": 1,
        "rank_correlation": 0.8,
        "variance_ratio": pytest.approx(3),
    }


def test_who_leaves_to_form_another_group_is_not_preempted() -> None:
    losses = [
        event(3, "worker_lost", worker=name, reason=why, requests=0)
        for name, why in (("w0", "left"), ("w1", "preempted"), ("w2", "frozen"))
    ]
    joined = [spot(2, name) for name in ("w0", "w1", "w2")]
    summary = summarise([event(0, "run_started", iteration=0), *joined, *losses], [], ledger=ledger())
    assert summary["preemptions"] == 2


def test_a_run_without_measurements_has_a_summary_of_nones() -> None:
    summary = summarise([event(0, "run_started", iteration=0)], [], ledger=ledger())
    assert (summary["status"], summary["steps"], summary["usd"]) == ("unfinished", 0, 0)
    assert summary["eval_reward_end"] is summary["rank_correlation"] is summary["variance_ratio"] is None
    json.dumps(summary, allow_nan=False)


def test_summary_json_is_what_the_report_reads(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", iterations=8)
    summary = write_summary(folder, ledger=ledger())
    assert read_run(folder).summary == summary
    assert summary["seeds_explored"] == 8 * 16
    assert summary["preemptions"] == 1


def test_the_terminal_gets_five_lines() -> None:
    text = five_lines(summarise(EVENTS, METRICS, ledger=ledger()), Path("outputs/x"))
    assert text.splitlines() == [
        "Held-out reward 0.400 -> 0.600, judge 0.500 -> 0.500",
        "2 iterations in 7.0 s, 7.8000 usd, 1 preemption cost 12 denoising steps",
        "6 seeds explored, rank correlation 0.80, 3.0 times the reward variance of random seeds",
        "Run folder: outputs/x",
        "Report:     python -m src.report outputs/x",
    ]


def test_five_lines_of_a_run_that_reached_nothing() -> None:
    lines = five_lines(summarise([], [], ledger=ledger()), Path("x")).splitlines()
    assert lines[:3] == [
        "Held-out reward not measured",
        "0 iterations in 0.0 s, 0.0000 usd, 0 preemptions",
        "0 seeds explored",
    ]
