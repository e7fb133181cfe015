"""What the coordinator and a process say to one another when the process joins, and what is left when it is lost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from src.core.protocols import Engine
from src.core.types import Member, RequestKind
from src.spot import messages as m

LOCAL = "local"
"""The only node of spot workers, where no market is played."""


@dataclass(frozen=True)
class Introduction:
    """What a process must know of the run to take part in it."""

    run: str
    incarnation: int
    """How many times the run was started before."""
    weights_root: Path
    """Where policies are published."""
    elapsed_s: float
    """Seconds since the start of the run."""
    heartbeat_s: float
    """How often to show signs of life."""
    store_port: int | None = None
    """Of the store on the coordinator's machine through which elastic groups form; None if there are none."""


class Store(Protocol):
    """The server through which elastic groups form. It ends with the coordinator."""

    @property
    def port(self) -> int: ...


@dataclass(frozen=True)
class Lost:
    """A worker that is no member any more."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Joined:
    """What a worker says of itself when it joins."""

    member: Member
    pid: int
    batch_size: int
    fingerprint: str
    kinds: frozenset[RequestKind] = m.EVERY_KIND
    watched: bool = True
    """Whether its silence means that it is frozen. Training ranks are silent for a whole training phase."""


def rank_member(number: int, incarnation: int, spot: tuple[str, int] | None = None) -> Member:
    """Who the training rank with this number is, in this life of the run. No two processes of a life share a number.

    Args:
        spot: node and slot, if it is on a spot GPU.
    """
    return Member("local", number, incarnation, "reserved") if spot is None else Member(*spot, number)


RESERVED_KINDS = frozenset({RequestKind.ROLLOUT, RequestKind.EVAL})


def reserved(member: Member, engine: Engine) -> Joined:
    """A training rank joins: it serves only what its training waits for, and is silent while it trains."""
    return Joined(member, os.getpid(), engine.batch_size, engine.fingerprint, RESERVED_KINDS, watched=False)
