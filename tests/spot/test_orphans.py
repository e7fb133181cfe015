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
from src.spot.reaper import MARK_VARIABLE, marked
from tests.spot.conftest import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


class Job:
    def __init__(self, folder: Path, spot_workers: int) -> None:
        self._events = folder / "events.jsonl"
        command = [sys.executable, "-m", "tests.spot.job", str(folder), str(spot_workers)]
        self.parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ready, self.mark, self.rank = self.parent.stdout.readline().split()
        assert ready == "ready"

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_jsonl(self._events) if event["kind"] == kind]

    def explores(self) -> bool:
        """Both spot workers are at work."""
        busy = {e["worker"] for e in self.events("lease_granted") if e["request_kind"] == "explore"}
        return len(busy) == 2

    def coordinator(self) -> int:
        """The process that has the event log open."""
        for pid in marked(self.mark):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if link.exists() and link.resolve() == self._events:
                    return pid
        raise AssertionError("no coordinator")

    def assert_gone(self, *, within_s: float) -> None:
        until(lambda: not list(marked(self.mark)), within_s=within_s, what="the end of all processes")


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(*, spot_workers: int) -> Job:
        jobs.append(Job(tmp_path.resolve(), spot_workers))
        return jobs[-1]

    yield start
    for job in jobs:
        job.parent.kill()
        job.parent.wait()
        job.parent.stdout.close()
        job.assert_gone(within_s=10)


def test_a_killed_parent_leaves_nothing(start):
    job = start(spot_workers=2)
    until(job.explores, within_s=30, what="exploration")
    assert len(list(marked(job.mark))) >= 6  # gcs, raylet, coordinator, rank, two workers
    job.parent.kill()
    job.assert_gone(within_s=10)


def test_a_killed_coordinator_ends_the_job_with_one_sentence(start):
    job = start(spot_workers=2)
    until(job.explores, within_s=30, what="exploration")
    os.kill(job.coordinator(), signal.SIGKILL)
    killed_s = time.monotonic()
    assert job.parent.stdout.readline().startswith("error: the coordinator died")
    assert time.monotonic() - killed_s < 2
    job.assert_gone(within_s=10)
    assert job.parent.wait(10) == 1


def test_a_job_without_spot_workers_trains_and_ends(start):
    job = start(spot_workers=0)
    assert job.parent.wait(60) == 0
    job.assert_gone(within_s=1)
    explored = [e["accepted"] for e in job.events("closed") if e["request_kind"] == "explore"]
    assert explored == [0] * 4
    assert {e["worker"] for e in job.events("lease_done")} == {"reserved-local-0.0"}


def test_only_processes_with_the_very_mark_are_found():
    sleep = [sys.executable, "-c", "import time; time.sleep(30)"]
    mine = subprocess.Popen(sleep, env={**os.environ, MARK_VARIABLE: "this-test"})
    other = subprocess.Popen(sleep, env={**os.environ, MARK_VARIABLE: "this-test-2"})
    try:
        until(lambda: list(marked("this-test")) == [mine.pid], within_s=5, what="the marked process")
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
    assert list(marked("this-test")) == []
