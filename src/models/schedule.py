"""Noise schedules: the sigmas at which a flow-matching model is evaluated.

This is the only owner of sigmas. Everybody else holds a `Schedule` and a step index; a sigma is never
computed from a timestep, nor looked up by its value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """Even steps, shifted towards noise.

    Args:
        steps: T.
        shift: see `ShiftedSchedule`.
    """
    return ShiftedSchedule(shift=shift)(steps)


@dataclass(frozen=True, kw_only=True)
class ShiftedSchedule:
    """T levels from 1 to `last`, evenly, and then sigma' = shift sigma / (shift sigma + 1 - sigma).

    Calling it with T gives the schedule.

    Args:
        shift: 1 leaves the steps even; larger values spend more of them at high noise.
        last: of the even levels, in (0, 1); None for 1 / T.
        terminal: the last non-zero level, to which the others are stretched; None leaves them as they are.
    """

    shift: float
    last: float | None = None
    terminal: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.shift < math.inf:
            raise ValueError(f"shift must be positive and finite, got {self.shift}")
        for name, value in (("last", self.last), ("terminal", self.terminal)):
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} must lie in (0, 1), got {value}")

    def __call__(self, steps: int) -> Schedule:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        fall, intervals = (1.0, steps) if self.last is None else (1 - self.last, max(steps - 1, 1))
        sigmas = [_shifted(1 - k * fall / intervals, self.shift) for k in range(steps)]
        if self.terminal is not None and steps > 1:
            stretch = (1 - self.terminal) / (1 - sigmas[-1])
            sigmas = [1 - (1 - sigma) * stretch for sigma in sigmas]
        return Schedule((*sigmas, 0.0))


def diffusers_schedule(config: Mapping[str, Any], *, image_tokens: int, own_levels: bool) -> ShiftedSchedule:
    """What a pipeline of diffusers runs with a scheduler_config.json, for images of so many tokens.

    A dynamic shift is exp(mu), with mu linear in the tokens. A static one is applied twice where the scheduler makes
    the levels: to their end and then to all (diffusers issue 13243). Published results were made with that.

    Args:
        config: of a `FlowMatchEulerDiscreteScheduler`; what it leaves out has the defaults of diffusers.
        own_levels: the scheduler makes the even levels, as for Stable Diffusion 3; other pipelines give them to it.

    Raises:
        ValueError: it is of another class, or has a setting that is not known here.
    """
    given = {**_DEFAULTS, **config}
    for name in ("_class_name", "time_shift_type", *_OFF):
        if given[name] != _DEFAULTS[name]:
            raise ValueError(f"only a scheduler with {name}={_DEFAULTS[name]} is known, got {given[name]}")
    shift, last = given["shift"], 1 / given["num_train_timesteps"]
    if given["use_dynamic_shifting"]:
        slope = (given["max_shift"] - given["base_shift"]) / (given["max_image_seq_len"] - given["base_image_seq_len"])
        shift = math.exp(given["base_shift"] + slope * (image_tokens - given["base_image_seq_len"]))
    else:
        last = _shifted(last, shift)
    # To the scheduler, a terminal of 0 is none.
    return ShiftedSchedule(shift=shift, last=last if own_levels else None, terminal=given["shift_terminal"] or None)


_OFF = (
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_flow_sigmas",
    "stochastic_sampling",
)
_DEFAULTS: Mapping[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift_terminal": None,
    "time_shift_type": "exponential",
    **dict.fromkeys(_OFF, False),
}


def image_tokens(height: int, width: int, pixels: int = 16) -> int:
    """L of an image: tokens of `pixels` x `pixels`."""
    return (height // pixels) * (width // pixels)


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (shift * sigma + (1 - sigma))  # this form keeps sigma = 1 exactly
