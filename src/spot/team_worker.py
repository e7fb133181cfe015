"""A worker whose process shares sequences with the others of its team, for as long as these are there.

    generation    the coordinator says who is in it (`core.protocols.Team`); the engine meets the others
    leader        its first member: joins the queue as one worker with as many GPUs as members, serves, and tells the
                  others what to denoise
    follower      everybody else: no member of the queue, denoises what it is told

A generation ends between two steps, when somebody comes or has notice: the leader hears of it with its next commit, or
while it waits for work; it commits, gives its lease back, and releases the others. Or it ends in the middle of a
collective, when somebody dies: all notice by themselves, a leader gives its lease back, and whoever gets it goes on
from the last commits. Either way every member asks for the next generation with its model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from src.core.folders import FolderError
from src.core.protocols import GroupLost, Team, TeamEngine
from src.core.types import NO_WORK, Generation, Lease, Member, PolicyVersion
from src.spot import weights
from src.spot.members import Introduction
from src.spot.notices import NoticeSource
from src.spot.worker import Transport, Worker


class TeamTransport(Transport, Protocol):
    """A team worker's way to the coordinator."""

    def introduce(self) -> Introduction:
        """What is to be known before a generation is there."""

    def pull(
        self, worker: str, *, meanwhile: Callable[[], None] | None = None, every_s: float | None = None
    ) -> Lease | None:
        """Waits for a lease, and calls `meanwhile` every so often; None if the team changes."""

    def stand_down(self, worker: str) -> None:
        """The worker is no member of the queue any more; its lease goes to others."""


class TeamWorker(Worker):
    """See the top of this module.

    Args:
        name: of the team.
        team: who decides about it.
        commit_every, notices, held: see `Worker`.
    """

    def __init__(
        self,
        *,
        name: str,
        member: Member,
        engine: TeamEngine,
        transport: TeamTransport,
        team: Team,
        commit_every: int = 0,
        notices: Sequence[NoticeSource] = (),
        held: PolicyVersion | None = None,
    ) -> None:
        super().__init__(
            member=member,
            engine=engine,
            transport=transport,
            commit_every=commit_every,
            notices=notices,
            held=held,
        )
        self._alone = member
        self._team_name = name
        self._team = team
        self._shared = engine
        self._queue = transport

    def run(self) -> None:
        """Takes part in generations until there is none with this process.

        Raises what the engine raises, GroupLost apart.
        """
        introduction = self._queue.introduce()
        self._learn(introduction)
        assert introduction.store_port is not None, "teams need a store"
        with self._watching():
            self._catch_up()
            number = 0
            while (generation := self._team.next(number)) is not None:
                number = generation.number
                try:
                    self._take_part(generation, introduction.store_port)
                except GroupLost:
                    self._team.broken(number)

    def _catch_up(self) -> None:
        """Loads the newest policy before this process asks to be let in, so that the others need not wait for it."""
        published = weights.versions(self._weights_root)
        if published:
            with suppress(FolderError):  # it was retired meanwhile
                self._hold(published[-1])

    def _take_part(self, generation: Generation, store_port: int) -> None:
        """Serves or follows until the generation ends. Raises GroupLost if it ends in an error."""
        rank = generation.members.index(self.name)
        try:
            self._shared.form(
                self._team_name,
                generation,
                rank,
                store_port=store_port,
                is_over=lambda: self._team.boundary(generation.number, admits=False),
            )
            if rank == 0:
                self._lead(generation)
            else:
                self._shared.follow(self._hold)
        finally:
            self._shared.drop()

    def _lead(self, generation: Generation) -> None:
        self._member = replace(self._alone, gpus=len(generation.members))
        self.join()
        try:
            self._serve_until_boundary(generation.number)
        except GroupLost:
            self._queue.stand_down(self.name)
            raise
        self._queue.stand_down(self.name)  # after any other error this process is lost, as a member

    def _serve_until_boundary(self, number: int) -> None:
        every_s = self._shared.patience_s / 4
        while True:
            lease = None
            if not self._noticed.is_set():
                lease = self._queue.pull(self.name, meanwhile=self._shared.remind, every_s=every_s)
            if lease is not None:
                self.serve(lease)
            elif self._team.boundary(number):
                self._shared.release()
                return

    def serve(self, lease: Lease) -> None:
        try:
            super().serve(lease)
        except GroupLost:
            self._queue.push(self.name, lease.id, (), NO_WORK)
            raise

    def _prepare(self, lease: Lease) -> None:
        self._shared.announce(lease.requests, resume=lease.resume)  # first: all members load at the same time
        super()._prepare(lease)
