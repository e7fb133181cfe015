from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from src.core import seeds

integers = st.integers(-(2**70), 2**70)


def test_golden_values():
    """Runs of every version, on every machine, draw the same: a change here breaks resuming and replaying."""
    assert seeds.derive("a", 1) == 2332988142362431280
    assert seeds.sample_seeds(7, 3, 2, 3) == (4089408444546597576, 1450133114564026597, 391133880627519930)
    assert seeds.eval_seed(0) == 4529139657427145609
    assert seeds.permutation(6, "prompts", 1) == [3, 2, 4, 1, 5, 0]
    assert seeds.draw(range(10), 3, "x", 0) == (0, 7, 1)
    assert seeds.generator("ties", 0, 0, 0).random() == 0.36521397022136026


def test_seeds_of_a_run_are_unique():
    """40 iterations x 16 prompts x 64 candidates, and the same of the next run seed."""
    made = [seeds.sample_seed(*key) for key in product(range(2), range(40), range(16), range(64))]
    assert len(set(made)) == len(made) == 81920


def test_seeds_do_not_depend_on_how_many_workers_share_them():
    """Each worker takes every w-th candidate, or one contiguous chunk: together they make the same seeds."""
    all_seeds = seeds.sample_seeds(0, 5, 1, 24)
    for workers in (1, 2, 3, 5, 24):
        strided = [
            seeds.sample_seed(0, 5, 1, index) for worker in range(workers) for index in range(worker, 24, workers)
        ]
        assert sorted(strided) == sorted(all_seeds)
        assert len(set(strided)) == 24


def test_more_candidates_keep_the_first_ones():
    assert seeds.sample_seeds(3, 1, 4, 32)[:8] == seeds.sample_seeds(3, 1, 4, 8)


@given(integers, integers)
def test_derived_integers_are_seeds_for_everything_and_differ(a: int, b: int):
    assert 0 <= seeds.derive("p", a) < 2**seeds.SEED_BITS
    assert (seeds.derive("p", a) == seeds.derive("p", b)) == (a == b)


def test_parts_do_not_run_together():
    assert len({seeds.derive(*parts) for parts in [("ab", "c"), ("a", "bc"), ("abc",), (1, 23), (12, 3)]}) == 5


def test_purposes_draw_independently_and_repeatably():
    first = [seeds.generator("ties", 0, 1, 2).random() for _ in range(2)]
    assert first[0] == first[1] != seeds.generator("audit", 0, 1, 2).random()


@given(st.integers(0, 30), st.integers(0, 40), st.integers(0, 1000))
def test_draw_is_a_subset_without_repeats(size: int, count: int, key: int):
    items = list(range(100, 100 + size))
    drawn = seeds.draw(items, count, "test", key)
    assert len(drawn) == len(set(drawn)) == min(size, count)
    assert set(drawn) <= set(items)
    assert sorted(seeds.permutation(size, "test", key)) == list(range(size))


def test_draw_is_uniform():
    """Each of 5 items is in 2 of 5 draws: 4000 draws have a standard deviation of 31."""
    times = [0] * 5
    for key in range(4000):
        for item in seeds.draw(range(5), 2, "uniform", key):
            times[item] += 1
    assert all(abs(count - 1600) < 4 * 31 for count in times)
