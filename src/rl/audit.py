"""How well stale exploration ranked: from a few explored seeds, drawn uniformly and made again when fresh.

The kept seeds must not be used for this: they are the extremes, and correlate better than seeds in general.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from src.core import stats


@dataclass(frozen=True)
class AuditPair:
    """A seed's reward when it was explored, and its reward with the weights that are trained."""

    instance: int
    seed: int
    stale: float
    fresh: float


@dataclass(frozen=True)
class AuditStatistics:
    """Over the pairs of prompts that have at least two; NaN if there are none."""

    spearman: float
    """Rank correlation of stale and fresh rewards, each centred per prompt and then pooled."""
    random_variance: float
    """Variance of fresh rewards within a prompt, of seeds drawn at random: selection is compared with it."""
    pairs: int


def within_variance(groups: Iterable[Sequence[float]]) -> float:
    """Unbiased variance (ddof = 1) inside a group, averaged over groups of two or more; NaN for none."""
    variances = [
        stats.variance(group) * len(group) / (len(group) - 1) for group in map(tuple, groups) if len(group) > 1
    ]
    return stats.mean(variances)


def audit_statistics(pairs: Iterable[AuditPair]) -> AuditStatistics:
    """Rank correlation and the variance of random seeds.

    Prompts differ in difficulty, which stale and fresh rewards share; centring removes it, because selection
    compares the seeds of one prompt only.
    """
    groups = [group for group in _by_instance(pairs).values() if len(group) > 1]
    stale = [value for group in groups for value in _centred([pair.stale for pair in group])]
    fresh = [value for group in groups for value in _centred([pair.fresh for pair in group])]
    return AuditStatistics(
        spearman=stats.spearman(stale, fresh),
        random_variance=within_variance([pair.fresh for pair in group] for group in groups),
        pairs=len(stale),
    )


def _by_instance(pairs: Iterable[AuditPair]) -> Mapping[int, list[AuditPair]]:
    groups: dict[int, list[AuditPair]] = {}
    for pair in pairs:
        groups.setdefault(pair.instance, []).append(pair)
    return groups


def _centred(values: Sequence[float]) -> list[float]:
    # A constant group gives exact zeros: ranks would turn the rounding of its mean into an order.
    centre = values[0] if min(values) == max(values) else stats.mean(values)
    return [value - centre for value in values]
