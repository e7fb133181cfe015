"""Attention over shared sequences equals that of DeepSpeed and of diffusers, where theirs exist (even lengths)."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from src.app.processes import free_port
from src.parallel.engine import prepare_deepspeed
from src.parallel.mesh import Mesh, start_mesh
from src.parallel.ulysses import SequenceGroup
from tests.parallel.ranks import Rank, RankPool, largest_difference

HEADS, PART = 6, 4
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def local(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def of_deepspeed(mesh: Mesh) -> Attention:
    deepspeed = prepare_deepspeed(torch.device("cpu"))
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    attention = DistributedAttention(local, mesh.sequence, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attention(q, k, v, 0)


def of_diffusers(mesh: Mesh) -> Attention:
    from diffusers.models.attention_dispatch import SeqAllToAllDim

    def attention(*qkv: Tensor) -> Tensor:
        whole = local(*(SeqAllToAllDim.apply(mesh.sequence, x.contiguous(), 2, 1) for x in qkv))
        output: Tensor = SeqAllToAllDim.apply(mesh.sequence, whole, 1, 2)
        return output

    return attention


ORACLES = {"deepspeed": of_deepspeed, "diffusers": of_diffusers}


def passes(attention: Attention, rank: int) -> list[Tensor]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(rank)
    qkv = [torch.randn(2, PART, HEADS, 8, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    output = attention(*qkv)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return [output.detach(), *(x.grad for x in qkv if x.grad is not None)]


def difference(rank: Rank, oracle: str, port: int) -> float:
    os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    mesh = start_mesh(sp_degree=rank.size, device="cpu", timeout_s=30.0)
    try:
        sequence = SequenceGroup(mesh.sequence)
        ours = passes(lambda *qkv: sequence.attention(*qkv, lengths=(PART * rank.size,)), rank.rank)
        theirs = passes(ORACLES[oracle](mesh), rank.rank)
        assert len(ours) == len(theirs) == 4
        return largest_difference(ours, theirs)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("oracle", ORACLES)
def test_attention_equals_the_oracle_s(ranks: RankPool, oracle: str, degree: int):
    assert max(ranks.run(difference, oracle, free_port(), size=degree)) < 1e-10
