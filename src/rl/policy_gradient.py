"""The gradient of the policy loss over (sample, step) pairs, in micro-batches of replayed denoising steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from src.core.types import SampleSpec
from src.models.adapter import Conditioning
from src.models.reference import Reference
from src.models.sampler import Sampler, log_probs_at, step_transition
from src.models.steps import Transition, gaussian_kl, mean_shift
from src.rl.loss import ClippedLoss, LossSums, StepTerms
from src.rl.rollouts import Pairs, Rollouts


@dataclass(frozen=True)
class TrainingSet:
    """What the updates of one iteration train on.

    `advantages_B` and the prompts' `cond` have a row per sample of `rollouts`; `old_log_probs_BS` are those that the
    ratio starts from, and `old_means_BSLC` the means of the steps at that point, where the ratio needs them.
    """

    rollouts: Rollouts
    cond: Conditioning
    spec: SampleSpec
    advantages_B: Tensor
    old_log_probs_BS: Tensor
    old_means_BSLC: Tensor | None = None


class PolicyGradient:
    """Replays denoising steps under the current weights.

    Args:
        sampler: how this job denoises; the replay uses its model, step rule and schedule.
        loss: the clipped loss.
        reference: the frozen policy that the KL term holds on to; None without KL term.
        micro_batch: pairs per forward and backward pass. It bounds memory and does not change the gradient.
        fill: give every pass that many rows, the last ones with repeats: for half precision, where the last bits of a
            velocity depend on the number of rows, and move a log-probability by more than a clip range.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        loss: ClippedLoss,
        reference: Reference | None,
        micro_batch: int,
        fill: bool = False,
    ) -> None:
        if bool(loss.kl_weight) != (reference is not None):
            raise ValueError(f"a reference is needed just when algo.loss.kl_weight is not 0, got {loss.kl_weight}")
        self._sampler = sampler
        self._loss = loss
        self._reference = reference
        self._micro_batch = micro_batch
        self._fill = fill

    @property
    def has_kl(self) -> bool:
        """Whether samples of advantage 0 have a gradient too."""
        return self._reference is not None

    @property
    def needs_old_means(self) -> bool:
        """Whether the training set has to hold `old_means_BSLC`."""
        return self._loss.ratio.needs_old_means

    def backward(
        self,
        data: TrainingSet,
        pairs: Pairs,
        *,
        scale: float,
        backward: Callable[[Tensor], None],
        rank: int = 0,
        ranks: int = 1,
    ) -> LossSums:
        """Accumulates the gradient of `scale` times the loss summed over this rank's share of the pairs.

        All ranks run equally many passes, since some reduce gradients in each; one that has no pairs left runs
        passes of weight 0. Returns the sums over its own pairs.
        """
        sums = LossSums.zeros(data.spec.steps)
        share = pairs.share(rank, ranks)
        parts = share.split(self._micro_batch) if len(share) else []
        for part in parts:
            loss, part_sums = self._loss_of(data, part)
            backward(loss * scale)
            sums = sums + part_sums
        for _ in range(math.ceil(math.ceil(len(pairs) / ranks) / self._micro_batch) - len(parts)):
            loss, _ = self._loss_of(data, pairs.split(1)[0])
            backward(loss * 0.0)
        return sums

    @torch.no_grad()
    def log_probs(self, rollouts: Rollouts, cond: Conditioning, spec: SampleSpec, rows: Sequence[int]) -> Tensor:
        """Log-probabilities of all stochastic steps of some samples under the current weights, [rows, S]."""
        parts = [self._replay(rollouts, cond, spec, part)[0] for part in self._all_pairs(spec, rows)]
        return torch.cat(parts).reshape(len(rows), -1)

    @torch.no_grad()
    def old_policy(self, rollouts: Rollouts, cond: Conditioning, spec: SampleSpec) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B, S] and means [B, S, L, C] of all stochastic steps under the current weights."""
        replays = [self._replay(rollouts, cond, spec, part) for part in self._all_pairs(spec, range(len(rollouts)))]
        log_probs_K = torch.cat([log_probs for log_probs, _ in replays])
        means_KLC = torch.cat([transition.mean_BLC for _, transition in replays])
        return log_probs_K.reshape(len(rollouts), -1), means_KLC.reshape(rollouts.before_BSLC.shape)

    def _all_pairs(self, spec: SampleSpec, rows: Sequence[int]) -> list[Pairs]:
        slots = range(len(spec.stochastic_steps))
        pairs = Pairs.of([(row, slot) for row in rows for slot in slots])
        return pairs.to(self._sampler.adapter.device).split(self._micro_batch)

    def _loss_of(self, data: TrainingSet, pairs: Pairs) -> tuple[Tensor, LossSums]:
        log_probs_K, transition = self._replay(data.rollouts, data.cond, data.spec, pairs)
        return self._loss(
            log_probs_K=log_probs_K,
            old_log_probs_K=data.old_log_probs_BS[pairs.row_K, pairs.slot_K],
            advantages_K=data.advantages_B[pairs.row_K],
            steps_K=_steps(data.spec, pairs),
            total_steps=data.spec.steps,
            kl_K=self._kl(data, pairs, transition),
            terms=self._terms(data, pairs, transition),
        )

    def _replay(
        self, rollouts: Rollouts, cond: Conditioning, spec: SampleSpec, pairs: Pairs
    ) -> tuple[Tensor, Transition]:
        """Log-probabilities and distributions of the pairs' steps under the current weights."""
        sampler, filled = self._sampler, self._filled(pairs)
        log_probs_K, transition = log_probs_at(
            sampler.adapter,
            sampler.rule,
            sampler.schedule_for(spec.steps),
            rollouts.before_BSLC[filled.row_K, filled.slot_K],
            rollouts.after_BSLC[filled.row_K, filled.slot_K],
            _steps(spec, filled),
            cond.select(filled.row_K),
            guidance_scale=spec.guidance_scale,
        )
        return log_probs_K[: len(pairs)], transition.first(len(pairs))

    def _kl(self, data: TrainingSet, pairs: Pairs, transition: Transition) -> Tensor | None:
        """Divergence of the pairs' steps from those of the reference policy."""
        if self._reference is None:
            return None
        sampler, filled = self._sampler, self._filled(pairs)
        with self._reference.active(sampler.adapter):
            frozen = step_transition(
                sampler.adapter,
                sampler.rule,
                sampler.schedule_for(data.spec.steps),
                data.rollouts.before_BSLC[filled.row_K, filled.slot_K],
                _steps(data.spec, filled),
                data.cond.select(filled.row_K),
                guidance_scale=data.spec.guidance_scale,
            )
        return gaussian_kl(transition, frozen.first(len(pairs)).mean_BLC)

    def _filled(self, pairs: Pairs) -> Pairs:
        return pairs.filled(self._micro_batch) if self._fill else pairs

    def _terms(self, data: TrainingSet, pairs: Pairs, transition: Transition) -> StepTerms | None:
        if data.old_means_BSLC is None:
            return None
        sigma_K, sigma_next_K = self._sampler.schedule_for(data.spec.steps).at(_steps(data.spec, pairs))
        old_mean_KLC = data.old_means_BSLC[pairs.row_K, pairs.slot_K]
        return StepTerms(transition.std_B, sigma_K - sigma_next_K, mean_shift(transition.mean_BLC, old_mean_KLC))


def _steps(spec: SampleSpec, pairs: Pairs) -> Tensor:
    return torch.tensor(spec.stochastic_steps, device=pairs.slot_K.device)[pairs.slot_K]
