from __future__ import annotations

import json
import math
from itertools import chain

import pytest

from benchmarks.evidence import systems
from benchmarks.evidence.figure import COLOURS
from benchmarks.evidence.runs import Store, curve, planned, with_scores
from benchmarks.evidence.tables import comparison, effort_of, effort_table, figures, goals, judged, plateau, ratio_table
from benchmarks.job import ROOT, resolved

RISE = [0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8]


def row(name: str, *, seed: int = 0, trace: str = "", pace_s: float = 100.0, usd: float = 2.0, skip: int = 1, **more):
    """A run that goes through `RISE`, `skip` times as fast, with two iterations between evaluations."""
    rewards = [RISE[min(index * skip, len(RISE) - 1)] for index in range(len(RISE))]
    points = [
        {"iteration": 2 * k, "seconds": 2 * k * pace_s, "usd": 2 * k * usd, "reward": reward, "judge": reward}
        for k, reward in enumerate(rewards)
    ]
    kept = {"preemptions": 3, "spot_utilisation": 0.5, "lost_usd": 0.1, "explored": [100, 200]}
    return {"system": name, "seed": seed, "trace": trace, "learning_rate": 3e-4, "curve": points, **kept, **more}


SLOW = [row("flow", seed=seed) for seed in (0, 1)]
FAST = [
    row("spotlight", seed=seed, trace=trace, pace_s=50.0, usd=3.0, skip=2)
    for seed in (0, 1)
    for trace in ("calm", "rough")
]


def test_targets_come_from_the_baselines_alone():
    assert plateau(SLOW) == pytest.approx(0.8)
    assert goals({"flow": SLOW}) == pytest.approx((0.6, 0.7, 0.76))


def test_a_ratio_is_that_of_iterations_times_that_of_seconds():
    found = comparison(SLOW, FAST, 0.6)
    assert found.pairs == 4
    assert found.iterations.value == pytest.approx(2.0)
    assert found.seconds_per_iteration.value == pytest.approx(2.0)
    assert found.time.value == pytest.approx(4.0)
    assert found.cost.value == pytest.approx(2.0 * 2.0 / 3.0)
    assert found.time.bound == "exact"


def test_a_target_below_the_first_evaluation_is_reached_on_the_way_there():
    early = effort_of(SLOW[0], 0.45)
    assert early.reached
    assert (early.iterations, early.seconds, early.usd) == pytest.approx((1.0, 100.0, 2.0))


def test_a_baseline_with_a_market_is_compared_on_the_same_market():
    on_markets = [row("boost", seed=seed, trace=trace) for seed in (0, 1) for trace in ("calm", "rough")]
    assert comparison(on_markets, FAST, 0.6).pairs == 4


def test_what_never_reaches_the_target_bounds_the_ratio():
    found = comparison([row("flow", seed=0, skip=0)], [FAST[0]], 0.6)
    assert found.time.bound == "lower"
    assert found.time.value == pytest.approx(12 * 100.0 / (2 * 50.0))


def test_tables_and_figures_tell_the_same():
    groups = {"flow": SLOW, "spotlight": FAST}
    line = figures(groups, ["flow"], "spotlight")
    assert line["flow_50_time_ratio"] == pytest.approx(4.0)
    assert line["runs"] == 6
    assert "| flow | 50%: 0.600 | 4.00 [4.00, 4.00] | 2.00 [2.00, 2.00] |" in ratio_table(groups, ["flow"], "spotlight")
    assert "| spotlight | 0.0003 | 4 | 0.800 | 50 |" in effort_table(groups, goals({"flow": SLOW}))


def test_a_curve_joins_what_was_logged_of_an_iteration():
    metrics = [
        {"step": 0, "time_s": 1.0, "eval/reward": 0.4, "eval/judge": 0.5},
        {"step": 1, "time_s": 9.0, "cost/usd": 2.0},
        {"step": 2, "time_s": 18.0, "cost/usd": 4.0},
        {"step": 2, "time_s": 19.0, "eval/reward": 0.6, "eval/judge": 0.7},
        {"step": 2, "time_s": 30.0, "explore/requested": 32.0},  # by the next iteration, with fresh weights
    ]
    learnt = curve(metrics)
    assert used(learnt) == [(0, 1.0, 0.0, 0.4), (2, 18.0, 4.0, 0.6)]
    timed = {"curve": curve([{"step": step, "time_s": 5.0 * step, "cost/usd": 1.0 * step} for step in (1, 2)])}
    assert used(with_scores(timed, {"curve": learnt})["curve"]) == [(0, 0.0, 0.0, 0.4), (2, 10.0, 2.0, 0.6)]


def used(points):
    return [(point["iteration"], point["seconds"], point["usd"], point["reward"]) for point in points]


ALL = [*systems.SYSTEMS.values(), *systems.LEVERS, *chain(*systems.ABLATIONS.values())]


@pytest.mark.parametrize("system", ALL, ids=lambda system: system.name)
def test_every_system_is_a_valid_configuration(system):
    run = planned(system, learning_rate=3e-4, seed=1, trace=systems.TRACES[1])
    config = resolved(run.all_overrides)
    assert config["trainer"]["max_steps"] == system.iterations
    assert math.isclose(config["algo"]["optimizer"]["lr"], 3e-4)
    assert (config["market"]["decider"] is not None) == system.market


def test_a_run_that_is_kept_is_not_repeated(tmp_path, monkeypatch):
    run = planned(systems.SYSTEMS["flow_grpo"], learning_rate=3e-4, seed=0)
    store = Store(tmp_path / "runs.jsonl", jobs=1)
    made = {**row("flow_grpo"), "key": run.key, "learnt": True, "took_s": 0.0}
    monkeypatch.setattr(store, "_made", lambda runs, learn: (made for _ in runs))
    assert store.rows([run, run]) == [made, made]
    monkeypatch.setattr(store, "_made", lambda runs, learn: pytest.fail("made again") if runs else ())
    assert store.rows([run]) == [made]
    store.close()
    again = Store(tmp_path / "runs.jsonl", jobs=1)
    monkeypatch.setattr(again, "_made", lambda runs, learn: pytest.fail("made again") if runs else ())
    assert again.rows([run]) == [made]
    again.close()


def test_a_run_is_the_same_wherever_the_project_is():
    run = planned(systems.SPOTLIGHT, learning_rate=3e-4, seed=0, trace=systems.TRACES[1])
    assert str(ROOT) in json.dumps(run.config)
    assert str(ROOT) not in json.dumps(run.decisive)
    assert run.config["cluster"]["spot_trains"] is False
    assert "spot_trains" not in run.decisive["cluster"]


def test_every_system_that_is_drawn_has_a_colour():
    assert len(set(COLOURS)) >= len({*systems.SYSTEMS} - systems.NOT_DRAWN)


def test_the_judge_may_be_the_yardstick():
    of = row("flow")
    doubting = {**of, "curve": [{**point, "judge": point["reward"] / 2} for point in of["curve"]]}

    assert plateau(judged([doubting])) == pytest.approx(0.4)
    assert plateau([doubting]) == pytest.approx(0.8)
