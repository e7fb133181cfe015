import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.rl.geometry import BatchGeometry


def geometry(**changes: int) -> BatchGeometry:
    sizes = {
        "prompts_per_iteration": 12,
        "prompts_available": 1000,
        "group_size": 8,
        "rollouts_per_prompt": 8,
        "explored_per_prompt": 32,
        "steps": 6,
        "stochastic_steps": 5,
        "trained_steps": 3,
        "updates": 2,
        "micro_batch": 64,
    }
    return BatchGeometry(**{**sizes, **changes})


def test_derived_numbers():
    sizes = geometry()
    assert (sizes.samples, sizes.pairs) == (96, 288)
    assert [sizes.groups_of_update(update) for update in range(2)] == [range(0, 6), range(6, 12)]
    assert [sizes.pairs_of_update(update) for update in range(2)] == [144, 144]


def test_updates_need_not_divide_the_groups():
    sizes = geometry(prompts_per_iteration=7, updates=3)
    assert [len(sizes.groups_of_update(update)) for update in range(3)] == [2, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompts_per_iteration": 0, "updates": 1},
            r"prompts_per_iteration must be in 1\.\.1000 \(train set\), got 0",
        ),
        ({"prompts_available": 11}, r"prompts_per_iteration must be in 1\.\.11 \(train set\), got 12"),
        ({"group_size": 1}, r"group_size must be at least 2, .*, got 1"),
        ({"rollouts_per_prompt": 7}, r"rollouts_per_prompt must be at least group_size=8, got 7"),
        ({"explored_per_prompt": 7}, r"explored_per_prompt must be 0 or at least rollouts_per_prompt=8, got 7"),
        ({"explored_per_prompt": -1}, r"explored_per_prompt must be 0 or at least rollouts_per_prompt=8, got -1"),
        ({"stochastic_steps": 6}, r"stochastic_steps must be in 1\.\.5 .*, got 6"),
        ({"trained_steps": 6}, r"trained_steps must be in 1\.\.5 .*, got 6"),
        ({"trained_steps": 0}, r"trained_steps must be in 1\.\.5 .*, got 0"),
        ({"updates": 13}, r"updates must be in 1\.\.12 .*, got 13"),
        ({"updates": 0}, r"updates must be in 1\.\.12 .*, got 0"),
        ({"micro_batch": 0}, r"micro_batch must be at least 1, got 0"),
        ({"steps": 1}, r"steps must be at least 2, .*, got 1"),
    ],
)
def test_what_does_not_fit_is_named_with_its_value(changes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        geometry(**changes)


def test_one_message_names_all_faults():
    with pytest.raises(ValueError, match="group_size") as caught:
        geometry(group_size=1, updates=99, micro_batch=0)
    assert str(caught.value) == (
        "group_size must be at least 2, since a sample is compared with its group, got 1; "
        "updates must be in 1..12 (prompts_per_iteration, whose groups they share), got 99; "
        "micro_batch must be at least 1, got 0"
    )


@pytest.mark.parametrize("explored", [0, 8, 9])
def test_no_exploration_and_bare_exploration_are_fine(explored: int):
    assert geometry(explored_per_prompt=explored).explored_per_prompt == explored


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_updates_train_on_all_pairs_once(prompts: int, updates: int):
    sizes = geometry(prompts_per_iteration=prompts, updates=min(updates, prompts))
    groups = [group for update in range(sizes.updates) for group in sizes.groups_of_update(update)]
    assert groups == list(range(prompts))
    lengths = [len(sizes.groups_of_update(update)) for update in range(sizes.updates)]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1
    assert sum(sizes.pairs_of_update(update) for update in range(sizes.updates)) == sizes.pairs
