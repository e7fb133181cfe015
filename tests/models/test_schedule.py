import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from src.models.schedule import (
    Schedule,
    double_shift_schedule,
    flow_match_schedule,
    flux_schedule,
    qwen_image_schedule,
)

QWEN_512_10 = (1, 0.92897, 0.85148, 0.76662, 0.67328, 0.57012, 0.45550, 0.32740, 0.18330, 0.02, 0)
FLUX_512_6 = (1, 0.90374, 0.78970, 0.65249, 0.48422, 0.27300, 0)
SD35_10 = (1, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0)


def test_golden_values() -> None:
    assert flow_match_schedule(4).sigmas == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert flow_match_schedule(2, shift=3.0).sigmas == (1.0, 0.75, 0.0)
    assert qwen_image_schedule(10, image_tokens=1024).sigmas == pytest.approx(QWEN_512_10, abs=6e-6)
    assert flux_schedule(6, image_tokens=1024).sigmas == pytest.approx(FLUX_512_6, abs=6e-6)
    assert double_shift_schedule(10, shift=3.0).sigmas == pytest.approx(SD35_10, abs=6e-6)


@pytest.mark.parametrize("steps", [2, 7, 28])
def test_equal_to_diffusers(steps: int) -> None:
    even = np.linspace(1.0, 1 / steps, steps)
    plain = FlowMatchEulerDiscreteScheduler(shift=1.5)
    plain.set_timesteps(sigmas=even)
    assert flow_match_schedule(steps, shift=1.5).sigmas == pytest.approx(plain.sigmas.tolist(), abs=1e-6)

    sd35 = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sd35.set_timesteps(steps)
    assert double_shift_schedule(steps, shift=3.0).sigmas == pytest.approx(sd35.sigmas.tolist(), abs=1e-6)

    qwen = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    qwen.set_timesteps(sigmas=even, mu=0.5 + 0.4 * (4096 - 256) / (8192 - 256))
    assert qwen_image_schedule(steps, image_tokens=4096).sigmas == pytest.approx(qwen.sigmas.tolist(), abs=1e-6)


@given(steps=st.integers(1, 60), shift=st.floats(0.2, 12), tokens=st.integers(16, 16_384))
def test_every_builder_gives_a_valid_schedule(steps: int, shift: float, tokens: int) -> None:
    for schedule in (
        flow_match_schedule(steps, shift=shift),
        qwen_image_schedule(steps, image_tokens=tokens),
        flux_schedule(steps, image_tokens=tokens),
        double_shift_schedule(steps, shift=shift),
    ):
        assert schedule.steps == steps  # the constructor checks that the sigmas fall from 1 to 0


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
