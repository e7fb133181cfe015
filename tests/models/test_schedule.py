import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from src.models.schedule import Schedule, ShiftedSchedule, diffusers_schedule, flow_match_schedule

QWEN_512_10 = (1, 0.92897, 0.85148, 0.76662, 0.67328, 0.57012, 0.45550, 0.32740, 0.18330, 0.02, 0)
FLUX_512_6 = (1, 0.90374, 0.78970, 0.65249, 0.48422, 0.27300, 0)
SD35_10 = (1, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0)

QWEN: dict[str, Any] = {
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}
FLUX: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True}
SD35: dict[str, Any] = {"shift": 3.0}
"""What decides in the scheduler_config.json of Qwen-Image, FLUX.1-dev and Stable Diffusion 3.5."""


def of(config: Mapping[str, Any], steps: int, tokens: int = 1024) -> tuple[float, ...]:
    return diffusers_schedule(config, image_tokens=tokens, own_levels=config is SD35)(steps).sigmas


def test_golden_values() -> None:
    assert flow_match_schedule(4).sigmas == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert flow_match_schedule(2, shift=3.0).sigmas == (1.0, 0.75, 0.0)
    assert of(QWEN, 10) == pytest.approx(QWEN_512_10, abs=6e-6)
    assert of(FLUX, 6) == pytest.approx(FLUX_512_6, abs=6e-6)
    assert of(SD35, 10) == pytest.approx(SD35_10, abs=6e-6)


@pytest.mark.parametrize("own_levels", [False, True])
@pytest.mark.parametrize(
    "config",
    [QWEN, FLUX, SD35, {}, {"shift": 1.5, "shift_terminal": 0.1}, {"num_train_timesteps": 500, "shift": 2.0}],
)
@pytest.mark.parametrize("steps", [2, 7, 28])
def test_equal_to_diffusers(steps: int, config: dict[str, Any], own_levels: bool) -> None:
    """Asked for 4096 tokens, as its pipelines ask."""
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    settings = scheduler.config
    slope = (settings.max_shift - settings.base_shift) / (settings.max_image_seq_len - settings.base_image_seq_len)
    mu = {"mu": settings.base_shift + slope * (4096 - settings.base_image_seq_len)}
    levels = {} if own_levels else {"sigmas": np.linspace(1.0, 1 / steps, steps)}
    scheduler.set_timesteps(steps, **levels, **(mu if settings.use_dynamic_shifting else {}))
    ours = diffusers_schedule(dict(settings), image_tokens=4096, own_levels=own_levels)(steps)
    assert ours.sigmas == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)
    plain = diffusers_schedule(config, image_tokens=4096, own_levels=own_levels)(steps)
    assert plain == ours, "what the file leaves out has the defaults of diffusers"


@given(
    steps=st.integers(1, 60),
    shift=st.floats(0.2, 12),
    last=st.none() | st.floats(1e-4, 0.01),
    terminal=st.none() | st.floats(0.001, 0.3),
)
def test_every_shift_gives_a_valid_schedule(
    steps: int, shift: float, last: float | None, terminal: float | None
) -> None:
    schedule = ShiftedSchedule(shift=shift, last=last, terminal=terminal)(steps)
    assert schedule.steps == steps  # the constructor checks that the sigmas fall from 1 to 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("_class_name", "UniPCMultistepScheduler"),
        ("time_shift_type", "linear"),
        ("use_karras_sigmas", True),
        ("invert_sigmas", True),
    ],
)
def test_a_scheduler_that_is_not_known_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"a scheduler with {field}=\w+ is known, got {value}"):
        diffusers_schedule({field: value}, image_tokens=1024, own_levels=False)


@pytest.mark.parametrize(
    "sigmas",
    [(1.0,), (0.9, 0.0), (1.0, 0.1), (1.0, 0.5, 0.5, 0.0), (1.0, 0.2, 0.5, 0.0), (1.0, math.nan, 0.0)],
)
def test_a_schedule_must_fall_from_1_to_0(sigmas: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"Schedule\.sigmas"):
        Schedule(sigmas)


def test_sigmas_are_looked_up_by_index() -> None:
    schedule = Schedule((1.0, 0.6, 0.3, 0.0))
    sigma_B, next_B = schedule.at(torch.tensor([2, 0, 0, 1]))
    assert torch.equal(sigma_B, torch.tensor([0.3, 1.0, 1.0, 0.6]))
    assert torch.equal(next_B, torch.tensor([0.0, 0.6, 0.6, 0.3]))
    assert schedule.guard == 0.6


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        flow_match_schedule(0)
    with pytest.raises(ValueError, match=r"shift must be positive and finite, got -1\.0"):
        flow_match_schedule(4, shift=-1.0)
