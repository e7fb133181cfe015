"""Ends what a killed job leaves behind: `python -m src.spot.reaper MARK SCRATCH < pipe`.

Ray's daemons outlive a driver that was killed by a minute or more. So the job marks everything that it starts
by an environment variable, and starts this process, in a session of its own, with a pipe whose other end it
holds and never writes to. However the job ends, the pipe then closes: every process that still carries the
mark is killed, and the job's scratch folder is deleted.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from src.core.clock import monotonic_s, sleep_s

MARK_VARIABLE = "SPOTLIGHT_JOB"
_GIVE_UP_S = 30.0
_PAUSE_S = 0.1
_QUIET_SCANS = 3
"""Scans without a find before the job counts as gone: a process may be about to start another."""


def marked(mark: str) -> Iterator[int]:
    """Process ids of all living processes of this user that carry the mark, but for the calling one."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if entry in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                yield int(folder.name)


def reap(mark: str) -> None:
    """Kills all marked processes until none is left."""
    deadline_s = monotonic_s() + _GIVE_UP_S
    quiet = 0
    while quiet < _QUIET_SCANS and monotonic_s() < deadline_s:
        found = list(marked(mark))
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        sleep_s(_PAUSE_S)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(mark=sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
