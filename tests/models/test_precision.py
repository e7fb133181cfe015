"""What bf16 does to log-probabilities: python -m pytest -s tests/models/test_precision.py prints the figures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from src.core.types import SampleSpec
from src.models.adapter import Conditioning, DiTAdapter
from src.models.sampler import Sampler, Trajectory, log_probs_at
from src.models.steps import FlowSDE
from tests.models.cases import CASES, opened, sampler_of
from tests.models.published import PROMPTS

SIZE, STEPS, ROWS, SAMPLES = 128, 10, 4, 8
STOCHASTIC = tuple(range(STEPS - 1))


class Replay:
    """The log-probabilities [B, S] of a trajectory, replayed in batches of any shape and by any model."""

    def __init__(self, sampler: Sampler, path: Trajectory, guidance: float) -> None:
        self.sampler = sampler
        self.path = path
        self.guidance = guidance

    @torch.no_grad()
    def __call__(self, adapter: DiTAdapter, cond: Conditioning, rows: int) -> torch.Tensor:
        pairs = torch.cartesian_prod(torch.arange(SAMPLES), torch.arange(len(STOCHASTIC)))
        parts = []
        for part in pairs.split(rows):  # as training does it: samples and steps are mixed
            sample, slot = part.T
            log_probs, _ = log_probs_at(
                adapter,
                self.sampler.rule,
                self.sampler.schedule_for(STEPS),
                self.path.before_BSLC[sample, slot],
                self.path.after_BSLC[sample, slot],
                torch.tensor(STOCHASTIC)[slot],
                cond.select(sample),
                guidance_scale=self.guidance,
            )
            parts.append(log_probs)
        return torch.cat(parts).reshape(SAMPLES, -1)


@torch.no_grad()
def exact_step_mathematics(
    sampler: Sampler, path: Trajectory, cond: Conditioning, guidance: float
) -> NDArray[np.float64]:
    """[B, S] in fp64 from the same velocities: Flow-SDE's step and its density, written down once more."""
    assert isinstance(sampler.rule, FlowSDE)
    schedule = sampler.schedule_for(STEPS)
    columns = []
    for slot, step in enumerate(STOCHASTIC):
        sigma, after = np.float64(np.float32(schedule.sigmas[step : step + 2]))
        x_BLC, x_next_BLC = (tensor[:, slot].double().numpy() for tensor in (path.before_BSLC, path.after_BSLC))
        parts = torch.arange(SAMPLES).split(ROWS)
        v_BLC = torch.cat(
            [
                sampler.adapter.velocity(
                    path.before_BSLC[part, slot],
                    torch.full((len(part),), float(sigma)),
                    cond.select(part),
                    guidance_scale=guidance,
                )
                for part in parts
            ]
        )
        dt = after - sigma
        diffusion = sampler.rule.noise_level * math.sqrt(
            sigma / (1 - (np.float32(schedule.guard) if step == 0 else sigma))
        )
        std = diffusion * math.sqrt(-dt)
        drift = diffusion**2 / (2 * sigma)
        mean_BLC = x_BLC * (1 + drift * dt) + v_BLC.double().numpy() * (1 + drift * (1 - sigma)) * dt
        squared_B = ((x_next_BLC - mean_BLC) ** 2).reshape(SAMPLES, -1).mean(axis=1)
        columns.append(-squared_B / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2)
    return np.stack(columns, axis=1)


def in_fp32(cond: Conditioning) -> Conditioning:
    """The same values."""
    pooled_BD = None if cond.pooled_BD is None else cond.pooled_BD.float()
    return Conditioning(cond.embeds_BSD.float(), cond.mask_BS, pooled_BD)


def told(name: str, difference_BS: torch.Tensor) -> float:
    """Prints the figures of a difference in log-probability; returns the largest one."""
    absolute, ratio = difference_BS.abs(), difference_BS.double().exp()
    print(
        f"  {name:<44} log p: mean {absolute.mean():.1e}, max {absolute.max():.1e};"
        f"  ratio - 1: {ratio.min() - 1:+.1e} .. {ratio.max() - 1:+.1e}, sd {ratio.std():.1e}"
    )
    return float(absolute.max())


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of a kind of GPU that nobody asked for
@pytest.mark.parametrize("family", CASES)
def test_log_probs_of_rollout_and_training_in_bf16(folders: dict[str, Path], family: str) -> None:
    half = opened(folders, family, SIZE, SIZE, dtype="bfloat16")
    sampler, guidance = sampler_of(folders, half, family, batch_size=ROWS, steps=STEPS), CASES[family].guidance
    cond = half.encode([PROMPTS[row % len(PROMPTS)] for row in range(SAMPLES)])
    path = sampler.sample(range(SAMPLES), cond, SampleSpec(STEPS, STOCHASTIC, guidance)).trajectory
    rolled_BS, replay = path.log_probs_BS, Replay(sampler, path, guidance)
    values = path.before_BSLC[0, 0].numel()
    print(f"\n{family}, {SIZE} x {SIZE} ({values} latents), {SAMPLES} samples of {len(STOCHASTIC)} stochastic steps")

    assert told(f"same rows ({ROWS})", replay(half, cond, ROWS) - rolled_BS) == 0
    for rows in (1, 2, 8):
        assert told(f"{rows} rows a pass", replay(half, cond, rows) - rolled_BS) < 1e-3

    with (
        torch.backends.mkldnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):  # as another batch shape may on a GPU
        assert told("other kernels", replay(half, cond, ROWS) - rolled_BS) < 1e-1
    exact_BS = torch.from_numpy(exact_step_mathematics(sampler, path, cond, guidance))
    assert told("step mathematics in fp64", exact_BS - rolled_BS) < 1e-5

    full = opened(folders, family, SIZE, SIZE, dtype="float32")
    full.transformer.load_state_dict(half.transformer.state_dict())  # the same weights: bf16's, as they are published
    full.encode = lambda texts: in_fp32(half.encode(texts))  # type: ignore[method-assign]
    assert told("the model in fp32", replay(full, in_fp32(cond), ROWS) - rolled_BS) < 1e-1
