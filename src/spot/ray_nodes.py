"""The spot nodes of a Ray cluster, behind the interface of a market (`market.Nodes`): they come and go as they do.

Rules

- A spot node that is new in Ray's table of nodes returns; one that is dead in it, or not there any more, is gone. Ray
  sees a node die after about 15 seconds, if it does not take its leave.
- A node is called `node` and the lowest number that no other had when it was seen first. A raylet that was started
  again is another node for Ray and for us, also on the same machine.
- When a worker hears from its machine that this will be taken away, the node has notice: nothing more is started on it,
  and Ray is asked to drain it, so that nobody else's work is put there. It stays so until the node is gone.
- A node that Ray drains because somebody else asked for it (its autoscaler, KubeRay) has notice, too. One that is
  drained already when it is seen first is left alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from src.spot.market import Action, Event, Heard, Kill, Missed, Notice, Return, Start, Tick


@dataclass(frozen=True)
class RayNode:
    """A row of Ray's table of nodes."""

    id: str
    """In hex."""
    machine: str
    """Its address."""


class RayNodes:
    """See the rules at the top of this module.

    Args:
        read: the spot nodes that are alive now.
        leaving: nodes that Ray drains now, by id, and the seconds that they have left.
        drain: asks Ray to put nothing more on a node, which will be gone in so many seconds.
        interval_s: from one look at the table to the next.
    """

    def __init__(
        self,
        *,
        read: Callable[[], Sequence[RayNode]],
        leaving: Callable[[], Mapping[str, float]],
        drain: Callable[[str, float], None],
        interval_s: float = 0.5,
    ) -> None:
        if not 0 < interval_s < math.inf:
            raise ValueError(f"interval_s must be positive and finite, got {interval_s}")
        self._read = read
        self._leaving = leaving
        self._drain = drain
        self._interval_s = interval_s
        self._up: dict[str, RayNode] = {}
        self._noticed: set[str] = set()
        self._next_s = -math.inf

    @property
    def nodes(self) -> Sequence[str]:
        """Those that are there and under no notice: nobody can tell whether others will come."""
        return [name for name in self._up if name not in self._noticed]

    @property
    def next_s(self) -> float:
        return self._next_s

    def ray_id(self, name: str) -> str:
        """Ray's id of a node that is there."""
        return self._up[name].id

    def handle(self, now_s: float, event: Event) -> list[Action]:
        match event:
            case Tick() if now_s < self._next_s:
                return []
            case Start() | Tick() | Missed():
                self._next_s = now_s + self._interval_s
                return self._compare(self._read(), self._leaving())
            case Heard(name, grace_s):
                if name not in self._up or name in self._noticed:
                    return []
                self._noticed.add(name)
                self._drain(self._up[name].id, grace_s)
                return [Notice(name, grace_s)]

    def _compare(self, alive: Sequence[RayNode], leaving: Mapping[str, float]) -> list[Action]:
        taken, known = set(self._up), {node.id for node in self._up.values()}
        gone = [name for name, node in self._up.items() if node not in alive]
        for name in gone:
            del self._up[name]
            self._noticed.discard(name)
        warned = {
            name: leaving[node.id]
            for name, node in self._up.items()
            if node.id in leaving and name not in self._noticed
        }
        self._noticed |= warned.keys()
        new = [node for node in alive if node.id not in known | leaving.keys()]
        free = (name for number in itertools.count() if (name := f"node{number}") not in taken)
        came = dict(zip(free, new, strict=False))
        self._up |= came
        return [
            *map(Kill, gone),
            *(Notice(name, grace_s) for name, grace_s in warned.items()),
            *(Return(name, node.machine) for name, node in came.items()),
        ]
