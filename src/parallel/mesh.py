"""How the training ranks of a job split into dp x sp: process groups, and what DeepSpeed must know of them.

    rank = dp_rank * sp_degree + sp_rank         neighbours share sequences, so these groups lie inside a node

DeepSpeed is told by a duck-typed Megatron `mpu`. The alternatives give wrong gradients: told nothing, it averages over
all ranks (the step is 1 / sp of the right one), and with `mesh_param=(dp, sp)` the replicas drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from src.core.types import Snapshot


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank. Its methods are those that DeepSpeed asks of an `mpu`."""

    snapshot: Snapshot
    world: ProcessGroup
    sequence: ProcessGroup
    """The ranks that share this rank's sequences."""
    data: ProcessGroup
    """The ranks that hold this rank's part of other sequences."""
    alone: ProcessGroup
    objects: ProcessGroup
    """All ranks, on the CPU: for what is not a tensor."""

    @classmethod
    def build(cls, *, sp_degree: int, timeout_s: float) -> Mesh:
        """Called by all ranks at once, when the default group is up."""
        rank, world = dist.get_rank(), dist.get_world_size()
        snapshot = Snapshot(rank=rank, world=world, sp_degree=sp_degree)
        ranks = list(range(world))
        sequences = [ranks[first : first + sp_degree] for first in range(0, world, sp_degree)]
        columns = [ranks[place::sp_degree] for place in range(sp_degree)]
        timeout = timedelta(seconds=timeout_s)

        def own(groups: list[list[int]], backend: str | None = None) -> ProcessGroup:
            """Every rank takes part in making every group, its own or not."""
            made = [dist.new_group(group, timeout=timeout, backend=backend) for group in groups]
            (mine,) = (handle for group, handle in zip(groups, made, strict=True) if rank in group)
            assert isinstance(mine, ProcessGroup)
            return mine

        return cls(
            snapshot=snapshot,
            world=own([ranks]),
            sequence=own(sequences),
            data=own(columns),
            alone=own([[each] for each in ranks]),
            objects=own([ranks], backend="gloo"),
        )

    def get_sequence_parallel_group(self) -> ProcessGroup:
        return self.sequence

    def get_sequence_parallel_world_size(self) -> int:
        return self.snapshot.sp_degree

    def get_sequence_parallel_rank(self) -> int:
        return self.snapshot.rank % self.snapshot.sp_degree

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        return self.world

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.snapshot.world

    def get_sequence_data_parallel_rank(self) -> int:
        return self.snapshot.rank

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return self.snapshot.dp

    def get_data_parallel_rank(self) -> int:
        return self.snapshot.dp_rank

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    def get_tensor_model_parallel_rank(self) -> int:
        return 0
