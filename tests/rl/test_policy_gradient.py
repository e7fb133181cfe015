"""The replay of denoising steps on a tiny random model: ratio one, micro-batches, KL."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from src.core.types import SampleSpec
from src.models.reference import FrozenCopy, Reference
from src.models.sampler import Sampler
from src.models.schedule import flow_match_schedule
from src.models.steps import CPS, FlowSDE
from src.rl.loss import ClippedLoss, GuardedRatio
from src.rl.policy_gradient import PolicyGradient, TrainingSet
from src.rl.rollouts import Pairs, Rollouts
from tests.models.lively import lively_adapter

torch.set_num_threads(1)

STEPS, SAMPLES = 4, 6
SPEC = SampleSpec(STEPS, (0, 2))
ALL_PAIRS = Pairs.of([(row, slot) for row in range(SAMPLES) for slot in range(2)])


def make_sampler(rule: FlowSDE | CPS, stored_dtype: torch.dtype = torch.float32) -> Sampler:
    return Sampler(
        adapter=lively_adapter(),
        rule=rule,
        schedule_for=flow_match_schedule,
        noise_steps=STEPS,
        batch_size=SAMPLES,
        stored_dtype=stored_dtype,
    )


def roll_out(sampler: Sampler) -> TrainingSet:
    """Samples with advantages of both signs, and their own log-probabilities as the old ones."""
    cond = sampler.adapter.encode(["abcd", "dcba"] * (SAMPLES // 2))
    path = sampler.sample(range(SAMPLES), cond, SPEC).trajectory
    rollouts = Rollouts(
        instances_B=(0, 1) * (SAMPLES // 2),
        seeds_B=tuple(range(SAMPLES)),
        rewards_B=(0.0,) * SAMPLES,
        scores_B=({},) * SAMPLES,
        fingerprints_B=("test",) * SAMPLES,
        before_BSLC=path.before_BSLC,
        after_BSLC=path.after_BSLC,
        log_probs_BS=path.log_probs_BS,
        failed=0,
    )
    return TrainingSet(rollouts, cond, SPEC, torch.linspace(-1, 1, SAMPLES), path.log_probs_BS)


def gradient_of(
    sampler: Sampler,
    data: TrainingSet,
    *,
    micro_batch: int = len(ALL_PAIRS),
    kl_weight: float = 0.0,
    reference: Reference | None = None,
    fill: bool = False,
) -> Tensor:
    loss = ClippedLoss(clip_range=0.5, kl_weight=kl_weight)
    policy = PolicyGradient(sampler=sampler, loss=loss, reference=reference, micro_batch=micro_batch, fill=fill)
    transformer = sampler.adapter.transformer
    transformer.zero_grad(set_to_none=True)
    policy.backward(data, ALL_PAIRS, scale=1 / len(ALL_PAIRS), backward=lambda part: part.backward())
    return torch.cat([p.grad.flatten() for p in transformer.parameters() if p.grad is not None])


def move(sampler: Sampler) -> None:
    """As an update would: every weight a little."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in sampler.adapter.transformer.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [FlowSDE(noise_level=0.7), CPS(noise_level=0.7)])
def test_the_ratio_is_one_before_the_first_update(rule: FlowSDE | CPS, stored_dtype: torch.dtype):
    """Also with rounded latents: what is scored is what is stored, at the step where it was made."""
    sampler = make_sampler(rule, stored_dtype)
    data = roll_out(sampler)
    policy = PolicyGradient(
        sampler=sampler, loss=ClippedLoss(clip_range=1e-5), reference=None, micro_batch=len(ALL_PAIRS)
    )
    sums = policy.backward(data, ALL_PAIRS, scale=1.0, backward=lambda part: part.backward())
    assert set(sums.per_step("ratio")) == {0, 2}
    assert sums.means()["abs_log_ratio"] < 2e-6
    assert sums.means()["clipped_low"] == sums.means()["clipped_high"] == 0.0
    recomputed = policy.log_probs(data.rollouts, data.cond, SPEC, range(SAMPLES))
    torch.testing.assert_close(recomputed, data.old_log_probs_BS, rtol=0, atol=5e-6)


def test_the_guarded_ratio_is_one_before_the_first_update_and_centred_after_it():
    """Without the guard the log-ratio is below zero on average, by the shift of the means; with it, around zero."""
    sampler = make_sampler(FlowSDE(noise_level=0.7))
    policy = PolicyGradient(
        sampler=sampler,
        loss=ClippedLoss(clip_range=1e-5, ratio=GuardedRatio()),
        reference=None,
        micro_batch=len(ALL_PAIRS),
    )
    assert policy.needs_old_means
    data = roll_out(sampler)
    old_BS, means_BSLC = policy.old_policy(data.rollouts, data.cond, SPEC)
    torch.testing.assert_close(old_BS, data.old_log_probs_BS, rtol=0, atol=5e-6)
    data = replace(data, old_log_probs_BS=old_BS, old_means_BSLC=means_BSLC)
    sums = policy.backward(data, ALL_PAIRS, scale=1.0, backward=lambda part: part.backward())
    assert sums.means()["abs_log_ratio"] == 0.0
    move(sampler)
    guarded = policy.backward(data, ALL_PAIRS, scale=1.0, backward=lambda part: part.backward()).means()
    plain = PolicyGradient(
        sampler=sampler, loss=ClippedLoss(clip_range=1e-5), reference=None, micro_batch=len(ALL_PAIRS)
    )
    unguarded = plain.backward(data, ALL_PAIRS, scale=1.0, backward=lambda part: part.backward()).means()
    assert unguarded["ratio"] < 1 - 1e-3
    assert abs(guarded["ratio"] - 1) < 0.2 * (1 - unguarded["ratio"])


def test_a_step_that_is_off_by_one_would_be_seen():
    """The steps' log-probabilities differ by far more than the tolerance above."""
    data = roll_out(make_sampler(FlowSDE(noise_level=0.7)))
    assert (data.old_log_probs_BS[:, 0] - data.old_log_probs_BS[:, 1]).abs().min() > 1e-2


def test_log_probabilities_are_computed_where_the_model_is():
    """On a device without data, which refuses tensors of others as a GPU does."""
    sampler, meta = make_sampler(FlowSDE(noise_level=0.7)), torch.device("meta")
    data = roll_out(sampler)
    sampler.adapter.to(meta)
    policy = PolicyGradient(sampler=sampler, loss=ClippedLoss(clip_range=1e-5), reference=None, micro_batch=5)
    rollouts, cond = data.rollouts.to(meta), data.cond.to(meta)
    log_probs_BS, means_BSLC = policy.old_policy(rollouts, cond, SPEC)
    assert log_probs_BS.device == means_BSLC.device == meta
    assert policy.log_probs(rollouts, cond, SPEC, [3, 1]).device == meta


def test_filled_passes_have_equally_many_rows_and_the_same_gradient():
    sampler, rows = make_sampler(FlowSDE(noise_level=0.7)), set()
    data, reference = roll_out(sampler), FrozenCopy(sampler.adapter.transformer)
    how = {"micro_batch": 5, "kl_weight": 0.1, "reference": reference}
    move(sampler)
    whole = gradient_of(sampler, data, **how)
    assert len(ALL_PAIRS) % 5
    with sampler.adapter.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.add(len(kwargs["hidden_states"])), with_kwargs=True
    ):
        filled = gradient_of(sampler, data, **how, fill=True)
    assert rows == {5}
    torch.testing.assert_close(filled, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 5, 12])
def test_micro_batches_do_not_change_the_gradient(micro_batch: int):
    sampler = make_sampler(FlowSDE(noise_level=0.7))
    data = roll_out(sampler)
    reference = FrozenCopy(sampler.adapter.transformer)
    move(sampler)
    settings = {"kl_weight": 0.1, "reference": reference}
    one_shot = gradient_of(sampler, data, **settings)
    found = gradient_of(sampler, data, micro_batch=micro_batch, **settings)
    assert (found - one_shot).norm() < 1e-5 * one_shot.norm()


def test_kl_is_zero_at_the_reference_and_pulls_back_to_it():
    sampler = make_sampler(FlowSDE(noise_level=0.7))
    reference = FrozenCopy(sampler.adapter.transformer)
    data = roll_out(sampler)
    without = TrainingSet(data.rollouts, data.cond, SPEC, torch.zeros(SAMPLES), data.old_log_probs_BS)
    settings = {"kl_weight": 1.0, "reference": reference}
    assert gradient_of(sampler, without, **settings).norm() == 0.0
    home = [parameter.detach().clone() for parameter in sampler.adapter.transformer.parameters()]
    move(sampler)
    gradient_of(sampler, without, **settings)
    away = sum(
        float((parameter.grad * (parameter.detach() - start)).sum())
        for parameter, start in zip(sampler.adapter.transformer.parameters(), home, strict=True)
        if parameter.grad is not None
    )
    assert away > 0, "a step against the gradient goes back"


def test_a_reference_is_needed_just_with_kl():
    sampler = make_sampler(FlowSDE(noise_level=0.7))
    for loss, reference in [
        (ClippedLoss(clip_range=0.1, kl_weight=0.1), None),
        (ClippedLoss(clip_range=0.1), FrozenCopy(sampler.adapter.transformer)),
    ]:
        with pytest.raises(ValueError, match="kl_weight"):
            PolicyGradient(sampler=sampler, loss=loss, reference=reference, micro_batch=4)
