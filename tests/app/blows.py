"""Spot workers that are hit at a chosen point of what they do together: in a step, in a collective, while they meet."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from src.app.config import Config
from src.app.job import make_engine
from src.parallel.group import ElasticGroup

METHODS = {"exchange": "alltoall_base", "word": "broadcast", "meeting": "_form"}
POINTS = tuple(METHODS)
"""The all-to-all around attention; what the leader tells before each step and lease; the forming of a group."""
IN_IT_S = 0.0003


@dataclass(frozen=True)
class Blow:
    """A signal to whoever has a rank in its group at that moment.

    Args:
        call: so many calls after the blow before.
        inside: whether it comes while the call lasts, or right before.
    """

    point: str
    call: int
    rank: int
    inside: bool
    signal: int


def prepare(file: Path, blows: Sequence[Blow]) -> None:
    """These are to come next, one after the other, and none from before."""
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps([asdict(blow) for blow in blows]))
    aside.replace(file)


def make_engine_that_is_hit(config: Config, file: Path) -> Any:
    """As `job.make_engine`; what `prepare` wrote into the file comes true."""
    calls = dict.fromkeys(POINTS, 0)
    last: list[dict[str, Any]] = []

    def look(point: str, rank: int) -> None:
        nonlocal last
        due = json.loads(file.read_text()) if file.exists() else []
        if due != last:
            last = due
            calls.update(dict.fromkeys(POINTS, 0))
        calls[point] += 1
        if not due or (due[0]["point"], due[0]["rank"]) != (point, rank) or calls[point] < due[0]["call"]:
            return
        blow = Blow(**due[0])
        prepare(file, [Blow(**each) for each in due[1:]])
        strike: Callable[[], None] = lambda: os.kill(os.getpid(), blow.signal)  # noqa: E731
        if blow.inside:
            threading.Timer(IN_IT_S, strike).start()
        else:
            strike()

    def watched(point: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ElasticGroup, *arguments: Any) -> Any:
            look(point, group.rank())
            return original(group, *arguments)

        return call

    for point, name in METHODS.items():
        setattr(ElasticGroup, name, watched(point, getattr(ElasticGroup, name)))
    return make_engine(config)
