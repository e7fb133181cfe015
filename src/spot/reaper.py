"""Ends what a killed job leaves behind: `python -m src.spot.reaper SCRATCH < pipe`.

Ray's daemons outlive a driver that was killed by a minute or more. So the job names its scratch folder in an
environment variable of everything that it starts, and starts this process, in a session of its own, with a pipe
whose other end it holds and never writes to. However the job ends, the pipe then closes: every process of the
job is killed, and the folder deleted.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from src.core.clock import monotonic_s, sleep_s

JOB_VARIABLE = "SPOTLIGHT_JOB"
_GIVE_UP_S = 30.0
_PAUSE_S = 0.1
_QUIET_SCANS = 3
"""Scans without a find before the job counts as gone: a process may be about to start another."""


def members(scratch: Path) -> Iterator[int]:
    """Process ids of all living processes of a job, as far as they are this user's.

    They have its scratch folder in their environment, or a file of it open: some of Ray's daemons write their
    new names over their environment, but all have their logs there.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if _named(process, scratch) or _opened(process, scratch):
                yield int(process.name)


def _named(process: Path, scratch: Path) -> bool:
    return f"{JOB_VARIABLE}={scratch}".encode() in (process / "environ").read_bytes().split(b"\0")


def _opened(process: Path, scratch: Path) -> bool:
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if link.readlink().is_relative_to(scratch):
                return True
    return False


def reap(scratch: Path, *, spare: Collection[int]) -> None:
    """Kills all processes of the job, but for the spared ones, until none is left."""
    deadline_s = monotonic_s() + _GIVE_UP_S
    quiet = 0
    while quiet < _QUIET_SCANS and monotonic_s() < deadline_s:
        found = [pid for pid in members(scratch) if pid not in spare]
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        sleep_s(_PAUSE_S)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole job: it ends later, and needs its reaper then
    folder, parent = Path(sys.argv[1]), os.getppid()
    sys.stdin.buffer.read()
    reap(folder, spare=(os.getpid(), parent))  # the parent still lives after an orderly end
    shutil.rmtree(folder, ignore_errors=True)
