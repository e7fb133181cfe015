from collections import Counter

import pytest

from src.rl.window import AllButLast, RandomWindow, SlidingWindow, trained_steps


def test_all_but_the_last_step():
    assert AllButLast().steps(6, run_seed=0, iteration=3) == (0, 1, 2, 3, 4)


def test_a_window_is_successive_steps_of_its_range_and_all_places_come_equally_often():
    """Size 3 in 1..5 (high is excluded) starts at 1, 2 or 3: 3000 iterations, standard deviation 26."""
    window = RandomWindow(size=3, low=1, high=6)
    places = Counter(window.steps(10, 0, iteration) for iteration in range(3000))
    assert set(places) == {(1, 2, 3), (2, 3, 4), (3, 4, 5)}
    assert all(abs(times - 1000) < 4 * 26 for times in places.values())


def test_a_window_is_a_function_of_run_seed_and_iteration():
    """Every process, and every member of a group, sees the same one; it changes over iterations and runs."""
    window = RandomWindow(size=2, low=0, high=8)
    run = [window.steps(10, 7, iteration) for iteration in range(20)]
    assert run == [RandomWindow(size=2, low=0, high=8).steps(10, 7, iteration) for iteration in range(20)]
    assert len(set(run)) > 3
    assert run != [window.steps(10, 8, iteration) for iteration in range(20)]


def test_a_window_that_fills_its_range_stands_still():
    assert {RandomWindow(size=3, low=0, high=3).steps(4, 0, i) for i in range(10)} == {(0, 1, 2)}


def test_the_last_step_is_never_stochastic():
    with pytest.raises(ValueError, match=r"RandomWindow\.high must be below steps=5 .*, got 5"):
        RandomWindow(size=2, low=0, high=5).steps(5, 0, 0)


@pytest.mark.parametrize(
    ("size", "low", "high", "message"),
    [
        (0, 0, 4, r"size must be in 1\.\.high-low=4, got 0"),
        (5, 0, 4, r"size must be in 1\.\.high-low=4, got 5"),
        (1, -1, 4, r"low must not be negative, got -1"),
        (1, 4, 4, r"size must be in 1\.\.high-low=0, got 1"),
    ],
)
def test_a_window_that_does_not_fit_is_refused(size: int, low: int, high: int, message: str):
    with pytest.raises(ValueError, match=message):
        RandomWindow(size=size, low=low, high=high)


def test_a_sliding_window_moves_on_and_starts_over():
    window = SlidingWindow(size=2, low=1, high=5, every=3)
    assert [window.steps(8, 7, iteration)[0] for iteration in range(12)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 1, 1, 1]
    assert window.steps(8, 0, 3) == (2, 3), "the run's seed does not matter"
    with pytest.raises(ValueError, match=r"SlidingWindow\.high must be below steps=5 .*, got 5"):
        window.steps(5, 0, 0)
    with pytest.raises(ValueError, match=r"SlidingWindow\.every must be at least 1, got 0"):
        SlidingWindow(size=2, low=0, high=4, every=0)
    with pytest.raises(ValueError, match=r"SlidingWindow\.size must be in 1\.\.high-low=4, got 5"):
        SlidingWindow(size=5, low=0, high=4, every=1)


def sample_steps(seed: int, count: int = 2, stochastic: tuple[int, ...] = (1, 2, 4, 5)) -> tuple[int, ...]:
    return trained_steps(stochastic, count, run_seed=0, iteration=3, instance=1, seed=seed)


def test_trained_steps_are_drawn_for_each_sample_and_all_equally_often():
    """Each of 4 steps is in half of the draws of 2: 2000 samples, standard deviation 22."""
    drawn = [sample_steps(seed) for seed in range(2000)]
    assert len(set(drawn)) == 6, "all pairs of 4 steps"
    assert all(steps == tuple(sorted(set(steps))) and len(steps) == 2 for steps in drawn)
    times = Counter(step for steps in drawn for step in steps)
    assert all(abs(times[step] - 1000) < 4 * 22 for step in (1, 2, 4, 5))
    assert drawn == [sample_steps(seed) for seed in range(2000)]


def test_all_steps_may_be_trained():
    assert sample_steps(0, count=4) == (1, 2, 4, 5)


@pytest.mark.parametrize("count", [0, 5])
def test_more_steps_than_are_stochastic_are_refused(count: int):
    with pytest.raises(ValueError, match=rf"trained_steps must be in 1\.\.4 .* got {count}"):
        sample_steps(0, count=count)
