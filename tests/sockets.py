"""Where processes listen, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 in both tables."""


def listening(pids: Iterable[int]) -> dict[str, set[int]]:
    """The addresses on which TCP servers of these processes listen, as the kernel writes them, with their ports."""
    sockets = {target for pid in pids for target in _open_files(pid)}
    found: dict[str, set[int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                found.setdefault(address, set()).add(int(port, 16))
    return found


def _open_files(pid: int) -> Iterator[str]:
    with suppress(FileNotFoundError):  # it has ended meanwhile
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                yield os.readlink(link)
