"""The only place that reads time. Deciders never do: they are told the time with each event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]
"""Seconds since a fixed but unknown start; never goes backwards."""

monotonic_s: Clock = time.monotonic
sleep_s = time.sleep
cpu_s: Clock = time.process_time
"""Seconds that this process has computed: what a measurement counts where others share the cores."""


def wall_s() -> float:
    """Seconds since the epoch, for timestamps that people read or that processes of a host compare."""
    return time.time()


class RunClock:
    """Seconds since the first start of a run, across restarts: the time axis of its event log."""

    def __init__(self, *, elapsed_s: float = 0.0, now: Clock = time.monotonic) -> None:
        self._now = now
        self._zero_s = now() - elapsed_s

    def __call__(self) -> float:
        return self._now() - self._zero_s


class Stopwatch:
    """Adds up seconds per named phase: `with watch.phase("rollout"): ...`. Phases may be nested."""

    def __init__(self, now: Clock = time.monotonic) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside to `name`, also when the body raises."""
        started_s = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - started_s


def duration(seconds: float) -> str:
    """Seconds as people read them: `8.4 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
