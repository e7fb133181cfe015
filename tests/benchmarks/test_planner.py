"""The planner benchmark: its worlds, its simulation, its figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.planner import AIMS, AWARE, UNAWARE, decision_times, shares, tables, trial
from benchmarks.planner_simulation import simulate
from benchmarks.planner_worlds import CANDIDATES, KEEP, STEPS, WORLDS, World, letters, normal
from src.spot.planning.simple import Fixed, LargestFeasible, NoExploration

STEADY = World("steady", normal)


def test_explored_and_fresh_rewards_correlate_as_the_world_says() -> None:
    draws = World("wide", normal, prompts=200).iteration(5)
    stale = [draws.stale(prompt, index, STEPS) for prompt in range(200) for index in range(20)]
    fresh = [draws.fresh(prompt, index) for prompt in range(200) for index in range(20)]
    assert np.corrcoef(stale, fresh)[0, 1] == pytest.approx(0.93, abs=0.01)
    assert draws.slope(STEPS) == pytest.approx(0.93**2, abs=0.05)
    assert draws.random_variance == pytest.approx(0.04, rel=0.01)


def test_letters_are_right_in_quarters() -> None:
    draws = World("letters", letters).iteration(1)
    assert {draws.fresh(prompt, index) for prompt in range(16) for index in range(50)} == {0, 0.25, 0.5, 0.75, 1}


def test_random_seeds_have_no_contrast_and_fixed_ones_what_tables_say() -> None:
    none = simulate(STEADY, NoExploration(), 30)
    fixed = simulate(STEADY, Fixed(seeds_per_prompt=16), 30)
    assert np.mean([outcome.contrast for outcome in none]) == pytest.approx(1.0, abs=0.1)
    assert np.mean([outcome.contrast for outcome in fixed]) == pytest.approx(1 + 0.93**2 * 0.94, abs=0.12)
    assert {outcome.explored for outcome in none} == {0}
    assert {outcome.explored for outcome in fixed} == {16 * STEADY.prompts}


def test_too_many_seeds_come_too_late_and_cost_no_more_than_the_time_there_is() -> None:
    (outcome,) = simulate(STEADY, Fixed(seeds_per_prompt=CANDIDATES), 1)
    assert outcome.late > 0
    assert outcome.explored + outcome.late == CANDIDATES * STEADY.prompts
    seconds = STEADY.iteration(1).training_s * STEADY.workers
    assert outcome.spot_usd == pytest.approx(seconds * STEADY.spot_usd_per_hour / 3600)


def test_every_world_and_planner_gives_figures() -> None:
    names = [*UNAWARE, *AWARE]
    results = {world.name: [trial(world, 2, names)] for world in (WORLDS[0], WORLDS[-2], WORLDS[-1])}
    figures = {
        "worlds": {
            world: {aim: {name: shares(trials, aim, name) for name in names} for aim in AIMS}
            for world, trials in results.items()
        }
    }
    for by_aim in figures["worlds"].values():
        for by_name in by_aim.values():
            assert by_name["oracle"]["share"]["mean"] == 1.0
            assert all(math.isfinite(own["contrast"]) and 0 <= own["missed"] <= 1 for own in by_name.values())
    assert tables(figures).count("| normal |") == len(AIMS)


def test_decisions_are_timed_until_all_is_explored() -> None:
    times = decision_times(LargestFeasible(), prompts=4, keep=KEEP, workers=2)
    assert times["decisions"] >= 8 * 4 * KEEP / 8 / 2
    assert 0 < times["median_s"] <= times["p99_s"] <= times["max_s"]
