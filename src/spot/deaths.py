"""Tells at once that another process of this machine has ended.

Its number alone would not do: on another machine or in another container it means another process, and so it does here
once it is given out again. A pidfd stands for one process for good, and is readable when that ends (pidfd_open(2)).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessId:
    """A process, as others may know it."""

    pid: int
    space: str
    """In which the number is valid: this start of this machine's system, and a namespace of it."""

    @classmethod
    def own(cls) -> ProcessId:
        """Of this process."""
        return cls(os.getpid(), f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}")


def on_death(process: ProcessId, tell: Callable[[], None]) -> None:
    """Has the running event loop call `tell` once the process has ended; never, if it cannot be seen from here."""
    if process.space != ProcessId.own().space:
        return
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:  # it has ended already
        loop.call_soon(tell)
        return

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        tell()

    loop.add_reader(pidfd, ended)
