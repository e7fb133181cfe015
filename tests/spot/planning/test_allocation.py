"""Expected variance of the kept seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.seeds import generator
from src.core.selection import max_variance
from src.core.stats import variance
from src.spot.planning.allocation import Curves

TABLE = {
    # N: relative variance of the kept 16 for normal rewards, at correlation 1, .93 and .6 (simulation, 4000 groups)
    24: (1.49, 1.42, 1.18),
    32: (1.88, 1.77, 1.31),
    48: (2.51, 2.30, 1.54),
    64: (2.97, 2.71, 1.71),
    96: (3.67, 3.31, 1.95),
}


def at(curves: Curves, gain_M: np.ndarray, size: float) -> float:
    return float(curves.at(gain_M[None], np.array([size]))[0])


@pytest.mark.parametrize("explored", TABLE)
def test_normal_rewards_have_the_simulated_contrast(explored: int) -> None:
    curves = Curves(keep=16, candidates=96)
    gain = at(curves, curves.normal, explored) / (15 / 16)  # population variance of 16 random ones
    for correlation, expected in zip((1.0, 0.93, 0.6), TABLE[explored], strict=True):
        assert 1 + correlation**2 * gain == pytest.approx(expected, rel=0.02)


@given(st.lists(st.floats(-10, 10), min_size=6, max_size=20))
def test_the_best_split_of_known_rewards_is_their_best_subset(rewards: list[float]) -> None:
    low, high = np.sort(rewards)[None, :5], np.sort(rewards)[None, ::-1][:, :5]
    kept = max_variance(rewards, 5, generator("ties"))
    best = variance([rewards[index] for index in kept])
    assert Curves(keep=5, candidates=5).kept_variance(low, high)[0] == pytest.approx(best, abs=1e-9)


def test_right_or_wrong_rewards_never_promise_more_than_half_and_half() -> None:
    curves = Curves(keep=4, candidates=64)
    decided = curves.known([0.0] * 8 + [1.0] * 8)
    assert decided.max() < 0.1  # 0 0 1 1 is there at once: what is left are the tails of a nearly discrete prompt
    rare = curves.known([0.0] * 14 + [1.0] * 2)
    assert rare[-1] == pytest.approx(0.25, abs=0.1)  # among 64 there will be two ones, and that is all there is


def test_equal_rewards_promise_nothing() -> None:
    assert not Curves(keep=4, candidates=64).known([0.5] * 5).any()


def test_the_best_rate_looks_beyond_the_seeds_that_bring_nothing() -> None:
    curves = Curves(keep=4, candidates=16)

    def rate(asked: float, room: float) -> float:
        asked_P = np.array([asked])
        reached_P = curves.at(curves.normal[None], asked_P)
        return float(curves.best_rates(curves.normal[None], asked_P, reached_P, room)[0])

    assert rate(0, np.inf) == pytest.approx((curves.normal / curves.sizes).max())
    assert rate(0, 4) == 0.0  # G seeds leave no choice
    assert rate(16, np.inf) == 0.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30), st.integers(1, 8), st.integers(0, 40))
def test_gains_never_fall(rewards: list[float], keep: int, more: int) -> None:
    gain = Curves(keep=keep, candidates=keep + more).known(rewards)
    assert gain[0] == 0.0
    assert (np.diff(gain) >= 0).all()
    assert np.isfinite(gain).all()


@given(st.lists(st.integers(0, 100), min_size=2, max_size=30), st.integers(1, 20), st.integers(-5, 5))
def test_gains_scale_as_variances(rewards: list[int], factor: int, shift: int) -> None:
    curves = Curves(keep=4, candidates=32)
    moved = curves.known([factor * value + shift for value in rewards])
    np.testing.assert_allclose(moved, factor**2 * curves.known(rewards), rtol=1e-6, atol=1e-6)
