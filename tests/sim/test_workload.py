from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.sim.workload import Iteration, Workload
from tests.sim.profiles import made

REAL = Iteration(prompts=32, group_size=16, steps=10, trained_steps=2)
TINY = Iteration(prompts=12, group_size=8, steps=6, trained_steps=3)
# Per image: .5 s a step, .25 s to score, 2 s a trained step on one GPU.
WORKLOAD = Workload(real=REAL, guidance=False, tiny=TINY, hardware=made())


def test_the_tiny_iteration_costs_what_the_real_one_costs():
    assert WORKLOAD.images_per_sample == pytest.approx(16 / 3)
    assert WORKLOAD.steps_per_step == pytest.approx(5 / 3)
    assert WORKLOAD.denoise_s(96, 6) == pytest.approx(512 * 10 * 0.5)
    assert WORKLOAD.decode_score_s(96) == pytest.approx(512 * 0.25)
    assert WORKLOAD.train_s(96, 3, gpus=4) == pytest.approx(512 * 2 * 2.0 / 4)


def test_parts_of_an_iteration_cost_their_share():
    assert WORKLOAD.denoise_s(3, 2) == pytest.approx(16 * (10 / 3) * 0.5)
    assert WORKLOAD.denoise_s(3, 2, degree=2) == pytest.approx(16 * (10 / 3) * 0.5 / 1.6)
    assert WORKLOAD.decode_score_s(3) == pytest.approx(4.0)
    assert WORKLOAD.train_s(3, 1, gpus=1) == pytest.approx(16 * (2 / 3) * 2.0)


def test_guidance_is_that_of_the_real_job():
    guided = Workload(real=REAL, guidance=True, tiny=TINY, hardware=made())
    assert guided.denoise_s(3, 2) == pytest.approx(2 * WORKLOAD.denoise_s(3, 2))
    assert guided.train_s(3, 1, gpus=4) == pytest.approx(2 * WORKLOAD.train_s(3, 1, gpus=4))
    assert guided.decode_score_s(3) == WORKLOAD.decode_score_s(3)


def test_a_system_that_trains_on_larger_groups_pays_for_them():
    """G = N = 32 instead of 8: four times the rollout and four times the training."""
    assert WORKLOAD.denoise_s(12 * 32, 6) == pytest.approx(4 * 512 * 10 * 0.5)
    assert WORKLOAD.train_s(12 * 32, 3, gpus=4) == pytest.approx(4 * 512 * 2 * 2.0 / 4)


def test_a_job_that_stands_for_itself_costs_its_own_work():
    itself = Workload(real=TINY, guidance=False, tiny=TINY, hardware=made())
    assert itself.denoise_s(7, 3) == made().denoise_s(7, 3, guidance=False)
    assert itself.train_s(7, 3, gpus=2) == made().train_s(7, 3, gpus=2, guidance=False)


@given(samples=st.integers(1, 500), first=st.integers(1, 5))
def test_work_in_parts_costs_what_it_costs_at_once(samples, first):
    parts = WORKLOAD.denoise_s(samples, first) + WORKLOAD.denoise_s(samples, 6 - first)
    assert parts == pytest.approx(WORKLOAD.denoise_s(samples, 6))


@pytest.mark.parametrize("name", ["prompts", "group_size", "steps", "trained_steps"])
def test_an_empty_iteration_is_refused(name):
    sizes = {"prompts": 1, "group_size": 1, "steps": 1, "trained_steps": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Iteration(**sizes)
