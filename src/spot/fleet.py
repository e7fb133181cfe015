"""The parent process's side: starts Ray, coordinator and spot workers, and replaces workers that are lost.

with Fleet(...) as fleet:            # from here on, processes that are started belong to the job
    rank = subprocess.Popen(...)     # loads its model while Ray starts
    address = fleet.start()          # tell it the rank: it connects by client.RayCluster.connect(address)
    while rank.poll() is None:
        news = fleet.news(cursor, wait_s=0.5)
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from src.core.protocols import Engine
from src.core.types import Member
from src.spot import session
from src.spot.client import RayTransport, call
from src.spot.coordinator import Coordinator, CoordinatorLost, Lost, News
from src.spot.host import Host
from src.spot.session import ray
from src.spot.worker import Worker, give_way

log = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Workers in one slot that may fail by themselves, one after the other, before it is left empty."""


@dataclass(frozen=True)
class WorkerSettings:
    """How a spot worker's process runs.

    `niceness` puts it behind the trainer on shared cores; `cpus` pins it; `threads` is for OpenMP and its
    like.
    """

    niceness: int = 10
    cpus: tuple[int, ...] = ()
    threads: int = 1
    heartbeat_s: float = 2.0


class SpotProcess:
    """The actor around a worker: one process."""

    def run(self, member: Member, engine: Callable[[], Engine], host: Any, settings: WorkerSettings) -> None:
        give_way(niceness=settings.niceness, cpus=settings.cpus)
        worker = Worker(
            member=member,
            engine=engine(),
            transport=RayTransport(host),
            heartbeat_s=settings.heartbeat_s,
        )
        worker.run()


@dataclass
class _Slot:
    """A place for a spot worker, the one that is in it now, and how many before it failed in a row."""

    member: Member
    actor: Any
    failures: int
    frozen: bool = False


class Fleet:
    """Everything that the job runs beside its training ranks.

    Args:
        coordinator: makes the coordinator in its own process (picklable).
        engine: makes a worker's engine in its own process (picklable).
        spot_workers: how many to keep; 0 is fine.
        settings: how each runs.
        respawn: whether a lost worker is replaced.
        object_store_bytes: shared memory through which large results pass.
    """

    def __init__(
        self,
        *,
        coordinator: Callable[[], Coordinator],
        engine: Callable[[], Engine],
        spot_workers: int,
        settings: WorkerSettings = WorkerSettings(),
        respawn: bool = True,
        object_store_bytes: int = 256 * 2**20,
    ) -> None:
        if spot_workers < 0:
            raise ValueError(f"spot_workers must not be negative, got {spot_workers}")
        self._make_coordinator = coordinator
        self._make_engine = engine
        self._settings = settings
        self._spot_workers = spot_workers
        self._respawn = respawn
        self._object_store_bytes = object_store_bytes
        self._slots: dict[Any, _Slot] = {}  # by the reference that resolves when the worker has ended
        self._ending = threading.Event()
        self._coordinator_lost = threading.Event()
        self._resources = ExitStack()
        self.host: Any = None
        """The coordinator's actor, once started."""
        self.scratch = Path()
        """The job's own folder; its name marks the job's processes (see `reaper`)."""
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Fleet:
        """Lets what is started from now on belong to the job, and arms the reaper."""
        self.scratch = Path(tempfile.mkdtemp(prefix="spotlight-")).resolve()
        variables = session.environment(self.scratch)
        outside = {**os.environ, "PYTHONPATH": variables["PYTHONPATH"]}
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "src.spot.reaper", str(self.scratch)],
            stdin=subprocess.PIPE,
            env=outside,
            start_new_session=True,
        )
        self._resources.enter_context(session.environ(variables))
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def start(self) -> str:
        """Starts Ray and the coordinator, which takes seconds; the workers then start on their own.

        Returns the address at which training ranks connect.
        """
        threads = str(self._settings.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        with session.environ(dict.fromkeys(names, threads)):
            address = session.start(self.scratch, object_store_bytes=self._object_store_bytes)
        host = ray.remote(Host).options(name=session.COORDINATOR, num_cpus=0, max_restarts=0)
        self.host = host.remote()
        call(self.host.begin, self._make_coordinator)
        self._alive = self.host.run.remote()
        self._losses = self.host.losses.remote()
        for slot in range(self._spot_workers):
            self._spawn(Member("local", slot))
        self._watcher = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._watcher.start()
        return address

    def news(self, cursor: int, wait_s: float) -> News:
        """Events and metrics since `cursor`; waits at most `wait_s` seconds for some."""
        self.check()
        news: News = call(self.host.news, cursor, wait_s)
        return news

    def stop(self, reason: str) -> None:
        """Asks the training ranks to finish and save."""
        call(self.host.stop, reason)

    def record(self, kind: str, **fields: Any) -> None:
        """Appends one event to the run's event log."""
        call(self.host.record, kind, fields)

    def check(self) -> None:
        """Raises CoordinatorLost if the coordinator has died."""
        if self._coordinator_lost.is_set():
            raise CoordinatorLost

    def shutdown(self) -> None:
        """Ends every process of the job, also those that others started since `__enter__`, and cleans up."""
        self._ending.set()
        if self._watcher is not None:
            self._watcher.join()
        ray.shutdown()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()
        self._resources.close()

    def _spawn(self, member: Member, failures: int = 0) -> None:
        actor = ray.remote(SpotProcess).options(num_cpus=0, max_restarts=0).remote()
        ended = actor.run.remote(member, self._make_engine, self.host, self._settings)
        self._slots[ended] = _Slot(member, actor, failures)

    def _watch(self) -> None:
        """Waits for workers and coordinator to end, and deals with it."""
        try:
            while not self._ending.is_set():
                done, _ = ray.wait([self._alive, self._losses, *self._slots], timeout=0.2)
                for reference in done:
                    if reference in self._slots:
                        self._replace(self._slots.pop(reference), reference)
                    else:
                        self._kill_frozen(ray.get(reference))
                        self._losses = self.host.losses.remote()
        except (ray.exceptions.RayActorError, CoordinatorLost):
            self._coordinator_lost.set()
        except ray.exceptions.RayError:
            log.exception("the coordinator failed")
            ray.kill(self.host)  # so that the ranks see it, too
            self._coordinator_lost.set()

    def _kill_frozen(self, losses: Sequence[Lost]) -> None:
        frozen = {lost.worker: lost.pid for lost in losses if lost.reason == "frozen"}
        for slot in self._slots.values():
            if slot.member.name in frozen:
                slot.frozen = True
                with suppress(ProcessLookupError):
                    os.kill(frozen[slot.member.name], signal.SIGKILL)

    def _replace(self, slot: _Slot, ended: Any) -> None:
        """Reports a worker that has ended and starts the next one in its place."""
        reason, error = _outcome(ended)
        member = slot.member
        served = call(self.host.leave, member.name, reason) or slot.frozen
        ray.kill(slot.actor)
        failures = 0 if served and error is None else slot.failures + 1
        if error is not None:
            log.warning("spot worker %s failed: %s", member.name, error)
            self.record("worker_failed", worker=member.name, error=error)
        if failures >= _MAX_FAILURES:
            log.error("%d spot workers failed in a row in slot %d: it stays empty", failures, member.slot)
        elif self._respawn:
            self._spawn(replace(member, incarnation=member.incarnation + 1), failures)


def _outcome(ended: Any) -> tuple[str, str | None]:
    """How a worker ended, as the event log says it, and its error if it failed by itself."""
    try:
        ray.get(ended)
    except ray.exceptions.RayActorError:
        return "killed", None
    except Exception as error:  # whatever its engine raised, brought here by Ray
        return "failed", str(error).strip().splitlines()[-1]
    return "left", None
