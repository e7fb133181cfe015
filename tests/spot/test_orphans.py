"""After a job has ended, however it ended, no process of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src.core.events import read_jsonl
from src.spot.reaper import JOB_VARIABLE, members
from tests.spot.conftest import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


class Job:
    def __init__(self, folder: Path, engine: str) -> None:
        self._events = folder / "events.jsonl"
        command = [sys.executable, "-m", "tests.spot.job", str(folder), engine]
        self.parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ready, scratch = self.parent.stdout.readline().split()
        self.scratch = Path(scratch)
        assert ready == "ready"

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_jsonl(self._events) if event["kind"] == kind]

    def explores(self) -> bool:
        """Both spot workers are at work."""
        busy = {e["worker"] for e in self.events("lease_granted") if e["request_kind"] == "explore"}
        return len(busy) == 2

    def coordinator(self) -> int:
        """The process that has the event log open."""
        for pid in members(self.scratch):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if link.exists() and link.resolve() == self._events:
                    return pid
        raise AssertionError("no coordinator")

    def assert_gone(self, *, within_s: float) -> None:
        until(lambda: not list(members(self.scratch)), within_s=within_s, what="the end of all processes")


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(engine: str = "working") -> Job:
        jobs.append(Job(tmp_path.resolve(), engine))
        return jobs[-1]

    yield start
    for job in jobs:
        job.parent.kill()
        job.parent.wait()
        job.parent.stdout.close()
        job.assert_gone(within_s=10)


def test_a_killed_parent_leaves_nothing(start):
    job = start()
    until(job.explores, within_s=30, what="exploration")
    assert len(list(members(job.scratch))) >= 12  # parent, rank, coordinator, 2 workers, Ray's own 7
    job.parent.kill()
    job.assert_gone(within_s=10)


def test_a_killed_coordinator_ends_the_job_with_one_sentence(start):
    job = start()
    until(job.explores, within_s=30, what="exploration")
    os.kill(job.coordinator(), signal.SIGKILL)
    killed_s = time.monotonic()
    assert job.parent.stdout.readline().startswith("error: the coordinator died")
    assert time.monotonic() - killed_s < 2
    job.assert_gone(within_s=10)
    assert job.parent.wait(10) == 1


def test_a_job_whose_spot_workers_cannot_start_trains_without_them_and_ends(start):
    job = start("broken")
    assert job.parent.wait(60) == 0
    job.assert_gone(within_s=1)
    failed = job.events("worker_failed")
    assert {event["error"] for event in failed} == {"RuntimeError: no such model"}
    assert len(failed) <= 2 * 3
    explored = [e["accepted"] for e in job.events("closed") if e["request_kind"] == "explore"]
    assert explored == [0] * 4
    assert {e["worker"] for e in job.events("lease_done")} == {"reserved-local-0.0"}


def test_the_processes_of_a_job_are_those_that_name_or_use_its_folder(tmp_path):
    job, other = tmp_path / "job", tmp_path / "job-2"
    for folder in (job, other):
        folder.mkdir()
        (folder / "log").touch()

    def sleeper(name: Path, log: Path) -> subprocess.Popen:
        with log.open() as file:
            return subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(30)"],
                stdin=file,
                env={**os.environ, JOB_VARIABLE: str(name)},
            )

    named, using, neither = sleeper(job, Path(os.devnull)), sleeper(other, job / "log"), sleeper(other, other / "log")
    try:
        wanted = {named.pid, using.pid}
        until(lambda: set(members(job)) == wanted, within_s=5, what="the processes of the job")
    finally:
        for process in (named, using, neither):
            process.kill()
            process.wait()
    assert list(members(job)) == []
