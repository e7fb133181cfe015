"""Sequence parallelism computes what one process computes: outputs, and every parameter's gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from src.parallel.families import parallelize
from src.parallel.ulysses import SequenceGroup, parts
from tests.parallel.ranks import Rank, RankPool, largest_difference, largest_rms
from tests.parallel.tiny_dits import FAMILIES, Inputs, cast, rotary_in

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def passes(model: nn.Module, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of one forward and backward pass, with a loss that weighs every output differently."""
    model.zero_grad(set_to_none=True)
    output: Tensor = model(**inputs, return_dict=False)[0]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    (output * weights + output.pow(2)).sum().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(
    rank: Rank,
    family: str,
    heads: int,
    grid: tuple[int, int],
    text: int,
    dtype: torch.dtype,
    checkpointing: bool = False,
    difference: Callable[..., float] = largest_difference,
) -> tuple[float, float, int]:
    """Largest difference from one process of the output and of the gradients summed over the group."""
    model, inputs = FAMILIES[family](heads, grid, text)
    model, inputs = model.to(rank.device, dtype), cast(inputs, dtype, rank.device)
    group = SequenceGroup()
    shared = copy.deepcopy(model)
    if checkpointing:
        shared.enable_gradient_checkpointing()
    parallelize(shared, group)
    group.enter(rank.group)
    with rotary_in(torch.promote_types(dtype, torch.float32)):
        expected_output, expected = passes(model, inputs)
        output, gradients = passes(shared, inputs)
    assert expected.keys() >= gradients.keys()
    # A rank without tokens of a stream has zero gradients there, or none.
    summed = {name: gradients.get(name, torch.zeros_like(expected[name])) for name in sorted(expected)}
    for gradient in summed.values():
        rank.group.sum(gradient)
    error = difference(list(summed.values()), [expected[name] for name in summed])
    return difference([output], [expected_output]), error, len(summed)


def assert_equal(results: list[tuple[float, float, int]], dtype: torch.dtype) -> None:
    for output, gradient, count in results:
        assert count > 20
        assert output < TOLERANCE[dtype]
        assert gradient < TOLERANCE[dtype]


GEOMETRIES = {
    "even": (6, (6, 4), 6),
    "odd text": (6, (6, 4), 5),
    "nothing divides": (5, (5, 5), 7),
    "more ranks than heads, and than text": (1, (3, 3), 1),
}


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same(ranks: RankPool, family: str, geometry: str, degree: int):
    results = ranks.run(differences, family, *GEOMETRIES[geometry], torch.float64, size=degree)
    assert_equal(results, torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_gradient_checkpointing(ranks: RankPool, family: str):
    assert_equal(ranks.run(differences, family, 5, (5, 5), 7, torch.float64, True, size=2), torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_single_precision(ranks: RankPool, family: str):
    assert_equal(ranks.run(differences, family, 4, (6, 4), 5, torch.float32, size=2), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_half_precision(ranks: RankPool, family: str):
    """bf16 rounds to 2^-9 of a number, elsewhere on two ranks than on one."""
    results = ranks.run(differences, family, 4, (6, 4), 5, torch.bfloat16, False, largest_rms, size=2)
    for output, gradient, count in results:
        assert count > 20
        assert output < 2e-2
        assert gradient < 5e-2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("degree", [4, 6])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_large_degrees(many_ranks: RankPool, family: str, geometry: str, degree: int):
    results = many_ranks.run(differences, family, *GEOMETRIES[geometry], torch.float64, size=degree)
    assert_equal(results, torch.float64)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("side", "degree"), [(32, 2), (32, 3), (80, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_images_of_real_size(ranks: RankPool, side: int, degree: int, dtype: torch.dtype):
    """1024 tokens (512 x 512 pixels) and 6400 (1280 x 1280)."""
    assert_equal(ranks.run(differences, "qwen_image", 3, (side, side), 37, dtype, size=degree), dtype)


# ---------------------------------------------------------------------------- alone


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_a_model_computes_bit_for_bit_what_it_did_before(family: str):
    model, inputs = FAMILIES[family](3, (4, 4), 5)
    expected_output, expected = passes(model, inputs)
    shared = copy.deepcopy(model)
    parallelize(shared, SequenceGroup())
    output, gradients = passes(shared, inputs)
    assert torch.equal(output, expected_output)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def swapped_group(rank: Rank) -> tuple[float, float, bool]:
    """One model: alone, then with the group, then alone again."""
    model, inputs = FAMILIES["qwen_image"](4, (4, 4), 5)
    group = SequenceGroup()
    parallelize(model, group)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        alone = model(**inputs, return_dict=False)[0]
        group.enter(rank.group)
        together = model(**inputs, return_dict=False)[0]
        copied = reference(**inputs, return_dict=False)[0]
        group.enter(None)
        again = model(**inputs, return_dict=False)[0]
    return largest_difference([together], [alone]), largest_difference([copied], [together]), torch.equal(again, alone)


def test_the_group_may_change_between_two_passes(ranks: RankPool):
    for together, copied, same_again in ranks.run(swapped_group, size=2):
        assert 0 < together < 1e-5, "equal bits would mean that nothing was shared"
        assert copied == 0, "a deep copy of a model computes in its group"
        assert same_again


def wrong_lengths(rank: Rank) -> str:
    q_BLHD = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match="lengths") as error:
        SequenceGroup(rank.group).attention(q_BLHD, q_BLHD, q_BLHD, lengths=(5,))
    return str(error.value)


def test_lengths_that_do_not_fit_are_refused_before_the_collective(ranks: RankPool):
    # 5 tokens are 3 + 2: the second rank is right, and is never asked.
    assert ranks.run(refused_on_first_rank, size=2)[0] == "lengths (5,) give rank 0 of 2 3 tokens, got 2"


def refused_on_first_rank(rank: Rank) -> str:
    return wrong_lengths(rank) if rank.rank == 0 else ""


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match=r"no sequence parallelism for Linear, known: \['Flux"):
        parallelize(nn.Linear(1, 1), SequenceGroup())


def gathered(rank: Rank, length: int) -> bool:
    values_BLC = torch.arange(2 * length * 3, dtype=torch.float64).view(2, length, 3)
    group = SequenceGroup(rank.group)
    return torch.equal(group.gather(group.shard(values_BLC, 1), length), values_BLC)


def test_gathering_what_was_sharded_gives_it_back(ranks: RankPool):
    for length in (1, 2, 3, 5, 8, 1024):
        assert ranks.run(gathered, length, size=3) == [True] * 3


@pytest.mark.parametrize(("count", "size", "expected"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (6, 3, [2, 2, 2])])
def test_parts(count: int, size: int, expected: list[int]):
    assert parts(count, size) == expected
