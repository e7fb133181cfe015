"""What the processes of a job agree on: exit codes, and how they end together."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
LEFT, LOST = 3, 4
"""Of a training rank that was asked to leave, and of one that found nobody who knew how far the training was."""

TEAM = "ranks"
"""Name of the training ranks among the elastic groups of a job."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(FAILED)


def shared_folder(scratch: Path) -> Path:
    """Where ranks leave what newcomers must know: memory, not disk. `scratch` is the job's, so no two jobs meet."""
    return Path("/dev/shm") / scratch.name


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
