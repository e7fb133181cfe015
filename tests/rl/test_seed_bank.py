import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.seeds import generator, sample_seeds
from src.core.selection import extremes, max_variance
from src.core.types import Explored
from src.rl.seed_bank import SeedBank

RUN_SEED, ITERATION, INSTANCE = 5, 3, 2
CANDIDATES = sample_seeds(RUN_SEED, ITERATION, INSTANCE, 12)


def bank_of(explored: list[Explored], **changes) -> SeedBank:
    bank = SeedBank(**{"run_seed": RUN_SEED, "select": max_variance, **changes})
    bank.offer(ITERATION, {INSTANCE: explored})
    return bank


def candidates(rewards: dict[int, float]) -> list[Explored]:
    """Explored seeds by index of the candidate."""
    return [Explored(CANDIDATES[index], reward, f"{index:x}") for index, reward in rewards.items()]


explorations = st.dictionaries(st.integers(0, 11), st.sampled_from([0.0, 0.25, 0.5, 1.0])).map(candidates)


def test_nothing_explored_is_plain_grpo():
    assert SeedBank(run_seed=RUN_SEED, select=max_variance).take(ITERATION, INSTANCE, 8) == CANDIDATES[:8]
    assert bank_of([]).take(ITERATION, INSTANCE, 8) == CANDIDATES[:8]


def test_the_best_and_the_worst_of_the_explored_are_kept():
    explored = candidates({0: 0.5, 1: 0.1, 2: 0.6, 3: 0.9, 4: 0.4, 5: 1.0, 6: 0.0})
    for select in (max_variance, extremes):
        kept = bank_of(explored, select=select).take(ITERATION, INSTANCE, 4)
        assert kept == tuple(CANDIDATES[index] for index in (6, 1, 3, 5))


def test_too_few_explored_are_filled_up_with_the_first_that_were_not():
    explored = candidates({1: 0.5, 4: 0.2, 0: 0.9})
    taken = bank_of(explored).take(ITERATION, INSTANCE, 6)
    assert set(taken[:3]) == {CANDIDATES[0], CANDIDATES[1], CANDIDATES[4]}
    assert taken[3:] == (CANDIDATES[2], CANDIDATES[3], CANDIDATES[5])


@given(explorations, st.integers(1, 12))
def test_any_exploration_gives_the_seeds_that_are_asked_for(explored: list[Explored], count: int):
    taken = bank_of(explored).take(ITERATION, INSTANCE, count)
    known = {result.seed for result in explored}
    assert len(set(taken)) == len(taken) == count
    if len(explored) >= count:
        assert set(taken) <= known
    else:
        assert known <= set(taken) <= set(CANDIDATES)


@given(explorations, st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(explored: list[Explored], count: int, random):
    """Ties are many; whoever was fast must not be preferred, or runs could not be repeated."""
    shuffled = random.sample(explored, len(explored))
    first, second = bank_of(explored), bank_of(shuffled)
    assert first.take(ITERATION, INSTANCE, count) == second.take(ITERATION, INSTANCE, count)
    assert first.take(ITERATION, INSTANCE, count) == second.take(ITERATION, INSTANCE, count), "and again"
    assert first.audit(ITERATION, 1, 3) == second.audit(ITERATION, 1, 3)


def test_ties_differ_between_runs_and_are_drawn_by_their_own_generator():
    explored = candidates(dict.fromkeys(range(12), 0.5))
    in_order = sorted(explored, key=lambda result: result.seed)
    ties = generator("ties", RUN_SEED, ITERATION, INSTANCE)
    expected = [in_order[index].seed for index in max_variance([0.5] * 12, 4, ties)]
    assert list(bank_of(explored).take(ITERATION, INSTANCE, 4)) == expected
    assert len({bank_of(explored, run_seed=seed).take(ITERATION, INSTANCE, 4) for seed in range(5)}) == 5


def test_other_iterations_and_prompts_are_not_touched():
    bank = bank_of(candidates({0: 0.1, 1: 0.9}))
    assert bank.take(ITERATION, 0, 2) == sample_seeds(RUN_SEED, ITERATION, 0, 2)
    assert bank.take(ITERATION + 1, INSTANCE, 2) == sample_seeds(RUN_SEED, ITERATION + 1, INSTANCE, 2)


def test_a_seed_that_was_explored_twice_is_refused():
    with pytest.raises(ValueError, match="iteration 3, instance 2 repeat"):
        bank_of(candidates({0: 0.1}) + candidates({0: 0.2}))


def test_what_was_explored_is_remembered_until_it_is_forgotten():
    bank = bank_of(candidates({0: 0.1, 1: 0.5, 2: 0.9}))
    bank.forget_before(ITERATION)
    assert len(bank.explored(ITERATION, INSTANCE)) == 3
    bank.forget_before(ITERATION + 1)
    assert bank.explored(ITERATION, INSTANCE) == ()


@given(explorations, st.integers(1, 12))
def test_a_bank_is_restored_exactly_through_json(explored: list[Explored], count: int):
    bank = bank_of([Explored(found.seed, found.reward / 3, found.digest) for found in explored])
    bank.offer(ITERATION + 1, {0: [Explored(1, 0.1 + 0.2, "a")], 1: []})
    restored = SeedBank(run_seed=RUN_SEED, select=max_variance)
    restored.offer(99, {0: [Explored(1, 1.0, "other")]})
    restored.load_state_dict(json.loads(json.dumps(bank.state_dict())))
    assert restored.state_dict() == bank.state_dict()
    assert restored.explored(99, 0) == ()
    assert restored.explored(ITERATION, INSTANCE) == bank.explored(ITERATION, INSTANCE)
    assert restored.explored(ITERATION + 1, 0) == (Explored(1, 0.1 + 0.2, "a"),)
    assert restored.take(ITERATION, INSTANCE, count) == bank.take(ITERATION, INSTANCE, count)
    assert restored.audit(ITERATION, 1, 4) == bank.audit(ITERATION, 1, 4)


def test_audits_do_not_know_rewards():
    low = bank_of(candidates({index: index / 12 for index in range(12)})).audit(ITERATION, 1, 4)
    high = bank_of(candidates({index: 1 - index / 12 for index in range(12)})).audit(ITERATION, 1, 4)
    assert [found.seed for found in low[INSTANCE]] == [found.seed for found in high[INSTANCE]]


def test_audits_are_uniform_over_prompts_and_over_ranks():
    """Extremes and middle alike: each of 8 ranks in half of 1500 draws of 4, standard deviation 19."""
    bank = SeedBank(run_seed=0, select=max_variance)
    prompts, ranks = Counter(), Counter()
    for iteration in range(1500):
        explored = {
            instance: [
                Explored(seed, rank / 8, "") for rank, seed in enumerate(sample_seeds(0, iteration, instance, 8))
            ]
            for instance in range(4)
        }
        bank.offer(iteration, explored)
        drawn = bank.audit(iteration, prompts=1, per_prompt=4)
        bank.forget_before(iteration)
        for instance, found in drawn.items():
            prompts[instance] += 1
            ranks.update(result.reward for result in found)
            assert len({result.seed for result in found}) == 4
    assert all(abs(prompts[instance] - 375) < 4 * 17 for instance in range(4))
    assert len(ranks) == 8
    assert all(abs(times - 750) < 4 * 19 for times in ranks.values())


def test_audits_take_what_there_is():
    bank = SeedBank(run_seed=0, select=max_variance)
    assert bank.audit(0, 2, 3) == {}
    alone, pair = [Explored(1, 0.5, "a")], [Explored(2, 0.1, "b"), Explored(3, 0.9, "c")]
    bank.offer(0, {0: alone, 1: [], 2: pair})
    assert bank.audit(0, prompts=3, per_prompt=5) == {2: tuple(pair)}
