"""The only place that reads time. Deciders never do: they are told the time with each event."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since a fixed but unknown start; never goes backwards."""

monotonic_s: Clock = time.monotonic
sleep_s = time.sleep


def wall_s() -> float:
    """Seconds since the epoch: for timestamps that people read and that must agree between processes of a host."""
    return time.time()


class RunClock:
    """Seconds since the first start of a run, across restarts: the time axis of its event log."""

    def __init__(self, *, elapsed_s: float = 0.0, now: Clock = time.monotonic) -> None:
        self._now = now
        self._zero_s = now() - elapsed_s

    def __call__(self) -> float:
        return self._now() - self._zero_s


class Stopwatch:
    """Adds up seconds per named phase: `with watch("rollout"): ...`."""

    def __init__(self, now: Clock = time.monotonic) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []

    def __call__(self, phase: str) -> Stopwatch:
        self._open.append((phase, 0.0))
        return self

    def __enter__(self) -> None:
        phase, _ = self._open.pop()
        self._open.append((phase, self._now()))

    def __exit__(self, *_: object) -> None:
        phase, started_s = self._open.pop()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - started_s
