import math
import random

import numpy as np
import pytest
import scipy.stats

from src.core.selection import extremes
from src.rl.audit import AuditPair, audit_statistics, within_variance


def pairs_of(rewards: dict[int, list[tuple[float, float]]]) -> list[AuditPair]:
    return [
        AuditPair(instance, seed, stale, fresh)
        for instance, group in rewards.items()
        for seed, (stale, fresh) in enumerate(group)
    ]


def test_exact_ranking_within_prompts():
    """Prompt 1 is easier, prompt 0 spreads more: centred and pooled, both sides have one order."""
    found = audit_statistics(pairs_of({0: [(0.0, 0.0), (0.4, 0.2)], 1: [(0.8, 0.9), (0.9, 1.0)]}))
    assert found.spearman == 1.0
    assert found.random_variance == pytest.approx((0.02 + 0.005) / 2)
    assert found.pairs == 4


def test_the_difficulty_of_prompts_is_no_ranking():
    """Rewards that agree only in which prompt is hard correlate without centring, and not at all with it."""
    generator = np.random.default_rng(0)
    rewards = {
        instance: [(instance + 0.3 * a, instance + 0.3 * b) for a, b in generator.standard_normal((40, 2))]
        for instance in range(6)
    }
    pairs = pairs_of(rewards)
    raw = scipy.stats.spearmanr([pair.stale for pair in pairs], [pair.fresh for pair in pairs]).statistic
    assert raw > 0.9
    assert abs(audit_statistics(pairs).spearman) < 4 / math.sqrt(len(pairs))


def test_equal_to_scipy_on_centred_rewards():
    generator = np.random.default_rng(1)
    stale = generator.standard_normal((5, 8))
    fresh = 0.7 * stale + generator.standard_normal((5, 8))
    pairs = [AuditPair(p, n, float(stale[p, n]), float(fresh[p, n])) for p in range(5) for n in range(8)]
    found = audit_statistics(pairs)
    centred = [rewards - rewards.mean(axis=1, keepdims=True) for rewards in (stale, fresh)]
    assert found.spearman == pytest.approx(scipy.stats.spearmanr(*(c.ravel() for c in centred)).statistic)
    assert found.random_variance == pytest.approx(fresh.var(axis=1, ddof=1).mean())


def test_kept_seeds_alone_would_flatter():
    """Why audits are drawn uniformly: at rho = .6, the extremes by stale reward correlate far better."""
    generator = np.random.default_rng(2)
    stale = generator.standard_normal((40, 32))
    fresh = 0.6 * stale + 0.8 * generator.standard_normal((40, 32))
    everything = {p: list(zip(stale[p].tolist(), fresh[p].tolist(), strict=True)) for p in range(40)}
    kept = {
        p: [group[i] for i in extremes([s for s, _ in group], 8, random.Random(0))] for p, group in everything.items()
    }
    uniform = {p: group[:8] for p, group in everything.items()}
    assert audit_statistics(pairs_of(uniform)).spearman == pytest.approx(0.6, abs=0.1)
    assert audit_statistics(pairs_of(kept)).spearman > 0.7


def test_single_pairs_are_left_out():
    found = audit_statistics(pairs_of({0: [(0.1, 0.2)], 1: [(0.0, 1.0), (1.0, 0.0)], 2: [(0.5, 0.5)]}))
    assert (found.spearman, found.random_variance, found.pairs) == (-1.0, 0.5, 2)


def test_without_pairs_there_are_no_figures():
    found = audit_statistics([])
    assert math.isnan(found.spearman)
    assert math.isnan(found.random_variance)
    assert found.pairs == 0


def test_constant_rewards_have_no_ranking():
    found = audit_statistics(pairs_of({0: [(0.1, 0.0), (0.1, 0.1), (0.1, 0.3)], 1: [(0.7, 0.1), (0.7, 0.2)]}))
    assert math.isnan(found.spearman)
    assert found.pairs == 5


def test_variance_within_groups_is_unbiased():
    assert within_variance([[0.0, 1.0], [0.5], [], [0.2, 0.2]]) == pytest.approx(0.25)
    assert math.isnan(within_variance([[0.3]]))
