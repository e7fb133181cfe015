"""How the training ranks of a job split into dp x sp: process groups, and what DeepSpeed must know of them.

    rank = dp_rank * sp_degree + sp_rank         neighbours share sequences, so these groups lie inside a node

DeepSpeed is told by a duck-typed Megatron `mpu`. The alternatives give wrong gradients: told nothing, it averages over
all ranks (the step is 1 / sp of the right one), and with `mesh_param=(dp, sp)` the replicas drift apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

from src.core.types import Snapshot
from src.parallel.group import connect_store, serve_store

T = TypeVar("T")


class Shared(Protocol):
    """What every rank holds a copy of, and an operation changes: weights and optimizer."""

    def give(self) -> Any:
        """All of it."""

    def take(self, given: Any) -> None:
        """Makes it equal to what another rank `give`s."""

    def checksum(self) -> str:
        """Equal where all of it is."""


class World(Protocol):
    """The training ranks at this moment. Whatever they do together is an operation, and runs through here."""

    is_elastic: bool
    """Whether ranks may come and go between any two operations, and in the middle of one."""

    @property
    def mesh(self) -> Mesh:
        """Their groups. To be asked anew in every operation."""

    def run(self, operation: Callable[[], T], *, changes: Shared | None = None) -> T:
        """Runs an operation, which all ranks call in the same order. One that is called by another is a part of it.

        Args:
            operation: may be called again, on another mesh, when ranks come or go while it runs.
            changes: what it changes, at its end and without waiting for other ranks any more.
        """

    def on_change(self, follow: Callable[[Mesh], None]) -> None:
        """Has `follow` called with each later mesh, before anything uses it."""

    def share(self, shared: Shared) -> None:
        """Has it compared whenever the ranks have changed."""


class FixedWorld:
    """Ranks that are the same from beginning to end."""

    is_elastic = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def run(self, operation: Callable[[], T], *, changes: Shared | None = None) -> T:
        return operation()

    def on_change(self, follow: Callable[[Mesh], None]) -> None:
        """There is no later mesh."""

    def share(self, shared: Shared) -> None:
        """It is never compared."""


def start_mesh(*, sp_degree: int, device: str, timeout_s: float) -> Mesh:
    """Brings up the default group and the mesh. Called by all ranks at once.

    Place and meeting point come from the environment, as our launcher sets them: RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT. The store lives in rank 0, so its death ends the job; it listens on MASTER_ADDR alone,
    where torch's own (`env://`) would listen on every interface.

    Args:
        sp_degree: ranks that share a sequence.
        device: cpu (gloo) or cuda (NCCL); from now on this rank's `cuda` is the GPU with its local number.
        timeout_s: how long a collective may take. Ranks wait for one another while samples are made.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    meet = serve_store if rank == 0 else connect_store
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=meet(address, port, timeout_s=timeout_s),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return Mesh.build(sp_degree=sp_degree, device=device, timeout_s=timeout_s)


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank. Its methods are those that DeepSpeed asks of an `mpu`."""

    snapshot: Snapshot
    device: torch.device
    """Kind of device of all ranks."""
    world: ProcessGroup
    sequence: ProcessGroup
    """The ranks that share this rank's sequences."""
    data: ProcessGroup
    """The ranks that hold this rank's part of other sequences."""
    alone: ProcessGroup
    world_objects: ProcessGroup
    sequence_objects: ProcessGroup
    """The same as `world` and `sequence`, on the CPU: for what is not a tensor."""

    @classmethod
    def build(cls, *, sp_degree: int, device: str, timeout_s: float, generation: int = 0) -> Mesh:
        """Called by all ranks at once, when the default group is up."""
        rank, world = dist.get_rank(), dist.get_world_size()
        snapshot = Snapshot(generation, rank, world, sp_degree)
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
            device=torch.device(device),
            world=own([ranks]),
            sequence=own(sequences),
            data=own(columns),
            alone=own([[each] for each in ranks]),
            world_objects=own([ranks], backend="gloo"),
            sequence_objects=own(sequences, backend="gloo"),
        )

    def set_timeout(self, timeout_s: float) -> None:
        """How long a collective may take from now on."""
        own = (self.world, self.sequence, self.data, self.alone, self.world_objects, self.sequence_objects)
        groups = (None, *own)  # None: the default group, in which DeepSpeed's checkpoints have their barriers
        for group in groups:
            _set_pg_timeout(timedelta(seconds=timeout_s), group)

    @property
    def leads_sequence(self) -> bool:
        """Whether this rank speaks for those that share its sequences."""
        return self.get_sequence_parallel_rank() == 0

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
