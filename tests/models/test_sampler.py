import itertools
import random
from functools import partial

import pytest
import torch

from src.core.types import SampleSpec
from src.models.adapter import Conditioning
from src.models.noise import coarse_step_noise, initial_noise, step_noise
from src.models.qwen_image import QwenImageAdapter
from src.models.sampler import Sampler, SamplerState, log_probs_at
from src.models.schedule import flow_match_schedule
from src.models.steps import CPS, ODE, FlowSDE, StepRule
from tests.models.lively import lively_adapter

SPEC = SampleSpec(steps=4, stochastic_steps=(0, 1, 2))
PROMPTS = ["abcd", "dcba", "ab", "d"]
SDE = FlowSDE(0.7)


def sampler_of(
    adapter: QwenImageAdapter,
    rule: StepRule = SDE,
    batch_size: int = 8,
    stored_dtype: torch.dtype = torch.float32,
) -> Sampler:
    return Sampler(
        adapter=adapter,
        rule=rule,
        schedule_for=partial(flow_match_schedule, shift=2.0),
        noise_steps=4,
        batch_size=batch_size,
        stored_dtype=stored_dtype,
    )


def conditions(adapter: QwenImageAdapter, count: int) -> Conditioning:
    return adapter.encode([PROMPTS[i % len(PROMPTS)] for i in range(count)])


def assert_bit_equal(a: SamplerState, b: SamplerState) -> None:
    assert a.step == b.step
    assert torch.equal(a.latents_BLC, b.latents_BLC)
    assert torch.equal(a.trajectory.before_BSLC, b.trajectory.before_BSLC)
    assert torch.equal(a.trajectory.after_BSLC, b.trajectory.after_BSLC)
    assert torch.equal(a.trajectory.log_probs_BS, b.trajectory.log_probs_BS)


@pytest.mark.parametrize("spec", [SPEC, SampleSpec(4), SampleSpec(4, (1, 2), guidance_scale=3.0)])
def test_samples_are_bit_equal_however_requests_are_grouped(adapter: QwenImageAdapter, spec: SampleSpec) -> None:
    """40 requests, all at once, one by one, and in random groups and orders: the same bits."""
    sampler, cond = sampler_of(adapter), conditions(adapter, 40)
    together = sampler.sample(range(100, 140), cond, spec)
    groups = [[row] for row in (0, 7, 39)]
    for trial in range(3):
        order = random.Random(trial).sample(range(40), 40)
        while order:
            count = random.Random(len(order)).randint(1, 20)
            groups.append(order[:count])
            order = order[count:]
    for rows in groups:
        alone = sampler.sample([100 + row for row in rows], cond.select(rows), spec)
        assert_bit_equal(alone, together.select(rows))


def test_resuming_is_bit_equal_to_not_stopping(adapter: QwenImageAdapter) -> None:
    """At every step, also in another group, from states that travelled to another model of equal weights."""
    cond, seeds, states = conditions(adapter, 6), list(range(6)), []
    done = sampler_of(adapter).sample(seeds, cond, SPEC, on_step=states.append)
    assert [state.step for state in states] == [1, 2, 3, 4]
    other = sampler_of(lively_adapter())
    for state in states:
        resumed = other.advance(state, seeds, cond, SPEC, until=4)
        assert_bit_equal(resumed, done)
        rows = [4, 1]
        part = other.advance(state.select(rows), [seeds[row] for row in rows], cond.select(rows), SPEC, until=4)
        assert_bit_equal(part, done.select(rows))
    assert_bit_equal(SamplerState.cat([done.select([0, 1]), done.select([2, 3, 4, 5])]), done)


def test_stopping_half_way(adapter: QwenImageAdapter) -> None:
    sampler, cond = sampler_of(adapter), conditions(adapter, 2)
    half = sampler.advance(sampler.start([1, 2]), [1, 2], cond, SPEC, until=2)
    assert half.step == 2
    assert half.trajectory.log_probs_BS.shape == (2, 2)
    assert_bit_equal(sampler.advance(half, [1, 2], cond, SPEC, until=4), sampler.sample([1, 2], cond, SPEC))


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [SDE, CPS(0.7)])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_ratio_is_exactly_1_before_the_first_update(
    adapter: QwenImageAdapter, rule: StepRule, stored_dtype: torch.dtype, guidance_scale: float
) -> None:
    """Replayed with gradient from what is stored: bit-equal at the sampler's batch size, else within 1e-5."""
    sampler, cond = sampler_of(adapter, rule, stored_dtype=stored_dtype), conditions(adapter, 8)
    path = sampler.sample(range(8), cond, SampleSpec(4, (0, 1, 2), guidance_scale)).trajectory
    assert path.before_BSLC.dtype == path.after_BSLC.dtype == stored_dtype
    schedule = flow_match_schedule(4, shift=2.0)
    replay = partial(log_probs_at, adapter, rule, schedule, guidance_scale=guidance_scale)
    mixed = torch.tensor([0, 1, 2, 2, 1, 0, 0, 2])
    for steps in (torch.zeros(8, dtype=torch.long), mixed):
        rows = torch.arange(8)
        log_probs, _ = replay(path.before_BSLC[rows, steps], path.after_BSLC[rows, steps], steps, cond)
        assert log_probs.requires_grad
        assert torch.equal(log_probs, path.log_probs_BS[rows, steps])
    for count in (1, 3):
        steps = torch.ones(count, dtype=torch.long)
        log_probs, _ = replay(path.before_BSLC[:count, 1], path.after_BSLC[:count, 1], steps, cond.select(range(count)))
        torch.testing.assert_close(log_probs, path.log_probs_BS[:count, 1], rtol=0, atol=1e-5)


def test_the_trajectory_is_what_was_sampled(adapter: QwenImageAdapter) -> None:
    """Each stochastic step starts where the last one ended, in the stored dtype, and draws its own noise."""
    sampler = sampler_of(adapter, stored_dtype=torch.bfloat16)
    cond, schedule = conditions(adapter, 2), flow_match_schedule(4, shift=2.0)
    done = sampler.sample([5, 6], cond, SPEC)
    path = done.trajectory
    start = torch.from_numpy(initial_noise(5, adapter.latent_shape))
    assert torch.equal(path.before_BSLC[0, 0], start.bfloat16())
    assert torch.equal(path.before_BSLC[:, 1:], path.after_BSLC[:, :-1])
    for step in range(3):
        with torch.no_grad():
            _, moved = log_probs_at(
                adapter,
                SDE,
                schedule,
                path.before_BSLC[:, step],
                path.after_BSLC[:, step],
                torch.full((2,), step),
                cond,
            )
        drawn = torch.from_numpy(step_noise(6, step, adapter.latent_shape))
        expected = moved.mean_BLC[1] + moved.std_B[1] * drawn
        torch.testing.assert_close(path.after_BSLC[1, step].float(), expected, rtol=8e-3, atol=8e-3)


def test_steps_that_are_not_stochastic_are_euler_steps(adapter: QwenImageAdapter) -> None:
    sampler, cond = sampler_of(adapter), conditions(adapter, 8)
    done = sampler.sample(range(8), cond, SampleSpec(4))
    assert done.trajectory.log_probs_BS.shape == (8, 0)
    x, sigmas = sampler.start(range(8)).latents_BLC, flow_match_schedule(4, shift=2.0).sigmas
    with torch.no_grad():
        for sigma, sigma_next in itertools.pairwise(sigmas):
            x = x + adapter.velocity(x, torch.full((8,), sigma), cond) * (sigma_next - sigma)
    torch.testing.assert_close(done.latents_BLC, x, rtol=1e-4, atol=1e-5)


def test_a_preview_draws_the_sum_of_the_skipped_noise(adapter: QwenImageAdapter) -> None:
    """With half the steps, step 0 uses the noise of steps 0 and 1."""
    sampler, cond = sampler_of(adapter), conditions(adapter, 1)
    path = sampler.sample([3], cond, SampleSpec(2, (0,))).trajectory
    schedule = flow_match_schedule(2, shift=2.0)
    with torch.no_grad():
        _, moved = log_probs_at(
            adapter,
            SDE,
            schedule,
            path.before_BSLC[:, 0],
            path.after_BSLC[:, 0],
            torch.tensor([0]),
            cond,
        )
    noise = (path.after_BSLC[:, 0] - moved.mean_BLC) / moved.std_B
    coarse = torch.from_numpy(coarse_step_noise(3, [0, 1], adapter.latent_shape))
    torch.testing.assert_close(noise[0], coarse, rtol=1e-3, atol=1e-4)


def test_step_counts_without_defined_noise_are_refused(adapter: QwenImageAdapter) -> None:
    sampler, cond = sampler_of(adapter), conditions(adapter, 1)
    with pytest.raises(ValueError, match=r"SampleSpec\.steps must divide the sampler's noise_steps=4, got 3"):
        sampler.sample([0], cond, SampleSpec(3, (0,)))
    with pytest.raises(ValueError, match=r"SampleSpec\.steps .* got 8"):
        sampler.sample([0], cond, SampleSpec(8, (0,)))
    assert sampler.sample([0], cond, SampleSpec(3)).step == 3  # no noise is drawn, so any number will do


def test_bad_calls_are_refused(adapter: QwenImageAdapter) -> None:
    sampler, cond = sampler_of(adapter), conditions(adapter, 2)
    with pytest.raises(ValueError, match=r"until must lie in 0\.\.4, got 5"):
        sampler.advance(sampler.start([0, 1]), [0, 1], cond, SPEC, until=5)
    with pytest.raises(ValueError, match="got 2 states, 1 seeds and 2 prompts"):
        sampler.advance(sampler.start([0, 1]), [0], cond, SPEC, until=4)
    with pytest.raises(ValueError, match=r"steps \[0, 4\]"):
        SamplerState.cat([sampler.start([0]), sampler.sample([0, 1], cond, SPEC)])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        sampler_of(adapter, batch_size=0)
    with pytest.raises(ValueError, match="no log-probability"):
        sampler_of(adapter, ODE()).sample([0, 1], cond, SPEC)


def test_sampling_leaves_no_trace_in_training(adapter: QwenImageAdapter) -> None:
    """diffusers caches rotary tables at first use: made in inference mode, they would break the training."""
    sampler, cond = sampler_of(adapter), conditions(adapter, 8)
    path = sampler.sample(range(8), cond, SPEC).trajectory
    log_probs, _ = log_probs_at(
        adapter,
        SDE,
        flow_match_schedule(4),
        path.before_BSLC[:, 0],
        path.after_BSLC[:, 0],
        torch.zeros(8, dtype=torch.long),
        cond,
    )
    log_probs.sum().backward()
    gradients = [p.grad for p in adapter.transformer.parameters() if p.grad is not None]
    assert sum(g.abs().sum() for g in gradients) > 0
