import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.selection import Selector, extremes, max_variance

SELECTORS: list[Selector] = [extremes, max_variance]
few_values = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=10)
any_values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=10)


def best_variance(rewards: list[float], count: int) -> float:
    """By trying all subsets."""
    return max(float(np.var(subset)) for subset in combinations(rewards, count))


@given(few_values | any_values, st.data())
def test_max_variance_equals_brute_force(rewards: list[float], data: st.DataObject):
    count = data.draw(st.integers(1, len(rewards)))
    kept = max_variance(rewards, count, random.Random(0))
    assert len(set(kept)) == count
    found = float(np.var([rewards[index] for index in kept]))
    assert found == pytest.approx(best_variance(rewards, count), rel=1e-9, abs=1e-15)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=10), st.data())
def test_max_variance_does_not_depend_on_scale(rewards: list[int], data: st.DataObject):
    """Factors that are powers of two are exact, so the choice must be the very same."""
    count = data.draw(st.integers(1, len(rewards)))
    kept = max_variance(rewards, count, random.Random(1))
    for factor in (2.0**-60, 2.0**60):
        scaled = [reward * factor for reward in rewards]
        assert max_variance(scaled, count, random.Random(1)) == kept


def test_max_variance_of_large_rewards_with_a_small_spread():
    assert max_variance([1e6 + 1e-4 * k for k in (3, 0, 1, 2)], 2, random.Random(0)) == [1, 0]


def test_max_variance_may_split_unevenly():
    """Three of 0, 0.1, 0.2, 1: two low and one high, where the extremes would keep one low and two high."""
    rewards = [0.1, 1.0, 0.0, 0.2]
    assert max_variance(rewards, 3, random.Random(0)) == [2, 0, 1]
    assert extremes(rewards, 3, random.Random(0)) == [2, 3, 1]


@pytest.mark.parametrize(("count", "kept"), [(2, [3, 1]), (3, [3, 2, 1]), (4, [3, 0, 2, 1]), (5, [3, 0, 4, 2, 1])])
def test_extremes_are_the_lowest_half_and_the_highest_rest(count: int, kept: list[int]):
    assert extremes([0.2, 0.9, 0.6, 0.1, 0.4], count, random.Random(0)) == kept


@pytest.mark.parametrize("select", SELECTORS)
def test_ties_are_random_but_reproducible(select: Selector):
    """Of ten equal rewards every one is kept in about 4 of 10 draws (2000 draws: standard deviation 22)."""
    rewards = [0.5] * 10
    times = [0] * 10
    for seed in range(2000):
        kept = select(rewards, 4, random.Random(seed))
        assert kept == select(rewards, 4, random.Random(seed))
        for index in kept:
            times[index] += 1
    assert all(abs(count - 800) < 4 * 22 for count in times)


@pytest.mark.parametrize("select", SELECTORS)
@given(rewards=few_values)
def test_all_are_kept_if_all_are_wanted(select: Selector, rewards: list[float]):
    kept = select(rewards, len(rewards), random.Random(0))
    assert sorted(kept) == list(range(len(rewards)))
    assert [rewards[index] for index in kept] == sorted(rewards)


@pytest.mark.parametrize("select", SELECTORS)
@pytest.mark.parametrize("count", [0, 4, -1])
def test_a_count_that_cannot_be_kept_is_refused(select: Selector, count: int):
    with pytest.raises(ValueError, match=rf"count must be in 1\.\.3 .* got {count}"):
        select([0.1, 0.2, 0.3], count, random.Random(0))


@pytest.mark.parametrize("select", SELECTORS)
def test_a_reward_that_is_no_number_is_refused(select: Selector):
    with pytest.raises(ValueError, match="rewards must be finite"):
        select([0.1, float("nan"), 0.3], 2, random.Random(0))


@pytest.mark.parametrize(("explored", "gain"), [(24, 1.49), (32, 1.88), (48, 2.51)])
@pytest.mark.parametrize("select", SELECTORS)
def test_expected_variance_of_normal_rewards(select: Selector, explored: int, gain: float):
    """Variance of the kept 16 over that of 16 random ones: figures computed apart, over 4000 groups."""
    groups = np.random.default_rng(0).standard_normal((600, explored))
    ties = random.Random(0)
    kept = [np.var([group[index] for index in select(group.tolist(), 16, ties)], ddof=1) for group in groups]
    assert np.mean(kept) == pytest.approx(gain, rel=0.03)


def test_ranking_without_information_keeps_the_variance():
    """Explored rewards that say nothing (rho = 0) choose random seeds: ratio 1."""
    generator = np.random.default_rng(1)
    ties = random.Random(0)
    fresh, stale = generator.standard_normal((2, 600, 48))
    kept = [
        np.var(true[max_variance(seen.tolist(), 16, ties)], ddof=1) for true, seen in zip(fresh, stale, strict=True)
    ]
    assert np.mean(kept) == pytest.approx(1.0, rel=0.05)
