"""Noise that is a pure function of a seed: the same bits on every machine, device and batch.

Drawn on the host by NumPy's Philox, keyed by a hash of (purpose, seed, k): torch.randn differs between
devices, and even between CPUs with other vector instructions. k indexes the full grid of T steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Noise = NDArray[np.float32]


def initial_noise(seed: int, shape: tuple[int, ...]) -> Noise:
    """Standard normal latents at sigma = 1."""
    return _draw(f"initial:{seed}", shape)


def step_noise(seed: int, k: int, shape: tuple[int, ...]) -> Noise:
    """Standard normal noise of step k; independent of the initial noise and of other steps."""
    return _draw(f"step:{seed}:{k}", shape)


def coarse_step_noise(seed: int, ks: Sequence[int], shape: tuple[int, ...]) -> Noise:
    """Noise of one long step that stands for the m steps `ks`: their sum / sqrt(m), again standard normal.

    A preview with T/m steps then follows the path that the full T steps would take.
    """
    total = step_noise(seed, ks[0], shape)
    for k in ks[1:]:
        total = total + step_noise(seed, k, shape)
    return total / np.float32(math.sqrt(len(ks)))


def initial_noise_for(seeds: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
    """Initial noise of a batch, [B, *shape] on the host."""
    return torch.from_numpy(np.stack([initial_noise(seed, shape) for seed in seeds]))


def noise_for(seeds: Sequence[int], ks: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
    """Step noise of a batch, [B, *shape] on the host: of one step, or of several taken as one."""
    return torch.from_numpy(np.stack([coarse_step_noise(seed, ks, shape) for seed in seeds]))


def _draw(purpose: str, shape: tuple[int, ...]) -> Noise:
    key = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=16).digest(), "big")
    # Drawn in double precision: the tails pass through the C library's log1p, and a difference of two systems
    # in its last bit does not survive the rounding.
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape).astype(np.float32)
