"""`python train.py` as a user runs it, and what becomes of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from src.core.events import read_jsonl
from src.spot.reaper import JOB_VARIABLE, members
from tests.app.runs import EXPLORED, ROOT, TINY

EAGER = "cluster.nice=1"
"""Workers that yield more get no time at all on a machine that is busy with other things."""

JOB = (*TINY, EXPLORED, EAGER)
"""The tiny run of `conftest.plain`."""


def command(folder: Path | None, *overrides: str) -> list[str]:
    """How a run in `folder` is started."""
    where = [f"paths.output_dir={folder}"] if folder else []
    return [sys.executable, str(ROOT / "train.py"), *where, *overrides]


def environment() -> dict[str, str]:
    """That of the tests, with one thread per process and without a W&B key."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "COLUMNS": "200"}


def train(folder: Path | None, *overrides: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Runs to the end; TimeoutExpired kills it."""
    return subprocess.run(
        command(folder, *overrides),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(),
        check=False,
    )


@contextmanager
def started(folder: Path, *overrides: str, own_group: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on; it is killed at the end if it still does. In a process group of its own, it can be signalled
    with what it started and without the tests."""
    process = subprocess.Popen(
        command(folder, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=own_group,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def events(folder: Path) -> list[dict[str, Any]]:
    """What the run has logged so far."""
    path = folder / "events.jsonl"
    return list(read_jsonl(path)) if path.is_file() else []


def wait_for(what: str, ready: Callable[[], Any], *, timeout_s: float = 200.0) -> Any:
    """Polls until `ready()` is true and returns what it was."""
    deadline = time.monotonic() + timeout_s
    while not (value := ready()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)
    return value


def scratch_of(parent: int) -> Path:
    """The scratch folder of the job with this parent process; all processes of the job can be told by it."""
    scratch: Path = wait_for("the job's scratch folder", lambda: _scratch_below(parent))
    return scratch


def living(scratch: Path) -> dict[int, str]:
    """Command lines of the job's living processes, by process id."""
    names = {pid: _read(Path(f"/proc/{pid}/cmdline")) for pid in members(scratch)}
    return {pid: name.replace(b"\0", b" ").decode(errors="replace") for pid, name in names.items() if name}


def assert_gone(scratch: Path, *, within_s: float = 10.0) -> None:
    """No process of the job is left, and no folder."""
    deadline = time.monotonic() + within_s
    while living(scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert living(scratch) == {}
    wait_for("the end of the scratch folder", lambda: not scratch.exists(), timeout_s=within_s)


def coordinator_of(scratch: Path, folder: Path) -> int:
    """Process id of whoever has the run's event log open."""
    log = (folder / "events.jsonl").resolve()
    for pid in members(scratch):
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if link.resolve() == log:
                        return pid
    raise AssertionError(f"nobody has {log} open")


def kill(pid: int) -> None:
    """With -9."""
    os.kill(pid, signal.SIGKILL)


def _scratch_below(parent: int) -> Path | None:
    prefix = f"{JOB_VARIABLE}=".encode()
    for process in Path("/proc").glob("[0-9]*"):
        stat = _read(process / "stat").rpartition(b")")[2].split()
        if len(stat) > 1 and int(stat[1]) == parent:
            for entry in _read(process / "environ").split(b"\0"):
                if entry.startswith(prefix):
                    return Path(entry.removeprefix(prefix).decode())
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
