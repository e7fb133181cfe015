"""The degree of sequence parallelism as a policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.types import Member
from src.parallel.plan import Footprint, Shape, allowed_degrees, best_degree, check_geometry, groups_of, training_degree

PUBLISHED = {1: 4.30, 2: 2.68, 4: 1.63}
"""Seconds per sample by degree."""
SMALL = Footprint(fixed_bytes=40e9, activation_bytes=10e9)
LARGE = Footprint(fixed_bytes=40e9, activation_bytes=60e9)


def best(samples: int, members: int, footprint: Footprint = SMALL, memory_bytes: float = 80e9) -> int:
    return best_degree(
        [1, 2, 4], PUBLISHED, samples=samples, members=members, footprint=footprint, memory_bytes=memory_bytes
    )


def test_many_samples_are_served_alone():
    assert best(samples=64, members=4) == 1


def test_the_tail_of_a_phase_is_shared():
    """Four members: 1 sample takes 4.30, 2.68 or 1.63 s; 2 take 4.30, 2.68 or 3.26 s; 3 take 4.30, 5.36 or 4.89 s."""
    assert [best(samples, 4) for samples in (1, 2, 3, 4)] == [4, 2, 1, 1]


def test_what_does_not_fit_into_memory_is_shared():
    """40 + 60 / n GB: 100, 70 and 55 GB."""
    assert best(64, 4, LARGE) == 2
    assert best(64, 4, LARGE, memory_bytes=60e9) == 4


def test_what_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"5\.5e\+10 bytes per member at degree 4, memory_bytes is 5e\+10"):
        best(64, 4, LARGE, memory_bytes=50e9)


def test_a_degree_that_was_not_measured_is_not_chosen():
    arguments = {"samples": 1, "members": 4, "footprint": SMALL, "memory_bytes": 80e9}
    assert best_degree([1, 2, 3, 4], {1: 4.3, 2: 2.7}, **arguments) == 2
    with pytest.raises(ValueError, match="seconds must hold one of the degrees"):
        best_degree([2], {1: 4.3}, **arguments)


def test_one_member_serves_alone():
    assert best(samples=1, members=1) == 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(64, [1]), (1024 + 64, [1, 2]), (4096 + 64, [1, 2, 3, 4, 5, 6, 7, 8]), (6400 + 64, [1, 2, 3, 4, 5, 6, 7, 8])],
)
def test_short_sequences_are_hardly_shared(tokens: int, expected: list[int]):
    assert allowed_degrees(Shape(tokens, heads=24), members=8, largest=8) == expected


def test_no_rank_is_without_a_head():
    assert allowed_degrees(Shape(6400, heads=3), members=8, largest=8) == [1, 2, 3]
    assert allowed_degrees(Shape(6400, heads=24), members=8, largest=2) == [1, 2]


def member(node: str, slot: int) -> Member:
    return Member(node, slot)


def test_groups_lie_inside_nodes_and_the_rest_serves_alone():
    members = [member("b", 0), member("a", 2), member("a", 0), member("a", 1), member("b", 1), member("c", 0)]
    assert groups_of(members, 2) == [
        (member("a", 0), member("a", 1)),
        (member("b", 0), member("b", 1)),
        (member("a", 2),),
        (member("c", 0),),
    ]


def test_what_is_left_on_several_nodes_may_be_joined():
    members = [member("a", 0), member("b", 0), member("c", 0)]
    assert groups_of(members, 2, across_nodes=True) == [(member("a", 0), member("b", 0)), (member("c", 0),)]


MEMBERS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 7)), unique=True)


@given(MEMBERS, st.integers(1, 6), st.booleans())
def test_everybody_is_in_one_group(places: list[tuple[str, int]], degree: int, across: bool):
    members = [member(*place) for place in places]
    groups = groups_of(members, degree, across_nodes=across)
    assert sorted(m.name for group in groups for m in group) == sorted(m.name for m in members)
    assert all(len(group) in (1, degree) for group in groups)
    assert groups == groups_of(members[::-1], degree, across_nodes=across)
    if not across:
        assert all(len({m.node for m in group}) == 1 for group in groups)


def geometry(**changes: int) -> None:
    check_geometry(**{"world": 4, "degree": 2, "heads": 4, "pairs": 96, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"degree": 3}, "parallel.sp_degree must divide trainer.devices=4, got 3"),
        ({"degree": 0}, "parallel.sp_degree must divide trainer.devices=4, got 0"),
        ({"degree": 4, "heads": 2}, "parallel.sp_degree must be at most the model's 2 attention heads, got 4"),
        ({"pairs": 1}, r"an update trains on 1 .* pairs, too few for 2 data-parallel ranks"),
    ],
)
def test_wrong_geometry_is_refused_in_one_sentence(changes: dict[str, int], message: str):
    geometry()
    with pytest.raises(ValueError, match=message):
        geometry(**changes)


@pytest.mark.parametrize(
    ("world", "largest", "degree"),
    [(1, 4, 1), (2, 4, 2), (3, 2, 1), (3, 3, 3), (4, 2, 2), (4, 3, 2), (5, 4, 1), (6, 4, 3), (7, 2, 1), (8, 4, 4)],
)
def test_training_ranks_share_sequences_in_equal_groups(world: int, largest: int, degree: int):
    assert training_degree(world, largest) == degree


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_training_degree_is_the_largest_that_fits(world: int, largest: int):
    degree = training_degree(world, largest)
    assert world % degree == 0
    assert degree <= largest
    assert all(world % more for more in range(degree + 1, min(world, largest) + 1))
