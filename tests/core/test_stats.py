import math
import warnings

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from src.core import stats

few = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=20)
many = st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=2, max_size=20)


def split(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [float(x) for x, _ in pairs], [float(y) for _, y in pairs]


@given(few | many)
def test_midranks_and_spearman_equal_scipy(pairs: list[tuple[float, float]]):
    x, y = split(pairs)
    assert stats.midranks(x) == scipy.stats.rankdata(x).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)
        expected = scipy.stats.spearmanr(x, y).statistic
    assert stats.spearman(x, y) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(few)
def test_pearson_equals_scipy(pairs: list[tuple[float, float]]):
    x, y = split(pairs)
    if min(x) == max(x) or min(y) == max(y):
        assert math.isnan(stats.pearson(x, y))
    else:
        assert stats.pearson(x, y) == pytest.approx(scipy.stats.pearsonr(x, y).statistic, abs=1e-12)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_mean_and_variance_equal_numpy(values: list[float]):
    assert stats.mean(values) == pytest.approx(np.mean(values), rel=1e-12, abs=1e-9)
    assert stats.variance(values) == pytest.approx(np.var(values), rel=1e-9, abs=1e-9)


def test_nothing_has_no_mean():
    assert math.isnan(stats.mean([]))
    assert math.isnan(stats.variance([]))


def test_a_constant_side_has_no_correlation():
    """The mean of three 0.1 is not 0.1: its rounding must not be correlated with anything."""
    assert math.isnan(stats.pearson([0.1, 0.1, 0.1], [1.0, 2.0, 3.0]))
    assert math.isnan(stats.spearman([1.0, 2.0, 3.0], [0.7, 0.7, 0.7]))
    assert math.isnan(stats.spearman([1.0], [1.0]))


def test_tiny_values_correlate():
    assert stats.pearson([1e-200, 2e-200, 3e-200], [1e-200, 2e-200, 3e-200]) == pytest.approx(1.0)


def test_sides_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="got 2 and 3"):
        stats.pearson([1.0, 2.0], [1.0, 2.0, 3.0])
