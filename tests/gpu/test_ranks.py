"""Ranks that compute together: through gloo on the CPU, through NCCL where there are GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from src.app.processes import free_port
from src.parallel.mesh import start_mesh
from src.parallel.ulysses import SequenceGroup
from tests.parallel.ranks import Rank, RankPool, largest_difference
from tests.parallel.test_ulysses import assert_equal, differences
from tests.parallel.tiny_dits import FAMILIES


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    """Two processes of each kind of device, or one where there is one GPU; started when they are needed."""
    started: dict[str, RankPool] = {}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture
def pool(device: str, pools: dict[str, RankPool]) -> RankPool:
    """Ranks on the device."""
    if device not in pools:
        pools[device] = RankPool(2 if device == "cpu" else min(2, torch.cuda.device_count()), device)
    return pools[device]


@pytest.fixture
def two(device: str, pool: RankPool) -> RankPool:
    """Two ranks."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of two ranks, this machine has one")
    return pool


def collectives(rank: Rank) -> dict[str, list[float]]:
    """What each collective of an elastic group came to."""

    def own(count: int = 1) -> torch.Tensor:
        return torch.full((count,), rank.rank + 1.0, device=rank.device)

    total = own()
    rank.group.sum(total)
    gathered = [torch.zeros(1, device=rank.device) for _ in range(rank.size)]
    rank.group.allgather([gathered], [own()])
    sent = [number + 1 for number in range(rank.size)]  # rank r gets r + 1 numbers of everybody
    received = own(rank.size * (rank.rank + 1))
    rank.group.alltoall_base(received, own(sum(sent)), [rank.rank + 1] * rank.size, sent)
    made = {"sum": total, "allgather": torch.cat(gathered), "alltoall": received}
    return {name: values.tolist() for name, values in made.items()}


def assert_collectives(outcomes: list[dict[str, list[float]]]) -> None:
    numbers = [rank + 1.0 for rank in range(len(outcomes))]
    for rank, outcome in enumerate(outcomes):
        assert outcome == {
            "sum": [sum(numbers)],
            "allgather": numbers,
            "alltoall": [number for number in numbers for _ in range(rank + 1)],
        }


def test_a_group_of_one_forms_and_computes(pool: RankPool):
    """NCCL itself on any machine with a GPU."""
    assert_collectives(pool.run(collectives, size=1))


def test_a_group_of_two_forms_and_computes(two: RankPool):
    assert_collectives(two.run(collectives, size=2))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(two: RankPool, family: str):
    """Outputs and gradients of a shared sequence, where nothing divides evenly."""
    assert_equal(two.run(differences, family, 5, (5, 5), 7, torch.float64, size=2), torch.float64)


def through_the_mesh(rank: Rank, port: int) -> tuple[float, str, float]:
    """Attention shared over the mesh of a job against attention alone; the device of the rank; a sum over all."""
    place = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    mesh = start_mesh(sp_degree=rank.size, device=rank.device.type, timeout_s=30.0)
    try:
        generator = torch.Generator().manual_seed(0)
        qkv = [torch.randn(2, 7, 3, 8, generator=generator, dtype=torch.float64).to(mesh.device) for _ in range(3)]
        group = SequenceGroup(mesh.sequence)
        shared = group.attention(*(group.shard(x, 1) for x in qkv), lengths=(7,))
        alone = SequenceGroup().attention(*qkv, lengths=(7,))
        ones = torch.ones(1, device=mesh.device)
        dist.all_reduce(ones, group=mesh.world)
        return largest_difference([shared], [group.shard(alone, 1)]), str(qkv[0].device), ones.item()
    finally:
        dist.destroy_process_group()


def test_the_ranks_of_a_job_meet_on_their_own_devices(device: str, two: RankPool):
    outcomes = two.run(through_the_mesh, free_port(), size=2)
    assert max(difference for difference, _, _ in outcomes) < 1e-10
    assert [where for _, where, _ in outcomes] == (["cpu"] * 2 if device == "cpu" else ["cuda:0", "cuda:1"])
    assert [count for _, _, count in outcomes] == [2.0, 2.0]
