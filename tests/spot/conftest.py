"""One real fleet for all tests of this folder that need Ray: it takes seconds to start."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from src.core.events import read_jsonl
from src.core.types import PolicyVersion
from src.spot.coordinator import Coordinator
from src.spot.scheduler import Scheduler
from tests.spot.fakes import FakeEngine, saves

BATCH_SIZE = 4
LEASE_S = 0.2
"""What a fake worker takes for a lease."""
HEARTBEAT_TIMEOUT_S = 2.0


def make_coordinator(folder: Path, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> Coordinator:
    return Coordinator(run="run", folder=folder, scheduler=Scheduler(heartbeat_timeout_s=heartbeat_timeout_s))


make_engine = partial(FakeEngine, batch_size=BATCH_SIZE, lease_s=LEASE_S)


def until(found: Callable[[], Any], *, within_s: float, what: str) -> Any:
    """Waits for something to be found, and returns it."""
    deadline_s = time.monotonic() + within_s
    while not (result := found()):
        assert time.monotonic() < deadline_s, f"{what} not within {within_s} s"
        time.sleep(0.02)
    return result


class Run:
    """A started fleet of two spot workers, and the rank's view of it from this process."""

    def __init__(self, folder: Path, fleet: Any, cluster: Any, engine: FakeEngine) -> None:
        self.folder, self.fleet, self.cluster, self._engine = folder, fleet, cluster, engine
        self._iterations = itertools.count()

    def publish(self) -> PolicyVersion:
        """The next policy, in the trainer's engine too."""
        version = PolicyVersion(0, next(self._iterations))
        self._engine.weights = f"w{version}"
        self.cluster.publish(version, saves(self._engine.weights))
        return version

    def events(self, kind: str, **fields: Any) -> list[dict]:
        """Events of a kind with these fields, oldest first."""
        rows = read_jsonl(self.folder / "events.jsonl")
        return [e for e in rows if e["kind"] == kind and all(e.get(f) == v for f, v in fields.items())]

    def pids(self) -> dict[str, int]:
        """Processes of the live spot workers."""
        joined = {e["worker"]: e["pid"] for e in self.events("worker_joined", role="spot")}
        for event in self.events("worker_lost"):
            joined.pop(event["worker"], None)
        return joined

    def both_workers(self) -> dict[str, int]:
        until(lambda: len(self.pids()) == 2, within_s=20, what="two spot workers")
        return self.pids()

    def busy_worker(self) -> tuple[str, int]:
        """A spot worker that has just begun a lease."""

        def find():
            pids = self.pids()
            granted = [e["worker"] for e in self.events("lease_granted") if e["worker"] in pids]
            done = [e["worker"] for e in self.events("lease_done")]
            busy = [worker for worker in pids if granted.count(worker) > done.count(worker)]
            return busy and (busy[0], pids[busy[0]])

        return until(find, within_s=20, what="a busy worker")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    from src.spot.client import RayCluster
    from src.spot.fleet import Fleet

    folder = tmp_path_factory.mktemp("run")
    engine = make_engine()
    fleet = Fleet(
        coordinator=partial(make_coordinator, folder),
        engine=make_engine,
        spot_workers=2,
    )
    with fleet:
        fleet.start()
        yield Run(folder, fleet, RayCluster(fleet.host, engine=engine), engine)


@pytest.fixture
def thaw():
    """Remembers stopped processes, so that none stays stopped after a failed test."""
    stopped: list[int] = []
    yield stopped
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
