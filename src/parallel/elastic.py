"""Training ranks that may die, freeze or leave at any moment, and come back between two iterations.

All ranks run the same program, and whatever they do together is a numbered operation (`ElasticWorld.run`). An operation
ends with a barrier, so no rank is more than one operation ahead of another. When a collective fails, the survivors cut
all connections at once (which wakes up the others), report, wait for the next generation, form its groups and compare:

    nobody has done the operation     all run it again, with the new groups
    somebody has                      he gives its result, and the weights and moments that it changed, to the others
    all have                          they go on

So nothing has to be undone: an operation changes what ranks share at its very end, when it waits for no one any more.
A rank that has done it got there with every other rank's contribution, even if some died right after.

Who joins waits for a boundary between two iterations (`boundary`): then all leave their groups and form new ones with
it, and the first rank writes down its state, which the newcomer reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from src.core.clock import monotonic_s, sleep_s
from src.core.protocols import Team
from src.core.types import Generation
from src.parallel.group import LOOK_S
from src.parallel.mesh import Mesh, Shared
from src.parallel.plan import training_degree
from src.parallel.wires import Wires

T = TypeVar("T")

log = logging.getLogger(__name__)

_FORM_TIMEOUT_S = 20.0
"""How long ranks that are all there may take to form groups; after `_CONNECT_S` they try again, with twice as long."""
_CONNECT_S = 2.5
"""How long they may take at first: whoever dies in the middle of it is noticed by nothing else."""
_PATIENCE = 3
"""A rank that was the first to fail more often than that, while nobody died, is the cause itself: its error is raised.
The others then go on without it."""


class Left(Exception):
    """This rank belongs to the training ranks no more: it was told to leave, or was taken for dead."""


class StateLost(Exception):
    """Nobody is left who knows how far the training was, or those who are do not agree."""


class _Boundary(Exception):
    """All leave their groups now, to form new ones with those who join and without those who leave."""


@dataclass(frozen=True)
class Recovery:
    """How long it took until the ranks went on, in seconds since this rank saw the error or the boundary."""

    generation: int
    operation: int
    """That was interrupted, or the first afterwards."""
    world: int
    sp_degree: int
    form_s: float
    """Until the groups of this generation were there."""
    engine_s: float
    """Of that: what followed the mesh, such as DeepSpeed's engine, was made anew."""
    resume_s: float
    """Until the operation was done."""
    checksum: str
    """Of what the ranks share, before the operation was run again; equal on all of them."""


class ElasticWorld:
    """The training ranks at this moment (a `mesh.World`).

    Args:
        team: decides who belongs to a generation. One in which this process is has to come.
        member: name of this process in it.
        store: through which groups form; it outlives every rank.
        sp_degree: ranks that share a sequence, if there are enough; see `plan.training_degree`.
        device, timeout_s: see `mesh.start_mesh`.
        joins: whether this process knows nothing of the training yet, and gets it at a boundary.
        report: told by the first rank how a recovery went.
    """

    is_elastic = True

    def __init__(
        self,
        *,
        team: Team,
        member: str,
        store: Store,
        sp_degree: int,
        device: str,
        timeout_s: float,
        joins: bool = False,
        report: Callable[[Recovery], None] = lambda recovery: None,
    ) -> None:
        self._team = team
        self._member = member
        self._store = store
        self._sp_degree = sp_degree
        self._device = device
        self._timeout_s = timeout_s
        self._report = report
        self._followers: list[Callable[[Mesh], None]] = []
        self._generation = Generation(-1, ())
        self._mesh: Mesh | None = None
        self._wires: Wires | None = None
        self._shared: Shared | None = None
        self.number = 0
        """Of the operation in hand, the same on all ranks."""
        self._done = 0  # operations that are done here: `number`, or one less
        self._done_by_all = 0  # when the ranks last changed
        self._inside = False
        self._knows = not joins
        self._unsettled = False  # the ranks have changed, and have not compared yet what the next operation is to do
        self._blamed = 0  # how often this rank was the first to fail, since an operation was done or somebody died
        self._broken_s: float | None = None  # when the recovery began that is not over yet
        self._form_s = self._engine_s = 0.0
        self._unformed = 0  # how many generations in a row had no groups
        self._checksum = ""

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("the ranks are between two generations")
        return self._mesh

    def on_change(self, follow: Callable[[Mesh], None]) -> None:
        self._followers.append(follow)

    def share(self, shared: Shared) -> None:
        self._shared = shared

    def enter(self) -> None:
        """Forms the first groups of this process. To be called once, before all else."""
        self._regroup(None)
        if self._knows:
            self._broken_s = None  # it was no recovery
        else:
            self.number = self._done = self._done_by_all

    # ---------------------------------------------------------------- operations

    def run(self, operation: Callable[[], T], *, changes: Shared | None = None) -> T:
        if self._inside:
            return operation()
        self._inside = True
        try:
            return self._run(operation, changes)
        finally:
            self._inside = False

    def _run(self, operation: Callable[[], T], changes: Shared | None) -> T:
        self.number += 1
        result: list[T] = []
        while True:
            try:
                if self._unsettled:
                    self._settle(result, changes)
                if not result:
                    result.append(operation())
                    self._done = self.number
                dist.barrier(self.mesh.world_objects)
                self._recovered()
                return result[0]
            except _Boundary:
                self._regroup(None)
            except torch.OutOfMemoryError:
                raise  # other ranks would not help
            except RuntimeError as error:  # torch raises nothing more exact
                if self._regroup(error):
                    return result[0]

    def boundary(self, save: Callable[[], str]) -> str | None:
        """An operation between two iterations: lets in who joins, and lets go who leaves.

        Args:
            save: writes down what a newcomer has to know, and returns where it is. Called on the first rank.

        Returns:
            where what a newcomer has to know is; None if there is none.
        """
        path = self.run(lambda: self._boundary(save))
        if path is not None:
            self._unsettled = True  # also where another rank gave the path
        return path

    def _boundary(self, save: Callable[[], str]) -> str | None:
        leader = self.mesh.snapshot.is_leader
        if all(self._gather(self._knows)):  # else nobody may leave before the others know
            if self._say(leader and self._team.boundary(self._generation.number)):
                raise _Boundary
            return None
        path = self._say(save() if leader else "")
        self._knows = True
        self._unsettled = True  # the next operation begins with a comparison with those who are new
        return path

    # ---------------------------------------------------------------- after a change

    def _settle(self, result: list[T], changes: Shared | None) -> None:
        """All ranks are before or in the same operation: whoever has done it gives its result to the others."""
        places = self._gather((self.number, bool(result)))
        if len({number for number, _ in places}) > 1:
            raise StateLost(f"ranks of generation {self._generation} are in different operations: {places}")
        done = [has for _, has in places]
        if any(done):
            giver = done.index(True)
            mine = self.mesh.snapshot.rank == giver
            box = [(result[0], changes.give() if changes else None, self._knows) if mine else None]
            dist.broadcast_object_list(box, group=self.mesh.world_objects, group_src=giver)
            if not result:
                assert box[0] is not None
                given, state, self._knows = box[0]
                if changes is not None:
                    changes.take(state)
                result.append(given)
                self._done = self.number
        sums = self._gather(self._shared.checksum() if self._shared else None)
        if len(known := {each for each in sums if each is not None}) > 1:
            raise StateLost(f"weights or optimizer differ between the ranks of generation {self._generation}: {known}")
        self._checksum = next(iter(known), "")
        self._unsettled = False

    def _regroup(self, error: RuntimeError | None) -> bool:
        """Forms the next generation; returns whether the operation in hand is done on all of its ranks.

        Raises:
            RuntimeError: `error`, if this rank is its cause.
        """
        if self._broken_s is None:
            self._broken_s = monotonic_s()
        while True:
            if error is not None:
                log.warning("generation %d is over: %s", self._generation.number, error)
                self._blamed += self._is_first_to_fail()
            self._drop()
            if error is not None:
                if self._blamed > _PATIENCE:
                    raise error
                self._team.broken(self._generation.number)
            generation = self._team.next(self._generation.number)
            if generation is None:
                raise Left
            if self._knows and self._member not in generation.members[: generation.stayed]:
                raise RuntimeError(f"the others went on without this rank, and know more by now: {generation}")
            if {*self._generation.members} - {*generation.members}:
                self._blamed = 0
            self._generation = generation
            try:
                self._form()
                self._unformed = 0
                done = [count for count in self._gather(self._done if self._knows else None) if count is not None]
                self.mesh.set_timeout(self._timeout_s)
                break
            except _Boundary:
                error = None
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as failure:
                error = failure
                self._unformed += 1
        if not done:
            raise StateLost(f"all ranks that knew how far the training was are gone in {generation}")
        self._done_by_all = min(done)
        self._unsettled = True
        return self._done_by_all >= self.number

    def _is_first_to_fail(self) -> bool:
        """To be asked before the others can see that this rank has failed."""
        first = self._store.compare_set(f"ranks/{self._generation.number}/failed", "", self._member)
        return bytes(first).decode() == self._member

    def _drop(self) -> None:
        """Leaves all groups, which the others see as an error in their collectives."""
        self._mesh = None
        if self._wires is not None:
            self._wires.cut()
        if dist.is_initialized():
            with suppress(RuntimeError):
                c10d._abort_process_group()

    def _form(self) -> None:
        """The groups of this generation, and all that depends on them.

        Raises:
            RuntimeError: a rank is lost.
            _Boundary: one was lost before all were there.
        """
        members, number = self._generation.members, self._generation.number
        self._arrive()
        rank, world = members.index(self._member), len(members)
        timeout_s = min(_FORM_TIMEOUT_S, _CONNECT_S * 2**self._unformed)
        self._store.set_timeout(timedelta(seconds=timeout_s))  # for the addresses of the others
        dist.init_process_group(
            "nccl" if self._device == "cuda" else "gloo",
            store=PrefixStore(f"ranks/{number}", self._store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        self._mesh = Mesh.build(
            sp_degree=training_degree(world, self._sp_degree),
            device=self._device,
            timeout_s=timeout_s,
            generation=number,
        )
        self._mesh.set_timeout(_FORM_TIMEOUT_S)
        self._store.set_timeout(timedelta(seconds=_FORM_TIMEOUT_S))  # NCCL asks it at each group's first collective
        self._wires = Wires(self._gather)
        formed_s = monotonic_s()
        for follow in self._followers:
            follow(self._mesh)
        assert self._broken_s is not None
        self._form_s, self._engine_s = formed_s - self._broken_s, monotonic_s() - formed_s

    def _arrive(self) -> None:
        """Waits until all members of the generation are here. A rank that is lost now is in no collective: nobody would
        see an error, so all ask."""
        number = self._generation.number
        here = [f"ranks/{number}/here/{member}" for member in self._generation.members]
        self._store.set(f"ranks/{number}/here/{self._member}", "")
        asked_s = monotonic_s()
        while not self._store.check(here):
            sleep_s(0.005)
            if monotonic_s() - asked_s > LOOK_S:
                asked_s = monotonic_s()
                if self._team.boundary(number, admits=False):
                    raise _Boundary

    def _recovered(self) -> None:
        """The first operation since the ranks changed is done."""
        if self._broken_s is None or self._unsettled:
            return
        recovery = Recovery(
            generation=self._generation.number,
            operation=self.number,
            world=self.mesh.snapshot.world,
            sp_degree=self.mesh.snapshot.sp_degree,
            form_s=self._form_s,
            engine_s=self._engine_s,
            resume_s=monotonic_s() - self._broken_s,
            checksum=self._checksum,
        )
        self._broken_s, self._blamed = None, 0
        log.warning("went on: %s", recovery)
        if self.mesh.snapshot.is_leader:
            self._report(recovery)

    # ---------------------------------------------------------------- small talk

    def _say(self, value: T) -> T:
        """What the first rank says, on all."""
        box = [value]
        dist.broadcast_object_list(box, group=self.mesh.world_objects, group_src=0)
        return box[0]

    def _gather(self, value: T) -> list[T]:
        """What each rank says, on all."""
        values = [value] * self.mesh.snapshot.world
        dist.all_gather_object(values, value, group=self.mesh.world_objects)
        return values
