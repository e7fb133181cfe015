"""Noise schedules: the sigmas at which a flow-matching model is evaluated.

This is the only owner of sigmas. Everybody else holds a `Schedule` and a step index; a sigma is never
computed from a timestep, nor looked up by its value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Schedule:
    """T + 1 strictly decreasing noise levels from 1 to 0: step k goes from `sigmas[k]` to `sigmas[k + 1]`."""

    sigmas: tuple[float, ...]

    def __post_init__(self) -> None:
        falls = all(a > b for a, b in itertools.pairwise(self.sigmas))
        if len(self.sigmas) < 2 or self.sigmas[0] != 1.0 or self.sigmas[-1] != 0.0 or not falls:
            raise ValueError(f"Schedule.sigmas must fall strictly from 1 to 0, got {self.sigmas}")

    @property
    def steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    @property
    def guard(self) -> float:
        """The second noise level: stands in for sigma = 1 where a step rule would divide by 1 - sigma."""
        return self.sigmas[1]

    def at(self, step_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sigma, next sigma) of each sample's step index, fp32 [B] each."""
        sigmas = torch.tensor(self.sigmas, dtype=torch.float32, device=step_B.device)
        return sigmas[step_B], sigmas[step_B + 1]


def flow_match_schedule(steps: int, *, shift: float = 1.0) -> Schedule:
    """Even steps, shifted towards noise: sigma' = shift sigma / (shift sigma + 1 - sigma).

    Args:
        steps: T.
        shift: 1 leaves the steps even; larger values spend more of them at high noise.
    """
    _check(steps, shift)
    return _ending_at_zero([_shifted(1 - k / steps, shift) for k in range(steps)])


def double_shift_schedule(steps: int, *, shift: float, train_steps: int = 1000) -> Schedule:
    """What diffusers runs for SD3.5: the shift is applied to the end points of the grid and then once more.

    (`FlowMatchEulerDiscreteScheduler.set_timesteps(steps)` with a static shift; diffusers issue 13243.
    Published results were made with it, so models of that family keep it.)
    """
    _check(steps, shift)
    last = _shifted(1 / train_steps, shift)
    even = [1.0 + (last - 1.0) * k / max(steps - 1, 1) for k in range(steps)]
    return _ending_at_zero([_shifted(sigma, shift) for sigma in even])


@dataclass(frozen=True)
class DynamicShift:
    """A shift that grows with the image: exp(mu), with mu linear in the number of image tokens.

    Calling it with T gives the schedule.

    Args:
        image_tokens: L of the images to make.
        base_tokens, base_mu, max_tokens, max_mu: two points of the line mu(L).
        terminal: the last non-zero sigma, to which the others are stretched; None leaves them as they are.
    """

    image_tokens: int
    base_tokens: int
    max_tokens: int
    base_mu: float
    max_mu: float
    terminal: float | None = None

    @property
    def mu(self) -> float:
        """Logarithm of the shift."""
        slope = (self.max_mu - self.base_mu) / (self.max_tokens - self.base_tokens)
        return self.base_mu + slope * (self.image_tokens - self.base_tokens)

    def __call__(self, steps: int) -> Schedule:
        shift = math.exp(self.mu)
        _check(steps, shift)
        sigmas = [_shifted(1 - k / steps, shift) for k in range(steps)]
        if self.terminal is not None and steps > 1:
            stretch = (1 - self.terminal) / (1 - sigmas[-1])
            sigmas = [1 - (1 - sigma) * stretch for sigma in sigmas]
        return _ending_at_zero(sigmas)


def image_tokens(height: int, width: int, pixels: int = 16) -> int:
    """L of an image: tokens of `pixels` x `pixels`."""
    return (height // pixels) * (width // pixels)


def qwen_image_schedule(steps: int, *, image_tokens: int) -> Schedule:
    """Qwen-Image's dynamic shift (its scheduler_config.json)."""
    return DynamicShift(image_tokens, 256, 8192, 0.5, 0.9, terminal=0.02)(steps)


def flux_schedule(steps: int, *, image_tokens: int) -> Schedule:
    """FLUX.1-dev's dynamic shift (its scheduler_config.json)."""
    return DynamicShift(image_tokens, 256, 4096, 0.5, 1.15)(steps)


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (shift * sigma + (1 - sigma))  # this form keeps sigma = 1 exactly


def _ending_at_zero(sigmas: list[float]) -> Schedule:
    return Schedule((*sigmas, 0.0))


def _check(steps: int, shift: float) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be positive and finite, got {shift}")
