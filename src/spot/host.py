"""The coordinator as a Ray actor: adds waiting to its plain calls, and nothing else."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from src.core.clock import monotonic_s
from src.core.protocols import GroupLost
from src.core.types import (
    Commit,
    Exploration,
    Generation,
    Lease,
    PolicyVersion,
    RequestKey,
    SampleRequest,
    SampleResult,
    WorkReport,
)
from src.spot.coordinator import Coordinator
from src.spot.deaths import ProcessId, on_death
from src.spot.members import Introduction, Joined, Lost
from src.spot.run_log import News
from src.spot.transfer import Shelf

_TICK_S = 0.25


class Host:
    """An async actor: its methods run interleaved in one thread, so the coordinator needs no lock.

    Methods that wait look again whenever something has changed. Whatever is handed out goes by value: an
    object in Ray's store would die with the process that put it there.
    """

    _coordinator: Coordinator

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._shelf = Shelf()
        self._latest: tuple[int, asyncio.Task[Any]] | None = None

    async def begin(self, coordinator: Callable[[], Coordinator]) -> None:
        """Makes the coordinator. To be called first; raises what making it raises."""
        self._coordinator = coordinator()

    async def run(self) -> None:
        """Lets time pass. Never returns: the call fails when this process does, and tells who waits for it."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._coordinator.tick():
                self._wake()
            self._regroup()

    async def pid(self) -> int:
        return os.getpid()

    async def introduce(self) -> Introduction:
        return self._coordinator.introduce()

    # Workers

    async def join(self, joined: Joined) -> Introduction:
        introduction = self._coordinator.join(joined)
        self._wake()
        return introduction

    async def leave(self, worker: str, reason: str) -> bool:
        was_member = self._coordinator.leave(worker, reason)
        self._wake()
        self._regroup()
        return was_member

    async def heartbeat(self, worker: str) -> None:
        self._coordinator.heartbeat(worker)

    async def pull(self, worker: str) -> Lease | None:
        """Waits for a lease; None if the worker is no member any more, or under notice, or its team changes."""
        coordinator = self._coordinator
        if not coordinator.teams.is_changing(worker) and coordinator.pull(worker):
            await self._until(
                lambda: (
                    worker in coordinator.granted
                    or not coordinator.is_wanted(worker)
                    or coordinator.teams.is_changing(worker)
                )
            )
            coordinator.withdraw(worker)
        return coordinator.granted.pop(worker, None)

    async def stand_down(self, worker: str) -> None:
        self._coordinator.stand_down(worker)
        self._wake()

    async def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        """The files of a published policy; see `transfer.Shelf`."""
        return self._shelf.files(self._coordinator.introduce().weights_root, version)

    async def expect(self, worker: str, within_s: float) -> None:
        self._coordinator.expect(worker, within_s)

    async def staff(self, workers: int) -> None:
        self._coordinator.staff(workers)
        self._wake()

    async def notice(self, worker: str, grace_s: float) -> None:
        self._coordinator.notice(worker, grace_s)
        self._wake()

    async def commit(self, worker: str, lease: int, step: int, commits: Sequence[Commit]) -> bool:
        return self._coordinator.commit(worker, lease, step, commits)

    async def push(self, worker: str, lease: int, results: Sequence[SampleResult], report: WorkReport) -> None:
        self._coordinator.push(worker, lease, results, report)
        self._wake()

    # Elastic groups

    async def watch(self, member: str, process: ProcessId) -> None:
        """The others of the member's team hear at once when this process ends, if it is one of this machine."""
        on_death(process, partial(self._died, member))

    def _died(self, member: str) -> None:
        self._coordinator.died(member)
        self._wake()
        self._regroup()

    async def next_generation(self, team: str, member: str, after: int) -> Generation | None:
        """See `core.protocols.Team.next`."""
        teams = self._coordinator.teams
        self._coordinator.enlist(team, member)
        self._wake()  # whoever waits for a lease may have to leave its group for this one
        self._regroup()
        await self._until(lambda: teams.generation(member, after) is not None or teams.is_out(member))
        generation = teams.generation(member, after)
        if generation is not None:
            teams.entered(member, generation.number)
        return generation

    async def broken(self, member: str, generation: int) -> None:
        self._coordinator.broken(member, generation)
        self._wake()
        self._regroup()

    async def boundary(self, member: str, generation: int, admits: bool = True) -> bool:
        leave = self._coordinator.boundary(member, generation, admits=admits)
        self._regroup()
        return leave

    async def once(self, number: int, method: str, arguments: Sequence[Any]) -> Any:
        """Makes call number `number` of training ranks that may die while it lasts: who takes over the place of the one
        that made it makes it again, and gets its answer.

        Raises:
            ValueError: a later call was made: the caller is one of the past.
        """
        latest = -1 if self._latest is None else self._latest[0]
        if number < latest:
            raise ValueError(f"call {number} comes after call {latest}")
        if number > latest:
            self._latest = number, asyncio.ensure_future(getattr(self, method)(*arguments))
        assert self._latest is not None
        return await asyncio.shield(self._latest[1])

    def _regroup(self) -> None:
        """Forms generations, now and when those are due that wait for reports."""
        if self._coordinator.regroup():
            self._wake()
        due_s = self._coordinator.teams.due_s
        if due_s < math.inf:
            asyncio.get_running_loop().call_later(max(0.0, due_s - self._coordinator.now()), self._regroup)

    # The trainer

    async def work(self, worker: str, keys: Sequence[RequestKey]) -> Lease | None:
        """Waits for a lease, or (None) until all keys have their results.

        Raises:
            GroupLost: the training ranks change. A rank whose own group is intact would see it when all is made, and
                be given up until then.
        """
        coordinator, teams = self._coordinator, self._coordinator.teams
        coordinator.pull(worker)
        await self._until(
            lambda: worker in coordinator.granted or coordinator.complete(keys) or teams.is_broken(worker)
        )
        coordinator.withdraw(worker)
        lease = coordinator.granted.pop(worker, None)
        if lease is None and not coordinator.complete(keys):
            raise GroupLost("an error has ended the generation of this rank")
        return lease

    async def publish(
        self, version: PolicyVersion, checksum: str, size_bytes: int, publish_s: float
    ) -> list[PolicyVersion]:
        old = self._coordinator.publish(version, checksum, size_bytes, publish_s)
        self._shelf.drop(old)
        return old

    async def submit(self, requests: Sequence[SampleRequest], behind_rollouts: bool = False) -> None:
        self._coordinator.submit(requests, behind_rollouts=behind_rollouts)
        self._wake()

    async def close(self, keys: Sequence[RequestKey], wait_s: float) -> list[SampleResult]:
        """Waits at most `wait_s` seconds for the keys' results, hands out those that came, forgets the rest. Waits no
        longer than there is a spot worker, or one to come."""
        coordinator = self._coordinator
        await self._until(lambda: coordinator.complete(keys) or coordinator.is_forsaken, wait_s)
        if wait_s > 0 and coordinator.is_forsaken:
            coordinator.give_up(keys)
        return coordinator.close(keys)

    async def open_exploration(self, exploration: Exploration, behind_rollouts: bool) -> None:
        self._coordinator.open_exploration(exploration, behind_rollouts=behind_rollouts)
        self._wake()

    async def close_exploration(self, wait_s: float) -> list[SampleResult]:
        """Waits at most `wait_s` seconds for all that the planner asked for; see `close`."""
        coordinator = self._coordinator
        await self._until(lambda: coordinator.complete(coordinator.explores) or coordinator.is_forsaken, wait_s)
        if wait_s > 0 and coordinator.is_forsaken:
            coordinator.give_up(coordinator.explores)
        results = coordinator.close_exploration()
        self._wake()
        return results

    async def planner_state(self) -> Mapping[str, Any]:
        return self._coordinator.planner_state()

    async def restore_planner(self, state: Mapping[str, Any]) -> None:
        self._coordinator.restore_planner(state)

    async def workers(self) -> int:
        return self._coordinator.workers()

    async def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._coordinator.record(kind, **fields)
        self._wake()

    async def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._coordinator.log.log_metrics(step, metrics)
        self._wake()

    async def should_stop(self) -> bool:
        return self._coordinator.stop_requested

    # The parent process

    async def stop(self, signal: str) -> None:
        self._coordinator.stop(signal)
        self._wake()

    async def news(self, cursor: int, wait_s: float) -> News:
        """What was logged since `cursor`; waits at most `wait_s` seconds for something."""
        await self._until(lambda: self._coordinator.log.has_news(cursor), wait_s)
        return self._coordinator.log.news(cursor)

    async def losses(self) -> list[Lost]:
        """Waits for the next losses of workers."""
        lost = self._coordinator.lost
        await self._until(lambda: bool(lost))
        return [lost.popleft() for _ in range(len(lost))]

    # Waiting

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, ready: Callable[[], bool], wait_s: float = float("inf")) -> None:
        """Returns when `ready()` is true, or after `wait_s` seconds."""
        deadline_s = monotonic_s() + wait_s
        while not ready():
            left_s = deadline_s - monotonic_s()
            if left_s <= 0:
                return
            try:
                await asyncio.wait_for(self._changed.wait(), min(left_s, 3600.0))
            except TimeoutError:
                continue
