"""What a few more seeds of a prompt are expected to add to the variance of the kept ones.

Of n explored rewards the G of largest variance are kept: the i lowest and G - i highest. Their expected variance is
found from expected order statistics, E x_(k:n) = Q((k - 3/8) / (n + 1/4)) (Blom 1958), where Q is the quantile function
of the prompt's rewards:

    V(n) = max_i Var { Q(p_1) .. Q(p_i), Q(p_{n-G+i+1}) .. Q(p_n) }

Q is taken from the n rewards that are known: they are its values at their own Blom positions (so that V(n) is exactly
what the best subset has now), with straight lines between them, and beyond the extremes the tails of a normal
distribution. Rewards with ties (0 or 1, share of right letters) are discrete, and have no tails: these are scaled by
(number of distinct values - 1) / (n - 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Array = NDArray[np.float64]


class Curves:
    """Expected variance of the kept G over a grid of explored sizes n = G, G + 1, ... up to `candidates`.

    The grid is exact near G and grows coarser: consecutive sizes differ by at least 1 and by about 1/8.

    Args:
        keep: G.
        candidates: the largest n.
    """

    def __init__(self, *, keep: int, candidates: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        sizes = [keep]
        while sizes[-1] < candidates:
            sizes.append(min(candidates, sizes[-1] + max(1, sizes[-1] // 8)))
        self.keep = keep
        self.sizes: Array = np.array(sizes, dtype=np.float64)
        order = np.arange(1, keep + 1)
        self._low_MG: Array = (order - 0.375) / (self.sizes[:, None] + 0.25)
        self.normal: Array = self.gain(ndtri)
        """The gain of standard normal rewards."""

    def kept_variance(self, low_MG: Array, high_MG: Array) -> Array:
        """V for order statistics: the G lowest, lowest first, and the G highest, highest first."""
        sums = _cumulated(low_MG) + _cumulated(high_MG)[:, ::-1]
        squares = _cumulated(low_MG**2) + _cumulated(high_MG**2)[:, ::-1]
        return np.asarray((squares / self.keep - (sums / self.keep) ** 2).max(axis=1))

    def gain(self, quantile: Callable[[Array], Array]) -> Array:
        """V(n) - V(G) over the grid for rewards with a quantile function."""
        variance_M = self.kept_variance(quantile(self._low_MG), quantile(1 - self._low_MG))
        return np.asarray(np.maximum.accumulate(np.maximum(variance_M - variance_M[0], 0.0)))

    def known(self, rewards: Sequence[float]) -> Array:
        """The gain for a prompt of which at least two rewards are known."""
        count = len(rewards)
        values = np.sort(np.asarray(rewards, dtype=np.float64))
        positions = (np.arange(1, count + 1) - 0.375) / (count + 0.25)
        distinct = 1 + np.count_nonzero(np.diff(values))
        spread = float(values.std(ddof=1)) * (distinct - 1) / (count - 1)
        first = ndtri(positions[0])

        def quantile(p: Array) -> Array:
            beyond = np.minimum(ndtri(np.minimum(p, 1 - p)) - first, 0.0)  # in standard deviations, negative
            return np.asarray(np.interp(p, positions, values) + spread * np.where(p < 0.5, beyond, -beyond))

        return self.gain(quantile)

    def best_rates(self, gain_PM: Array, asked_P: Array, reached_P: Array, room: float) -> Array:
        """The highest gain per seed that each prompt can reach with at most `room` more seeds; 0 if none.

        `reached_P` is the gain at the sizes `asked_P`.

        Gains are not concave: the first G seeds bring nothing by themselves. So the rate is the best average up to
        any larger size, the slope of the concave hull at `asked_P`.
        """
        more_PM = self.sizes - asked_P[:, None]
        reachable_PM = (more_PM >= 1) & (more_PM <= room)
        rate_PM = (gain_PM - reached_P[:, None]) / np.maximum(more_PM, 1.0)
        return np.asarray(np.where(reachable_PM, rate_PM, 0.0).max(axis=1))

    def at(self, gain_PM: Array, asked_P: Array) -> Array:
        """The gain of each prompt at its own size, between grid points in proportion; 0 below G."""
        last = len(self.sizes) - 1
        if not last:
            return np.zeros(len(asked_P))
        right = np.clip(np.searchsorted(self.sizes, asked_P), 1, last)
        rows = np.arange(len(asked_P))
        width = self.sizes[right] - self.sizes[right - 1]
        share = np.clip((asked_P - self.sizes[right - 1]) / width, 0.0, 1.0)
        return np.asarray((1 - share) * gain_PM[rows, right - 1] + share * gain_PM[rows, right])


def _cumulated(values_MG: Array) -> Array:
    """Sums of the first 0..G columns."""
    return np.concatenate([np.zeros((len(values_MG), 1)), np.cumsum(values_MG, axis=1)], axis=1)
