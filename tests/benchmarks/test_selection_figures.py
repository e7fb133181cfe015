"""Figures of the selection study on curves and rewards made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.ranking import Ranked, ranking_figures
from benchmarks.selection_figures import figures, iterations_to, rates_table, tables


def run(arm: str, seed: int, rewards: list[float], ranking: list[dict[str, float]] | None = None) -> dict[str, Any]:
    curve = [[4 * point, reward, reward - 0.1] for point, reward in enumerate(rewards)]
    ranked = ranking or []
    return {"arm": arm, "seed": seed, "learning_rate": 3e-4, "curve": curve, "ranking": ranked, "seconds": 2.0}


def test_the_iterations_to_a_level_are_interpolated() -> None:
    assert iterations_to([(0, 0.4), (4, 0.5), (8, 0.7)], 0.6) == pytest.approx(6.0)
    assert iterations_to([(0, 0.4), (4, 0.5)], 0.4) == 0
    assert iterations_to([(0, 0.4), (4, 0.5), (8, 0.45)], 0.6) is None


def test_an_arm_that_is_twice_as_fast_has_ratio_two() -> None:
    rows = [
        run("random", 0, [0.4, 0.5, 0.6]),
        run("random", 1, [0.4, 0.5, 0.6]),
        run("stale_4g", 0, [0.4, 0.6, 0.8]),
        run("stale_4g", 1, [0.4, 0.6, 0.6]),
    ]
    found = figures(rows)
    assert found["random_final_reward"] == pytest.approx(0.6)
    assert found["iterations_random_over_stale_4g_ratio"] == pytest.approx(2.0)
    assert found["gain_stale_4g_over_random_ratio"] == pytest.approx(1.5)
    assert found["curves"]["stale_4g"][-1]["reward"] == pytest.approx({"mean": 0.7, "sd": math.sqrt(0.02)})
    assert found["curves"]["stale_4g"][-1]["judge"]["mean"] == pytest.approx(0.6)


def test_an_arm_that_never_gets_there_has_no_ratio_and_a_bound_in_the_table() -> None:
    rows = [run("random", 0, [0.4, 0.6]), run("slow", 0, [0.4, 0.5])]
    assert math.isnan(figures(rows)["iterations_random_over_slow_ratio"])
    assert "| slow | > 4 | < 1.00 | > 4 |" in tables(rows)


def test_learning_rates_are_listed_for_arms_that_had_several() -> None:
    rows = [run("random", 0, [0.4, 0.6]), run("stale_4g", 0, [0.4, 0.7])]
    assert rates_table(rows) == ""
    lower = {**run("random", 0, [0.4, 0.5]), "learning_rate": 1e-4}
    listed = rates_table([*rows, lower]).splitlines()[-2:]
    assert listed == ["| random | 0.0001 | 1 | 0.500 ± nan |", "| random | 0.0003 | 1 | 0.600 ± nan |"]


def test_the_ranking_is_averaged_over_iterations_first_and_compared_with_random() -> None:
    def at(share: float) -> dict[str, float]:
        return {
            "iteration": 4,
            **{f"spearman_{name}": 0.5 for name in ("stale", "ode", "random")},
            "variance_share_stale": share,
            "variance_share_ode": 0.25,
            "variance_share_random": 0.25,
        }

    rows = [run("random", 0, [0.4, 0.6]), run("stale_4g", 0, [0.4, 0.7], [at(0.5), at(1.0)])]
    found = figures(rows)
    assert found["ranking"]["variance_share_stale"]["mean"] == pytest.approx(0.75)
    assert found["variance_share_stale_over_random_ratio"] == pytest.approx(3.0)
    assert found["variance_share_ode_over_random_ratio"] == pytest.approx(1.0)


def test_a_perfect_ranking_keeps_all_of_the_best_variance_and_a_useless_one_little() -> None:
    fresh = [0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    misled = [0.5, 0.5, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    found = ranking_figures([Ranked(fresh_N=fresh, by={"stale": fresh, "ode": misled})], 2, 0)
    assert found["spearman_stale"] == pytest.approx(1.0)
    assert found["variance_share_stale"] == pytest.approx(1.0)
    assert found["variance_share_ode"] == 0.0
    # Unbiased variance of all eight, 0.5 / 7, halved for two kept ones; the best two have 0.25.
    assert found["variance_share_random"] == pytest.approx(0.5 / 7 / 2 / 0.25)
