"""Rank statistics over plain sequences, shared by planner, training log and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def variance(values: Sequence[float]) -> float:
    """Population variance; NaN for no values."""
    centre = mean(values)
    return mean([(value - centre) ** 2 for value in values])


def midranks(values: Sequence[float]) -> list[float]:
    """Ranks 1..n; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for position in range(start, end):
            ranks[order[position]] = (start + 1 + end) / 2
        start = end
    return ranks


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Linear correlation; NaN if either side is constant or shorter than two."""
    if len(x) != len(y):
        raise ValueError(f"x and y must be equally long, got {len(x)} and {len(y)}")
    # Constant is decided by the values: the mean of three 0.1 is not 0.1, and rounding would be correlated.
    if len(x) < 2 or min(x) == max(x) or min(y) == max(y):
        return math.nan
    dx, dy = _unit_deviations(x), _unit_deviations(y)
    covariance = math.fsum(a * b for a, b in zip(dx, dy, strict=True))
    return covariance / math.sqrt(math.fsum(a * a for a in dx) * math.fsum(b * b for b in dy))


def _unit_deviations(values: Sequence[float]) -> list[float]:
    """Deviations from the mean, scaled to at most 1 so that squares of tiny ones do not vanish."""
    centre = mean(values)
    deviations = [value - centre for value in values]
    largest = max(map(abs, deviations))
    return [deviation / largest for deviation in deviations]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation with mid-ranks for ties; NaN if either side is constant."""
    return pearson(midranks(x), midranks(y))
