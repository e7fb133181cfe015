"""What an iteration tells about itself: names of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from src.core.stats import mean
from src.rl.advantages import Advantages
from src.rl.audit import within_variance
from src.rl.loss import LossSums
from src.rl.rollouts import Rollouts


def rollout_metrics(rollouts: Rollouts, advantages: Advantages) -> dict[str, float]:
    """Rewards and further scores of the iteration's samples, and how much contrast their groups have."""
    rewards = [[rollouts.rewards_B[row] for row in rows] for rows in rollouts.groups().values()]
    return {
        "train/reward": mean(rollouts.rewards_B),
        **{f"train/{name}": value for name, value in mean_scores(rollouts.scores_B).items()},
        "train/samples": float(len(rollouts)),
        "train/failed_samples": float(rollouts.failed),
        "train/zero_variance_groups": float(advantages.zero_variance),
        "train/reward_variance": within_variance(rewards),
    }


def mean_scores(scores_B: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each score over the samples that have it, by name."""
    names = sorted({name for scores in scores_B for name in scores})
    return {name: mean([scores[name] for scores in scores_B if name in scores]) for name in names}


def update_metrics(sums: LossSums, first: LossSums, norms: Sequence[float], parameters: int) -> dict[str, float]:
    """Diagnostics of the iteration's updates; `first` are the sums of the first one, taken before any weight moved.

    The gradient's root mean square is there to be compared with Adam's eps: far below it nothing is learned.
    """
    metrics = {"train/updates": float(len(norms))}
    if not norms:
        return metrics
    means = sums.means()
    return metrics | {
        "train/grad_norm": mean(norms),
        "train/grad_rms": mean(norms) / math.sqrt(parameters),
        "train/ratio": means["ratio"],
        "train/ratio_first": first.means()["ratio"],
        "train/abs_log_ratio_first": first.means()["abs_log_ratio"],
        "train/clip_fraction": means["clipped_low"] + means["clipped_high"],
        "train/clip_fraction_low": means["clipped_low"],
        "train/clip_fraction_high": means["clipped_high"],
        "train/kl": means["kl"],
        "train/policy_loss": means["policy_loss"],
        **{f"train/delta_log_prob/{step}": value for step, value in sums.per_step("abs_log_ratio").items()},
    }
