"""Time and cost to a score, compared between two systems: crossings, ratios, and how sure they are.

Rules
- A run reaches a target when two evaluations in a row are at or above it, at the point where the line from the
  evaluation before crosses it.
- A run that never does stays in: it counts with all that it used, as a lower bound of what it would have needed.
- A ratio is the geometric mean, over pairs of runs, of what the baseline needed / what the system needed. So
  time ratio = ratio of iterations x ratio of seconds per iteration holds exactly, also for the means.
- Intervals are percentiles of a bootstrap that draws learning seeds with replacement and takes all pairs of each: runs
  that share a seed (on several traces, say) are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from src.core import seeds

SHARES = (0.5, 0.75, 0.9)

Bound = Literal["exact", "lower", "upper", "none"]
"""What an estimate is of the truth: `none` where runs of both sides never reached the target."""


def targets(start: float, plateau: float, shares: Sequence[float] = SHARES) -> tuple[float, ...]:
    """Scores that lie at these shares of the way from `start` to `plateau`.

    Raises:
        ValueError: the plateau is not above the start.
    """
    if not plateau > start:
        raise ValueError(f"plateau must be above start={start}, got {plateau}")
    return tuple(start + share * (plateau - start) for share in shares)


def crossing(steps: Sequence[float], scores: Sequence[float], target: float) -> float | None:
    """Where a curve reaches the target for good measure; None if it never does.

    That is before the first of two evaluations in a row with scores >= target, on the line from the evaluation before.

    Args:
        steps: increasing; iterations, hours or usd.
        scores: one each.
    """
    if len(steps) != len(scores):
        raise ValueError(f"steps and scores must be equally long, got {len(steps)} and {len(scores)}")
    if any(not later > earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"steps must increase, got {list(steps)}")
    for first in range(len(scores) - 1):
        if scores[first] >= target and scores[first + 1] >= target:
            if first == 0:
                return float(steps[0])
            share = (target - scores[first - 1]) / (scores[first] - scores[first - 1])
            return float(steps[first - 1] + share * (steps[first] - steps[first - 1]))
    return None


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a run used until it reached a target; all that it used if it never did.

    Args:
        seed: the learning seed.
        reached: whether it did.
    """

    seed: int
    iterations: float
    seconds: float
    usd: float
    reached: bool

    def __post_init__(self) -> None:
        for name in ("iterations", "seconds", "usd"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")


def effort(
    *,
    seed: int,
    iterations: Sequence[float],
    seconds: Sequence[float],
    usd: Sequence[float],
    scores: Sequence[float],
    target: float,
) -> Effort:
    """The effort of a run from its evaluations: what had been done, passed and paid at each, and its score."""
    reached = crossing(iterations, scores, target)
    at = iterations[-1] if reached is None else reached
    return Effort(
        seed=seed,
        iterations=at,
        seconds=float(np.interp(at, iterations, seconds)),
        usd=float(np.interp(at, iterations, usd)),
        reached=reached is not None,
    )


@dataclass(frozen=True)
class Estimate:
    """A ratio, its percentile interval, and what they bound."""

    value: float
    low: float
    high: float
    bound: Bound

    def __str__(self) -> str:
        sign = {"exact": "", "lower": "≥ ", "upper": "≤ ", "none": "? "}[self.bound]
        return f"{sign}{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Comparison:
    """How many times less a system needs than a baseline. `time` is `iterations` times `seconds_per_iteration`."""

    time: Estimate
    iterations: Estimate
    seconds_per_iteration: Estimate
    cost: Estimate
    pairs: int
    baseline_unreached: int
    """Pairs whose baseline never reached the target: the truth is above the estimate."""
    system_unreached: int
    """Pairs whose system never did: the truth is below."""


def compare(
    pairs: Sequence[tuple[Effort, Effort]], *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Comparison:
    """Ratios baseline / system over pairs (baseline, system) that share a learning seed.

    Raises:
        ValueError: there is no pair, or a pair's seeds differ.
    """
    for baseline, system in pairs:
        if baseline.seed != system.seed:
            raise ValueError(f"a pair must share its learning seed, got {baseline.seed} and {system.seed}")
    logs = {
        name: [math.log(getattr(baseline, name) / getattr(system, name)) for baseline, system in pairs]
        for name in ("seconds", "iterations", "usd")
    }
    logs["pace"] = [s - i for s, i in zip(logs["seconds"], logs["iterations"], strict=True)]
    baseline_unreached = sum(not baseline.reached for baseline, _ in pairs)
    system_unreached = sum(not system.reached for _, system in pairs)
    bound = bound_of(baseline_unreached, system_unreached)
    clusters = [baseline.seed for baseline, _ in pairs]

    def estimate(name: str, bound: Bound) -> Estimate:
        return geometric_mean(logs[name], clusters, bound=bound, resamples=resamples, level=level, seed=seed)

    return Comparison(
        time=estimate("seconds", bound),
        iterations=estimate("iterations", bound),
        seconds_per_iteration=estimate("pace", "exact"),
        cost=estimate("usd", bound),
        pairs=len(pairs),
        baseline_unreached=baseline_unreached,
        system_unreached=system_unreached,
    )


def bound_of(baseline_unreached: int, system_unreached: int) -> Bound:
    if baseline_unreached and system_unreached:
        return "none"
    if baseline_unreached:
        return "lower"
    return "upper" if system_unreached else "exact"


def geometric_mean(
    logs: Sequence[float],
    clusters: Sequence[int],
    *,
    bound: Bound = "exact",
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """exp of the mean of `logs`, with the percentile interval of a bootstrap over clusters.

    Args:
        logs: logarithms of ratios.
        clusters: which cluster each belongs to. A cluster is drawn as a whole.
        seed: of the draws; the order of the rows does not matter.
    """
    if not logs or len(logs) != len(clusters):
        raise ValueError(f"logs and clusters must be equally long and not empty, got {len(logs)} and {len(clusters)}")
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"resamples must be at least 1 and level within 0..1, got {resamples} and {level}")
    names = sorted(set(clusters))
    rows = [sorted(log for log, cluster in zip(logs, clusters, strict=True) if cluster == name) for name in names]
    sums_K = np.array([math.fsum(row) for row in rows])
    counts_K = np.array([len(row) for row in rows])
    random = np.random.default_rng(seeds.derive("bootstrap", seed))
    drawn_RK = random.integers(len(names), size=(resamples, len(names)))
    means_R = sums_K[drawn_RK].sum(axis=1) / counts_K[drawn_RK].sum(axis=1)
    low, high = np.exp(np.quantile(means_R, [(1 - level) / 2, (1 + level) / 2]))
    return Estimate(math.exp(sums_K.sum() / counts_K.sum()), float(low), float(high), bound)
