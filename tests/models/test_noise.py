import hashlib
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from src.core.seeds import sample_seeds
from src.models.noise import coarse_step_noise, initial_noise, initial_noise_for, noise_for, step_noise

SEEDS = st.integers(0, 2**62 - 1)


def test_golden_values() -> None:
    """The same on every machine and NumPy release: runs, replays and workers rely on it."""
    assert initial_noise(7, (2,)).tolist() == [-0.47698378562927246, -0.19761310517787933]
    assert step_noise(7, 3, (2,)).tolist() == [-0.5762550830841064, -0.13170461356639862]
    many = step_noise(1, 0, (100_000,))
    assert hashlib.sha256(many.tobytes()).hexdigest()[:16] == "7f9bce2436695ea2"


def test_noise_is_standard_normal_float32() -> None:
    noise = step_noise(5, 2, (200_000,))
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01


@given(seed=SEEDS, k=st.integers(0, 100))
def test_noise_is_a_function_of_seed_and_step(seed: int, k: int) -> None:
    assert np.array_equal(step_noise(seed, k, (3, 4)), step_noise(seed, k, (3, 4)))
    assert not np.array_equal(step_noise(seed, k, (3, 4)), step_noise(seed, k + 1, (3, 4)))
    assert not np.array_equal(step_noise(seed, k, (3, 4)), step_noise(seed + 1, k, (3, 4)))
    assert not np.array_equal(step_noise(seed, k, (3, 4)), initial_noise(seed, (3, 4)))


def test_no_two_draws_of_an_iteration_are_equal() -> None:
    """Members of a group, of all groups, share neither initial nor step noise."""
    seeds = [seed for instance in range(12) for seed in sample_seeds(0, 3, instance, 32)]
    draws = [initial_noise(seed, (4,)).tobytes() for seed in seeds]
    draws += [step_noise(seed, k, (4,)).tobytes() for seed in seeds for k in range(6)]
    assert len(set(draws)) == len(seeds) * 7


def test_a_coarse_step_is_the_scaled_sum_of_its_steps() -> None:
    coarse = coarse_step_noise(9, [2, 3, 4], (5,))
    total = sum(step_noise(9, k, (5,)) for k in (2, 3, 4))
    np.testing.assert_allclose(coarse, total / math.sqrt(3), rtol=1e-6)
    assert coarse.dtype == np.float32
    assert np.array_equal(coarse_step_noise(9, [2], (5,)), step_noise(9, 2, (5,)))


def test_batches_stack_the_draws_of_their_seeds() -> None:
    seeds = [4, 1, 4]
    initial, step = initial_noise_for(seeds, (2, 3)), noise_for(seeds, [1, 2], (2, 3))
    for row, seed in enumerate(seeds):
        assert torch.equal(initial[row], torch.from_numpy(initial_noise(seed, (2, 3))))
        assert torch.equal(step[row], torch.from_numpy(coarse_step_noise(seed, [1, 2], (2, 3))))
