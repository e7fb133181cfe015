"""The process of a spot worker: the Ray actor that it is, and the parent's handle on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from src.core.protocols import Engine, TeamEngine
from src.core.types import Member, PolicyVersion
from src.spot import weights
from src.spot.client import RayTeam, RayTransport
from src.spot.market import Notice
from src.spot.notices import NoticeSource, Polling, Signs, Sigterm
from src.spot.session import Place, ray
from src.spot.team_worker import TeamWorker
from src.spot.transfer import fetched
from src.spot.worker import Worker, give_way


@dataclass(frozen=True)
class WorkerSettings:
    """How a spot worker's process runs.

    `niceness` puts it behind the trainer on shared cores; `cpus` pins it; `threads` is for OpenMP and its like.
    """

    niceness: int = 10
    cpus: tuple[int, ...] = ()
    threads: int = 1
    commit_every: int = 0
    """Denoising steps from commit to commit; 0 commits at a notice only."""
    grace_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    signs: Callable[[], Signs] | None = None
    """Makes what the worker asks whether its node will be taken away (picklable), besides waiting for SIGTERM."""


DEFAULTS = WorkerSettings()


class SpotProcess:
    """First prepares, which takes seconds, then is one member of the fleet until that ends.

    If it waits in between, it keeps up with what is published, and has no weights to load when it is called.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._held: PolicyVersion | None = None

    def pid(self) -> int:
        return os.getpid()

    def prepare(self, engine: Callable[[], Engine], settings: WorkerSettings) -> None:
        """Imports and builds everything that a worker needs, then gives way to the trainer.

        Not the other way round: a worker that starts behind everybody else may not be there before the job is over.
        """
        try:
            self._engine = engine()
        finally:
            give_way(niceness=settings.niceness, cpus=settings.cpus)

    def catch_up(self, root: Path, policy: PolicyVersion) -> None:
        """Loads a published policy. If it cannot, this is left to whoever needs one."""
        if self._engine is not None:
            self._held = None
            with suppress(ValueError):  # it was retired meanwhile, or is damaged, as the worker will say
                weights.load(weights.find(root, policy), self._engine)
                self._held = policy

    def run(
        self,
        member: Member,
        team: str | None,
        host: Any,
        engine: Callable[[], Engine],
        settings: WorkerSettings,
        is_here: bool,
    ) -> Notice | None:
        """Serves as `member`, in a team or alone, until the worker is told to end; returns the notice that told it, if
        one did. Raises what the engine raises, also when it is built."""
        built = self._engine or engine()  # if `prepare` failed, this tells why
        with Sigterm(node=member.node, grace_s=settings.grace_s) as sigterm:
            notices: list[NoticeSource] = [sigterm]
            if settings.signs is not None:
                notices.append(Polling(signs=settings.signs(), node=member.node))
            transport = RayTransport(host)
            worker: Worker
            if team is None:
                worker = Worker(
                    member=member,
                    engine=built,
                    transport=transport,
                    fetch=None if is_here else partial(fetched, host),
                    commit_every=settings.commit_every,
                    notices=notices,
                    held=self._held,
                )
            else:
                worker = TeamWorker(
                    name=team,
                    member=member,
                    engine=cast(TeamEngine, built),
                    transport=transport,
                    team=RayTeam(host, team=team, member=member.name),
                    commit_every=settings.commit_every,
                    notices=notices,
                    held=self._held,
                )
            worker.run()
            return worker.notice


class Process:
    """A spot worker's process: it has built its engine, or is about to, and waits for somebody to be."""

    def __init__(self, engine: Callable[[], Engine], settings: WorkerSettings, place: Place) -> None:
        self._engine = engine
        self._settings = settings
        self._is_here = place.is_here
        self._actor = ray.remote(SpotProcess).options(num_cpus=0, max_restarts=0, **place.options).remote()
        self._pid = self._actor.pid.remote()
        self.prepared = self._actor.prepare.remote(engine, settings)
        """The reference that resolves when it has built its engine, or failed to."""
        self._newest: PolicyVersion | None = None
        self._caught_up: Any = None

    def catch_up(self, root: Path, policy: PolicyVersion) -> None:
        """While it waits to be called, has it load a published policy, unless it still loads the one before: so it may
        leave one out, but will be told of the newest again."""
        if policy != self._newest and self.is_ready and (self._newest is None or self.has_caught_up):
            self._newest = policy
            self._caught_up = self._actor.catch_up.remote(root, policy)

    def run(self, member: Member, team: str | None, host: Any) -> Any:
        """From now on it is that member. Returns the reference that resolves when it has ended."""
        return self._actor.run.remote(member, team, host, self._engine, self._settings, self._is_here)

    @property
    def is_ready(self) -> bool:
        return bool(ray.wait([self.prepared], timeout=0)[0])

    @property
    def has_caught_up(self) -> bool:
        """Whether it has loaded the newest policy that it was told of, or tried to."""
        return self._caught_up is not None and bool(ray.wait([self._caught_up], timeout=0)[0])

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process is there and on this machine: elsewhere its number is somebody else's."""
        if self._is_here and ray.wait([self._pid], timeout=0)[0]:
            with suppress(ProcessLookupError, ray.exceptions.RayActorError):
                os.kill(ray.get(self._pid), number)

    def kill(self) -> None:
        """Ends it at once, also if it is stopped or still starting."""
        self.send(signal.SIGKILL)
        ray.kill(self._actor)
