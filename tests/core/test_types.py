import dataclasses
import pickle

import numpy as np
import pytest

from src.core.types import Blob, Member, PolicyVersion, RequestKind, SampleSpec, Snapshot


def test_request_kinds_are_served_in_order_of_their_value():
    assert sorted(RequestKind) == [
        RequestKind.ROLLOUT,
        RequestKind.EVAL,
        RequestKind.AUDIT,
        RequestKind.EXPLORE,
    ]


def test_versions_never_go_backwards_over_a_restart():
    assert PolicyVersion(0, 9) < PolicyVersion(0, 10) < PolicyVersion(1, 0)
    assert PolicyVersion(0, 9) < PolicyVersion(0, 10, trained=False) < PolicyVersion(0, 10)


def test_versions_are_read_back_from_their_text():
    version = PolicyVersion(2, 10)
    assert str(version) == "2.10"
    assert PolicyVersion.parse("2.10") == version
    average = PolicyVersion(2, 10, trained=False)
    assert (str(average), PolicyVersion.parse(str(average))) == ("2.10.average", average)


@pytest.mark.parametrize("text", ["", "7", "1.x", "1.2.3", "a.1", ".average", "1.average"])
def test_other_text_is_no_version(text: str):
    with pytest.raises(ValueError, match=r"incarnation\.iteration"):
        PolicyVersion.parse(text)


@pytest.mark.parametrize(
    ("steps", "stochastic", "message"),
    [
        (0, (), r"SampleSpec\.steps must be at least 1, got 0"),
        (4, (4,), r"below steps=4, got \(4,\)"),
        (4, (-1, 2), r"below steps=4, got \(-1, 2\)"),
        (4, (2, 1), r"increasing .* got \(2, 1\)"),
        (4, (1, 1), r"increasing .* got \(1, 1\)"),
    ],
)
def test_a_spec_that_cannot_be_denoised_is_refused(steps: int, stochastic: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        SampleSpec(steps, stochastic)


def test_a_spec_may_be_deterministic_or_stochastic_throughout():
    assert SampleSpec(1).stochastic_steps == ()
    assert SampleSpec(3, (0, 1, 2)).guidance_scale == 1.0


def test_equal_digests_mean_equal_content():
    values = np.arange(6, dtype=np.float32)
    blob = Blob("float32", (2, 3), values.tobytes())
    assert blob.digest == Blob("float32", (2, 3), values.tobytes()).digest
    others = [
        Blob("float32", (3, 2), values.tobytes()),
        Blob("int32", (2, 3), values.tobytes()),
        Blob("float32", (2, 3), (values + 1).tobytes()),
    ]
    assert len({blob.digest, *(other.digest for other in others)}) == 4
    assert pickle.loads(pickle.dumps(blob)) == blob


def test_messages_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SampleSpec(2).steps = 3  # type: ignore[misc]


def test_members_are_told_apart_by_their_life():
    assert [Member("a", 0).name, Member("a", 0, 1).name, Member("a", 1, 0, "reserved").name] == [
        "spot-a-0.0",
        "spot-a-0.1",
        "reserved-a-1.0",
    ]


def test_ranks_split_into_dp_and_sp():
    ranks = [Snapshot(generation=0, rank=rank, world=6, sp_degree=3) for rank in range(6)]
    assert [rank.dp for rank in ranks] == [2] * 6
    assert [rank.dp_rank for rank in ranks] == [0, 0, 0, 1, 1, 1]
    assert [rank.is_leader for rank in ranks] == [True] + [False] * 5


@pytest.mark.parametrize(
    ("rank", "world", "sp_degree", "message"),
    [
        (2, 2, 1, r"Snapshot\.rank must be in 0\.\.world-1=1, got 2"),
        (0, 0, 1, r"Snapshot\.rank"),
        (0, 4, 3, r"Snapshot\.sp_degree must divide world=4, got 3"),
        (0, 4, 0, r"Snapshot\.sp_degree must divide world=4, got 0"),
    ],
)
def test_a_membership_that_does_not_divide_is_refused(rank: int, world: int, sp_degree: int, message: str):
    with pytest.raises(ValueError, match=message):
        Snapshot(rank=rank, world=world, sp_degree=sp_degree)
