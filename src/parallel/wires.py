"""The connections between ranks, so that they can be cut: whoever waits at the other end then sees an error at once.

A gloo group closes its connections when its last reference is gone, and its `abort` does nothing before. DeepSpeed,
autograd graphs and the frames of an exception hold such references for who knows how long.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Ends = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of a connection here, and at the other end."""


class Wires:
    """The connections of this process to other ranks. To be made by all of them, when their groups are there.

    Args:
        gather: what each rank says, on all.
    """

    def __init__(self, gather: Callable[[set[Ends]], list[set[Ends]]]) -> None:
        found = _connections()
        # Ray's connections, and the store's, have no other end in a rank.
        others = {(there, here) for of_rank in gather(set(found)) for here, there in of_rank}
        self._wires = [wire for ends, wire in found.items() if ends in others]
        for ends, wire in found.items():
            if ends not in others:
                wire.close()

    def cut(self) -> None:
        """May be called twice."""
        for wire in self._wires:
            with suppress(OSError):  # the other end has done so before
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()
        self._wires = []


def _connections() -> dict[Ends, socket.socket]:
    """All TCP connections of this process, as descriptors of their own."""
    found: dict[Ends, socket.socket] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is gone, is no socket, or is not connected
            if not os.readlink(entry).startswith("socket:"):
                continue
            wire = socket.socket(fileno=os.dup(int(entry.name)))
            try:
                if wire.family not in (socket.AF_INET, socket.AF_INET6):
                    raise OSError("no TCP")
                here, there = wire.getsockname()[:2], wire.getpeername()[:2]
            except OSError:
                wire.close()
                raise
            found[here, there] = wire
    return found
