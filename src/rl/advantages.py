"""Group-relative advantages: how much better a sample is than the others of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

Spread = Callable[[Sequence[FloatArray]], list[float]]
"""The standard deviation that each of the groups is divided by."""


def group_std(groups: Sequence[FloatArray]) -> list[float]:
    """Each group by its own (population) standard deviation."""
    return [float(group.std()) for group in groups]


def batch_std(groups: Sequence[FloatArray]) -> list[float]:
    """All groups by the standard deviation of all their rewards: prompts of small contrast count less."""
    return [float(np.concatenate(groups).std())] * len(groups)


@dataclass(frozen=True)
class Advantages:
    """One array per group, in the order of its rewards, and how many groups had nothing to tell."""

    groups: tuple[FloatArray, ...]
    zero_variance: int


@dataclass(frozen=True)
class GroupAdvantage:
    """A = clip((r - mean) / (std + eps), -clamp, clamp)  (Flow-GRPO, arXiv 2505.05470).

    A group whose rewards are all equal has advantage 0 and is counted. Failed samples have no reward: they
    were left out before and move no baseline, so groups may differ in size.

    Args:
        spread: `group_std` or `batch_std`.
        before_selection: take mean and std over all rewards that the group was chosen by (DanceGRPO's best-of-N,
            arXiv 2505.07818) instead of the trained ones (PODS, arXiv 2504.13818), where it was chosen.
        clamp: largest absolute advantage.
        eps: added to the standard deviation.
    """

    spread: Spread = group_std
    before_selection: bool = False
    clamp: float = 5.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if not self.clamp > 0:
            raise ValueError(f"GroupAdvantage.clamp must be positive, got {self.clamp}")
        if not self.eps >= 0:
            raise ValueError(f"GroupAdvantage.eps must not be negative, got {self.eps}")

    def __call__(
        self, rewards: Sequence[Sequence[float]], explored: Sequence[Sequence[float]] | None = None
    ) -> Advantages:
        """The advantages of groups of rewards.

        Args:
            rewards: for each prompt instance the rewards of its trained samples, at least one.
            explored: for each prompt instance the rewards that its samples were chosen by, explored or of all that
                were made, if any; needed by `before_selection`.

        Raises:
            ValueError: a reward is not finite, a group is empty, or the two arguments do not pair up.
        """
        if not rewards:
            return Advantages((), 0)
        kept = [_group(group) for group in rewards]
        reference = self._reference(kept, explored)
        groups = tuple(
            self._normalise(group, base, std)
            for group, base, std in zip(kept, reference, self.spread(reference), strict=True)
        )
        return Advantages(groups, zero_variance=sum(map(_is_constant, reference)))

    def _reference(self, kept: list[FloatArray], explored: Sequence[Sequence[float]] | None) -> list[FloatArray]:
        """What the mean and the standard deviation of each group are taken over."""
        if not self.before_selection:
            return kept
        if explored is None or len(explored) != len(kept):
            raise ValueError(f"before_selection needs the explored rewards of each of the {len(kept)} groups")
        return [_group(seen) if seen else own for seen, own in zip(explored, kept, strict=True)]

    def _normalise(self, group: FloatArray, reference: FloatArray, std: float) -> FloatArray:
        if _is_constant(reference):
            return np.zeros_like(group)
        scaled: FloatArray = (group - reference.mean()) / (std + self.eps)
        return scaled.clip(-self.clamp, self.clamp)


def _group(rewards: Sequence[float]) -> FloatArray:
    group = np.asarray(rewards, dtype=np.float64)
    if group.size == 0 or not np.isfinite(group).all():
        raise ValueError(f"a group needs one or more finite rewards (failed samples are left out), got {rewards}")
    return group


def _is_constant(group: FloatArray) -> bool:
    # By the values, not by the standard deviation: rounding makes that of three 0.1 positive.
    return bool(group.min() == group.max())
