"""What is known of how exploration pays, and how surely; older knowledge counts less."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from src.core import stats
from src.spot.planning.protocol import Pair

_PRIOR = (0.7, 0.3)
"""Mean and deviation of b before anything is measured: stale rewards usually rank well (correlation about .85)."""
_MODEL_ERROR = 0.1
"""Deviation of b from what audits say even if they were endless: for rewards that are not normal."""
_PAYOFF_NOISE = 0.3
"""Deviation of an iteration's payoff, in units of the random-seed variance."""

_PROMPTS_ALIKE = (4.0, 0.3)
"""Before anything is known of how prompts differ: t^2 / m^2 of `Prompts`, and for how many prompts that counts."""
_SCALE_DOUBT = 4.0
"""For how many prompts it counts that fresh rewards vary as much as stale ones."""


def unbiased_variance(values: Sequence[float]) -> float:
    """ddof = 1; needs two values."""
    return stats.variance(values) * len(values) / (len(values) - 1)


@dataclass
class Slope:
    """Belief in b: fresh variance gained per unit of stale variance gained by selection, for one number of steps.

    If fresh = a + beta stale + noise, the kept seeds have fresh variance beta^2 (their stale variance) + noise, so
    b = beta^2 (rho^2, where both variances are equal). Audits estimate beta from uniformly drawn seeds; the kept seeds
    would be biased, as extremes correlate better. Payoffs measure b itself: variance of the regenerated samples, less
    the random-seed variance, against the stale variance that selection had gained. The three sources (prior, audits,
    payoffs) are combined as normal ones; sums are discounted once per iteration.
    """

    xx: float = 0.0
    """Audits: sum of squared stale rewards, centred per prompt; and so on."""
    xy: float = 0.0
    yy: float = 0.0
    freedom: float = 0.0
    payoff_xx: float = 0.0
    payoff_xy: float = 0.0

    def discount(self, factor: float) -> None:
        for name in asdict(self):
            setattr(self, name, factor * getattr(self, name))

    def audit(self, groups: Iterable[Sequence[Pair]]) -> None:
        """Pairs of two or more seeds of a prompt, for several prompts."""
        for group in groups:
            stale, fresh = [pair.stale for pair in group], [pair.fresh for pair in group]
            dx = [value - stats.mean(stale) for value in stale]
            dy = [value - stats.mean(fresh) for value in fresh]
            self.xx += math.fsum(x * x for x in dx)
            self.xy += math.fsum(x * y for x, y in zip(dx, dy, strict=True))
            self.yy += math.fsum(y * y for y in dy)
            self.freedom += len(group) - 1

    def payoff(self, stale_gain: float, fresh_gain: float) -> None:
        """What selection gained, in units of the random-seed variance.

        Where rewards have long tails a single payoff may be anything: it counts for at most 1.5 times what b = 1 gives.
        """
        fresh_gain = min(fresh_gain, 1.5 * stale_gain)
        self.payoff_xx += stale_gain * stale_gain
        self.payoff_xy += stale_gain * fresh_gain

    def belief(self) -> tuple[float, float]:
        """Mean and standard deviation of b. The mean is in 0..1: no selection gains more than what it selects by."""
        mean, sd = _PRIOR
        precision = 1 / sd**2
        total = mean * precision
        if self.xx > 0 and self.freedom > 1:
            beta = self.xy / self.xx
            error = max(self.yy - beta * self.xy, 0.0) / self.freedom / self.xx  # variance of beta
            variance = _MODEL_ERROR**2 + 4 * beta * beta * error + 2 * error * error
            precision += 1 / variance
            total += max(beta, 0.0) ** 2 / variance
        precision += self.payoff_xx / _PAYOFF_NOISE**2
        total += self.payoff_xy / _PAYOFF_NOISE**2
        return min(max(total / precision, 0.0), 1.0), 1 / math.sqrt(precision)


@dataclass
class Prompts:
    """Belief in how prompts differ: their stale rewards have variances of mean m and deviation t.

    An estimate s^2 from n rewards has variance t^2 + 2 (m^2 + t^2) / (n - 1), so the best guess of a prompt's variance
    is w s^2 + (1 - w) m with

        w = n / (n + n_0),   n_0 = 2 (m^2 + t^2) / t^2

    The more alike prompts are, the more of its own rewards a prompt needs to be told apart.
    """

    count: float = 0.0
    first: float = 0.0
    """Sum of s^2."""
    second: float = 0.0
    """Sum of s^4."""
    noise: float = 0.0
    """Sum of 2 / (n - 1)."""

    def discount(self, factor: float) -> None:
        for name in asdict(self):
            setattr(self, name, factor * getattr(self, name))

    def add(self, rewards: Sequence[float]) -> None:
        if len(rewards) > 2:
            variance = unbiased_variance(rewards)
            self.count += 1
            self.first += variance
            self.second += variance * variance
            self.noise += 2 / (len(rewards) - 1)

    @property
    def typical(self) -> float | None:
        """m; None while it is not known to be positive."""
        return self.first / self.count if self.first > 0 else None

    @property
    def prior_seeds(self) -> float:
        """n_0"""
        known, relative = 0.0, 0.0
        if self.first > 0:
            mean = self.first / self.count
            sampling = 1 + self.noise / self.count
            relative = max(self.second / self.count / (mean * mean * sampling) - 1, 0.0)  # t^2 / m^2
            known = self.count
        doubt, guess = _PROMPTS_ALIKE
        relative = (doubt * guess + known * relative) / (doubt + known)
        return 2 + 2 / relative


@dataclass
class Scale:
    """Variance of fresh rewards per variance of stale ones, within a prompt, over the same uniformly drawn seeds."""

    stale: float = 0.0
    fresh: float = 0.0

    def discount(self, factor: float) -> None:
        for name in asdict(self):
            setattr(self, name, factor * getattr(self, name))

    def add(self, group: Sequence[Pair]) -> None:
        self.stale += unbiased_variance([pair.stale for pair in group])
        self.fresh += unbiased_variance([pair.fresh for pair in group])

    def ratio(self, typical: float) -> float:
        """Begins at 1, which counts as prompts of `typical` variance: a few audited seeds say little."""
        return (self.fresh + _SCALE_DOUBT * typical) / (self.stale + _SCALE_DOUBT * typical)


class Beliefs:
    """All that is learnt from one iteration to the next.

    Args:
        discount: weight that knowledge keeps per iteration.
    """

    def __init__(self, *, discount: float) -> None:
        self._discount = discount
        self._slopes: dict[int, Slope] = {}
        self.prompts = Prompts()
        self._scales: dict[int, Scale] = {}

    def age(self) -> None:
        """An iteration has passed."""
        self.prompts.discount(self._discount)
        for slope in self._slopes.values():
            slope.discount(self._discount)
        for scale in self._scales.values():
            scale.discount(self._discount)

    def slope(self, steps: int) -> tuple[float, float]:
        """Mean and deviation of b for exploration with `steps` steps."""
        return self._slopes.get(steps, Slope()).belief()

    def scale(self, steps: int) -> float:
        """Fresh variance per stale variance of random seeds."""
        return self._scales.get(steps, Scale()).ratio(self.prompts.typical or 1.0)

    def explored(self, rewards: Iterable[Sequence[float]]) -> None:
        """All rewards of an iteration, by prompt."""
        for group in rewards:
            self.prompts.add(group)

    def audited(self, steps: int, pairs: Iterable[Pair]) -> None:
        by_prompt = groupby(sorted(pairs, key=lambda pair: pair.prompt), key=lambda pair: pair.prompt)
        groups = [group for _, members in by_prompt if len(group := list(members)) > 1]
        self._slopes.setdefault(steps, Slope()).audit(groups)
        for group in groups:
            self._scales.setdefault(steps, Scale()).add(group)

    def paid(self, steps: int, stale_gain: float, fresh_gain: float) -> None:
        """Gains in units of the random-seed variance."""
        self._slopes.setdefault(steps, Slope()).payoff(stale_gain, fresh_gain)

    def state_dict(self) -> dict[str, Any]:
        return {
            "slopes": {str(steps): asdict(slope) for steps, slope in self._slopes.items()},
            "scales": {str(steps): asdict(scale) for steps, scale in self._scales.items()},
            "prompts": asdict(self.prompts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._slopes = {int(steps): Slope(**slope) for steps, slope in state["slopes"].items()}
        self._scales = {int(steps): Scale(**scale) for steps, scale in state["scales"].items()}
        self.prompts = Prompts(**state["prompts"])
