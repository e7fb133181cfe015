"""The clipped policy loss over (sample, step) pairs, and what it tells about the update.

Suffix K: pairs of a sample and one of its trained denoising steps, in any order.

Log-probabilities are means over a latent's D dimensions, not sums (Flow-GRPO): a ratio of 1 + c is a joint
log-ratio of about c D, so a clip range belongs to a resolution: c = 1e-5 is 0.66 nats at 512x512
(D = 65,536) and 4.1 nats at 1280x1280 (D = 409,600).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

_SUMS = ("pairs", "ratio", "clipped_low", "clipped_high", "abs_log_ratio", "kl", "policy_loss")


@dataclass(frozen=True)
class LossSums:
    """Sums over pairs for each denoising step, [7, T]: they add up over micro-batches, updates and ranks."""

    sums_XT: Tensor

    @classmethod
    def zeros(cls, steps: int) -> LossSums:
        """Of no pairs, for a grid of T = `steps` denoising steps."""
        return cls(torch.zeros(len(_SUMS), steps, dtype=torch.float64))

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.sums_XT + other.sums_XT)

    @property
    def pairs(self) -> int:
        return int(self.sums_XT[0].sum())

    def means(self) -> dict[str, float]:
        """Means over all pairs; NaN if there are none.

        `ratio`; `clipped_low`, `clipped_high`, the shares of pairs whose ratio is below and above the range;
        `abs_log_ratio`, |log ratio|; `kl` to the reference, NaN without one; `policy_loss`, without KL.
        """
        totals = self.sums_XT.sum(dim=1)
        return dict(zip(_SUMS[1:], (totals[1:] / totals[0]).tolist(), strict=True))

    def per_step(self, name: str) -> dict[int, float]:
        """Mean of one of these by denoising step, for the steps that have pairs."""
        pairs_T, sums_T = self.sums_XT[0].tolist(), self.sums_XT[_SUMS.index(name)].tolist()
        return {step: sums_T[step] / pairs for step, pairs in enumerate(pairs_T) if pairs}


@dataclass(frozen=True)
class StepTerms:
    """What a ratio may need to know of the denoising steps besides their log-probabilities, [K] each.

    `std_K` is the standard deviation of the step's noise, `duration_K` its -dt; `mean_shift_K` the mean over
    dimensions of (mean - mean_old)^2, how far the policy has moved, with gradient.
    """

    std_K: Tensor
    duration_K: Tensor
    mean_shift_K: Tensor


class Ratio(Protocol):
    """How likely a step is under the current policy, compared with the old one."""

    @property
    def needs_old_means(self) -> bool:
        """Whether it needs `StepTerms`, for which the old policy's means are kept."""

    def log_ratio(self, change_K: Tensor, terms: StepTerms | None) -> Tensor:
        """The logarithm of the ratio, from `change_K` = log p - log p_old."""

    def weights(self, terms: StepTerms | None) -> Tensor | float:
        """What the policy loss of each pair is multiplied by."""


@dataclass(frozen=True)
class PlainRatio:
    """exp(log p - log p_old)."""

    needs_old_means: ClassVar[bool] = False

    def log_ratio(self, change_K: Tensor, terms: StepTerms | None) -> Tensor:
        return change_K

    def weights(self, terms: StepTerms | None) -> Tensor | float:
        return 1.0


@dataclass(frozen=True)
class GuardedRatio:
    """exp(std (log p - log p_old + mean_d (mean - mean_old)^2 / (2 std^2))), weighted by 1 / -dt  (GRPO-Guard).

    The log-ratio of two Gaussians of equal std has mean -mean_d (mean - mean_old)^2 / (2 std^2) and a spread
    that grows as 1 / std: so clipping falls on one side, and mostly on the steps of little noise. The first is
    added back, the second multiplied away, and -dt balances the gradients of the steps (arXiv 2510.22319).
    """

    needs_old_means: ClassVar[bool] = True

    def log_ratio(self, change_K: Tensor, terms: StepTerms | None) -> Tensor:
        assert terms is not None
        return terms.std_K * (change_K + terms.mean_shift_K / (2 * terms.std_K**2))

    def weights(self, terms: StepTerms | None) -> Tensor | float:
        assert terms is not None
        return 1 / terms.duration_K


@dataclass(frozen=True)
class ClippedLoss:
    """L = w max(-A ratio, -A clip(ratio, 1 - c, 1 + c)) + beta KL.

    Args:
        clip_range: c.
        kl_weight: beta.
        ratio: the ratio of the two policies, and w; exp(log p - log p_old) and 1 by default.
    """

    clip_range: float
    kl_weight: float = 0.0
    ratio: Ratio = PlainRatio()

    def __post_init__(self) -> None:
        if not 0 < self.clip_range < 1:
            raise ValueError(f"ClippedLoss.clip_range must be between 0 and 1, got {self.clip_range}")
        if not self.kl_weight >= 0:
            raise ValueError(f"ClippedLoss.kl_weight must not be negative, got {self.kl_weight}")

    def __call__(
        self,
        *,
        log_probs_K: Tensor,
        old_log_probs_K: Tensor,
        advantages_K: Tensor,
        steps_K: Tensor,
        total_steps: int,
        kl_K: Tensor | None = None,
        terms: StepTerms | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The loss *summed* over the pairs, and its diagnostics.

        The sum is what lets micro-batches accumulate: divided by the pairs of the whole update, on all ranks,
        their gradients add up to that of the mean over all pairs, however they were split.

        Args:
            log_probs_K: under the policy that is trained, with gradient.
            old_log_probs_K: under the policy before the iteration's first update.
            advantages_K: of the sample of each pair.
            steps_K: denoising step of each pair, in 0 .. total_steps - 1.
            kl_K: divergence from the reference policy, with gradient; needed if `kl_weight` is not 0.
            terms: of the steps; needed if the ratio says so.

        Raises:
            ValueError: `kl_K` is missing or cannot give a gradient while `log_probs_K` can.
        """
        log_ratio_K = self.ratio.log_ratio(log_probs_K - old_log_probs_K.detach(), terms)
        ratio_K = log_ratio_K.exp()
        clipped_K = ratio_K.clamp(1 - self.clip_range, 1 + self.clip_range)
        policy_K = self.ratio.weights(terms) * torch.maximum(-advantages_K * ratio_K, -advantages_K * clipped_K)
        loss = policy_K.sum()
        if self.kl_weight:
            loss = loss + self.kl_weight * self._checked(kl_K, log_probs_K).sum()
        rows = {
            "pairs": torch.ones_like(ratio_K),
            "ratio": ratio_K,
            "clipped_low": ratio_K < 1 - self.clip_range,
            "clipped_high": ratio_K > 1 + self.clip_range,
            "abs_log_ratio": log_ratio_K.abs(),
            "kl": torch.full_like(ratio_K, torch.nan) if kl_K is None else kl_K,
            "policy_loss": policy_K,
        }
        values_XK = torch.stack([rows[name].detach().to("cpu", torch.float64) for name in _SUMS])
        sums = LossSums.zeros(total_steps)
        sums.sums_XT.index_add_(1, steps_K.cpu(), values_XK)
        return loss, sums

    def _checked(self, kl_K: Tensor | None, log_probs_K: Tensor) -> Tensor:
        """A KL that was computed without gradient would change the loss and train nothing."""
        if kl_K is None:
            raise ValueError(f"kl_K is needed for ClippedLoss.kl_weight={self.kl_weight}")
        if log_probs_K.requires_grad and not kl_K.requires_grad:
            raise ValueError("kl_K carries no gradient: compute the policy's mean with gradient")
        return kl_K
