"""Making samples, and replaying them, on every device: what is equal to the last bit, and what within a tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from src.core.types import RequestKind
from src.models.noise import initial_noise_for, noise_for
from src.models.steps import Transition
from src.rl.loss import ClippedLoss
from src.rl.policy_gradient import PolicyGradient, TrainingSet
from src.rl.rollouts import Pairs, Rollouts
from tests.gpu.engines import COUNT, SPEC, asked, build_on

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

SAMPLES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Root mean square by which final latents may differ from those of fp32 on the CPU, whose own is about 0.9. Measured
on a CPU: 5e-7 with other batches, 0.017 in bf16."""

LOG_RATIO = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""By how much a log-probability (a mean over dimensions) may differ when it is replayed in other batches. Measured on
a CPU: 1.2e-7 in fp32, 0 in bf16."""


class NoiseAlone:
    """A step rule that forgets the latents: what it samples is the noise of the step."""

    def transition(self, x_BLC: Tensor, v_BLC: Tensor, sigma_B: Tensor, sigma_next_B: Tensor, guard: float):
        return Transition(torch.zeros_like(x_BLC), torch.ones_like(sigma_B))

    def log_prob(self, x_next_BLC: Tensor, transition: Transition) -> Tensor:
        return torch.zeros_like(transition.std_B)


def test_noise_is_the_same_bits_on_every_device(device: str, tmp_path: Path):
    sampler, _ = build_on(device, torch.float32, tmp_path)
    sampler.rule = NoiseAlone()
    seeds = [request.key.seed for request in asked()]
    cond = sampler.adapter.encode([request.prompt.text for request in asked()])
    start_BLC = sampler.start(seeds).latents_BLC
    assert start_BLC.device.type == device
    assert torch.equal(start_BLC.cpu(), initial_noise_for(seeds, sampler.adapter.latent_shape))
    drawn_BSLC = sampler.sample(seeds, cond, SPEC).trajectory.after_BSLC.cpu()
    for slot, step in enumerate(SPEC.stochastic_steps):
        assert torch.equal(drawn_BSLC[:, slot], noise_for(seeds, [step], sampler.adapter.latent_shape))


@pytest.fixture(scope="module")
def reference_BLC(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The samples of fp32 on the CPU, made one by one."""
    return latents_BLC("cpu", torch.float32, tmp_path_factory.mktemp("reference"), batch_size=1)


def latents_BLC(device: str, dtype: torch.dtype, folder: Path, **batch: int) -> Tensor:
    """The final latents of `asked()`, in main memory."""
    sampler, _ = build_on(device, dtype, folder, **batch)
    cond = sampler.adapter.encode([request.prompt.text for request in asked()])
    return sampler.sample([request.key.seed for request in asked()], cond, SPEC).latents_BLC.cpu()


def distance(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference."""
    return float((one - other).pow(2).mean().sqrt())


@DTYPES
def test_samples_agree_with_those_of_the_cpu(device: str, dtype: torch.dtype, tmp_path: Path, reference_BLC: Tensor):
    made_BLC = latents_BLC(device, dtype, tmp_path)
    assert distance(made_BLC, reference_BLC) < SAMPLES[dtype]
    assert distance(made_BLC, reference_BLC.roll(1, dims=0)) > 5 * SAMPLES[dtype], "any sample would pass"


@DTYPES
@pytest.mark.parametrize("kind", [RequestKind.ROLLOUT, RequestKind.EVAL])
def test_samples_are_bit_equal_however_requests_are_grouped(
    device: str, dtype: torch.dtype, kind: RequestKind, tmp_path: Path
):
    """Digest, trajectory, log-probabilities, reward, judgement, pixels."""
    _, engine = build_on(device, dtype, tmp_path)
    requests = asked(kind)
    together, _ = engine.serve(requests, "w")
    assert all(result.error is None for result in together)
    assert len({result.digest for result in together}) == COUNT
    for rows in ([0], [COUNT - 1], [3, 1, 8], [9, 7, 5, 3, 1], list(reversed(range(COUNT)))):
        assert engine.serve([requests[row] for row in rows], "w")[0] == [together[row] for row in rows]


@DTYPES
@pytest.mark.parametrize("micro_batch", [1, 4, 30])
def test_the_ratio_is_one_before_the_first_update(device: str, dtype: torch.dtype, micro_batch: int, tmp_path: Path):
    """As the trainer computes it: without gradient, where it does not trust the rollout's, and in the update."""
    sampler, engine = build_on(device, dtype, tmp_path)
    requests = asked()
    rollouts = Rollouts.stack(engine.serve(requests, "w")[0]).to(sampler.adapter.device)
    cond = sampler.adapter.encode([request.prompt.text for request in requests])
    policy = PolicyGradient(sampler=sampler, loss=ClippedLoss(0.5), reference=None, micro_batch=micro_batch)

    recomputed_BS = policy.log_probs(rollouts, cond, SPEC, range(COUNT))
    assert (recomputed_BS - rollouts.log_probs_BS).abs().max() <= LOG_RATIO[dtype]
    again_BS, means_BSLC = policy.old_policy(rollouts, cond, SPEC)
    assert torch.equal(again_BS, recomputed_BS)
    assert means_BSLC.device.type == device

    advantages_B = torch.linspace(-1, 1, COUNT, device=device)
    data = TrainingSet(rollouts, cond, SPEC, advantages_B, rollouts.log_probs_BS)
    pairs = Pairs.of([(row, slot) for row in range(COUNT) for slot in range(3)]).to(sampler.adapter.device)
    sums = policy.backward(data, pairs, scale=1 / len(pairs), backward=lambda loss: loss.backward())
    assert sums.pairs == len(pairs)
    assert max(sums.per_step("abs_log_ratio").values()) <= LOG_RATIO[dtype]
    gradients = [p.grad for p in sampler.adapter.transformer.parameters() if p.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert sum(float(gradient.abs().sum()) for gradient in gradients) > 0
