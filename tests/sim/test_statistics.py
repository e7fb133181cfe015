from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.sim.statistics import Comparison, Effort, Estimate, compare, crossing, effort, geometric_mean, targets

STEPS = [0, 4, 8, 12, 16]


def run(seed: int, iterations: float, pace_s: float, *, usd: float = 1.0, reached: bool = True) -> Effort:
    return Effort(seed=seed, iterations=iterations, seconds=iterations * pace_s, usd=usd, reached=reached)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.1, 0.2, 0.6, 0.7, 0.8], 7.0),  # .5 is three quarters of the way from .2 at 4 to .6 at 8
        ([0.1, 0.6, 0.2, 0.6, 0.7], 11.0),  # the first time above was not confirmed
        ([0.1, 0.5, 0.5, 0.1, 0.1], 4.0),  # at the target is enough, and a later fall does not matter
        ([0.6, 0.7, 0.1, 0.1, 0.1], 0.0),  # there from the start
        ([0.6, 0.1, 0.1, 0.5, 0.9], 12.0),
        ([0.1, 0.2, 0.3, 0.4, 0.9], None),  # nothing confirms the last one
        ([0.1, 0.6, 0.2, 0.6, 0.2], None),
        ([0.1, 0.2, 0.3, 0.4, 0.4], None),
    ],
)
def test_a_crossing_needs_two_evaluations_in_a_row(scores, expected):
    found = crossing(STEPS, scores, 0.5)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_curve_that_is_none_is_refused():
    assert crossing([], [], 0.5) is None
    with pytest.raises(ValueError, match="equally long, got 2 and 1"):
        crossing([0, 1], [0.1], 0.5)
    with pytest.raises(ValueError, match="steps must increase"):
        crossing([0, 1, 1], [0.1, 0.2, 0.3], 0.5)


@given(scores=st.lists(st.floats(0, 1), min_size=2, max_size=12), low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_higher_target_is_never_reached_earlier(scores, low, high):
    low, high = sorted((low, high))
    steps = list(range(len(scores)))
    at_low, at_high = crossing(steps, scores, low), crossing(steps, scores, high)
    assert at_high is None or (at_low is not None and at_low <= at_high)


@given(scores=st.lists(st.floats(0, 1), min_size=2, max_size=12), target=st.floats(0, 1), factor=st.floats(0.1, 10))
def test_a_crossing_scales_with_its_axis(scores, target, factor):
    steps = list(range(len(scores)))
    found, scaled = (crossing(axis, scores, target) for axis in (steps, [factor * step for step in steps]))
    assert (found is None) == (scaled is None)
    assert found is None or scaled == pytest.approx(factor * found)


def test_targets_lie_between_start_and_plateau():
    assert targets(0.3, 0.7) == pytest.approx((0.5, 0.6, 0.66))
    assert targets(0.0, 1.0, [0.25]) == (0.25,)
    with pytest.raises(ValueError, match=r"plateau must be above start=0\.5, got 0\.5"):
        targets(0.5, 0.5)


def test_effort_is_read_off_where_the_target_is_reached():
    curve = {"iterations": STEPS, "seconds": [0, 400, 800, 1600, 2400], "usd": [0, 1, 2, 3, 4]}
    found = effort(seed=3, scores=[0.1, 0.3, 0.4, 0.6, 0.7], target=0.5, **curve)
    assert found == Effort(seed=3, iterations=10.0, seconds=1200.0, usd=2.5, reached=True)
    never = effort(seed=3, scores=[0.1, 0.2, 0.3, 0.4, 0.5], target=0.5, **curve)
    assert never == Effort(seed=3, iterations=16, seconds=2400.0, usd=4.0, reached=False)


def test_ratios_of_equal_pairs_are_certain():
    """Twice the iterations at 300 instead of 200 s, and 6 instead of 2 usd."""
    pairs = [(run(seed, 20, 300, usd=6), run(seed, 10, 200, usd=2)) for seed in range(5)]
    found = compare(pairs, resamples=100)
    assert found == Comparison(
        time=estimate(3.0),
        iterations=estimate(2.0),
        seconds_per_iteration=estimate(1.5),
        cost=estimate(3.0),
        pairs=5,
        baseline_unreached=0,
        system_unreached=0,
    )


def estimate(value: float) -> Estimate:
    near = pytest.approx(value)
    return Estimate(near, near, near, "exact")


def test_the_mean_is_geometric_and_the_interval_holds_what_two_seeds_can_give():
    found = compare([(run(0, 10, 1), run(0, 10, 1)), (run(1, 40, 1), run(1, 10, 1))], resamples=1000).iterations
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 1.0, 4.0))


def test_runs_that_never_reach_the_target_stay_in_and_make_bounds():
    good, bad = (run(0, 30, 1), run(0, 10, 1)), (run(1, 50, 1, reached=False), run(1, 10, 1))
    found = compare([good, bad], resamples=100)
    assert found.time.value == pytest.approx(math.sqrt(3 * 5))
    assert (found.time.bound, found.iterations.bound, found.cost.bound) == ("lower", "lower", "lower")
    assert found.seconds_per_iteration.bound == "exact"
    assert found.baseline_unreached == 1
    assert str(found.time) == "≥ 3.87 [3.00, 5.00]"
    ours = (run(2, 30, 1), run(2, 50, 1, reached=False))
    assert compare([good, ours], resamples=10).time.bound == "upper"
    assert compare([bad, ours], resamples=10).time.bound == "none"


def test_the_bootstrap_draws_seeds_and_not_rows():
    """Ten rows of one seed are one observation: the interval is that of two rows, not that of twenty."""
    two = geometric_mean([0.0, math.log(4)], [0, 1], resamples=500)
    twenty = geometric_mean([0.0] * 10 + [math.log(4)] * 10, [0] * 10 + [1] * 10, resamples=500)
    assert (twenty.low, twenty.high) == pytest.approx((two.low, two.high))
    rows_apart = geometric_mean([0.0] * 10 + [math.log(4)] * 10, list(range(20)), resamples=500)
    assert rows_apart.high - rows_apart.low < 0.7 * (two.high - two.low)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Normal logs, 30 seeds: the percentile interval of a mean is a little narrow, 93 % instead of 95 %."""
    random = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        logs = random.normal(math.log(2), 0.5, size=30).tolist()
        found = geometric_mean(logs, list(range(30)), resamples=400, seed=trial)
        covered += found.low <= 2.0 <= found.high
    assert 0.89 <= covered / 300 <= 0.98


EFFORTS = st.tuples(
    st.integers(0, 4), st.floats(1, 100), st.floats(0.1, 1000), st.floats(1, 100), st.floats(0.1, 1000), st.booleans()
)


@given(rows=st.lists(EFFORTS, min_size=1, max_size=12), shuffler=st.randoms())
def test_time_is_iterations_times_pace_and_the_order_of_pairs_does_not_matter(rows, shuffler):
    pairs = [(run(s, i, p, reached=reached), run(s, j, q)) for s, i, p, j, q, reached in rows]
    found = compare(pairs, resamples=50)
    assert found.time.value == pytest.approx(found.iterations.value * found.seconds_per_iteration.value)
    shuffler.shuffle(pairs)
    again = compare(pairs, resamples=50)
    assert (again.time.value, again.time.low, again.time.high) == pytest.approx(
        (found.time.value, found.time.low, found.time.high)
    )


@given(rows=st.lists(EFFORTS, min_size=1, max_size=12))
def test_exchanging_the_systems_inverts_the_ratio(rows):
    pairs = [(run(s, i, p, reached=reached), run(s, j, q)) for s, i, p, j, q, reached in rows]
    there, back = compare(pairs, resamples=50), compare([(b, a) for a, b in pairs], resamples=50)
    assert there.time.value * back.time.value == pytest.approx(1)
    assert there.time.low * back.time.high == pytest.approx(1)
    assert {there.time.bound, back.time.bound} in ({"exact"}, {"lower", "upper"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare([(run(0, 1, 1), run(1, 1, 1))]), "must share its learning seed, got 0 and 1"),
        (lambda: compare([]), "not empty, got 0 and 0"),
        (lambda: geometric_mean([0.0], [0, 1]), "equally long and not empty, got 1 and 2"),
        (lambda: geometric_mean([0.0], [0], level=1.0), "level within 0..1"),
        (lambda: run(0, 0, 1), "iterations must be positive and finite, got 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
