"""What is to be expected of training phases and workers, with bounds that are seldom broken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from src.spot.planning.protocol import Worker

_PRIOR_ERRORS, _PRIOR_RMS = 2, 0.05
"""Log errors to begin with: a count and a size. One small error alone would promise too much."""


class Forecast:
    """Level of a positive quantity that drifts, and how wrong the level was.

    The level is an exponential mean of logarithms: m <- d m + (1 - d) log x. Before each observation the error
    e = log x - m is noted; the last `window` errors give the bounds exp(m -+ q), where

        q = t_n(1 - risk) sqrt(mean e^2)    (t_n: Student quantile for n errors)

    so bounds are wide while little is known, and a quantity that jumps about widens them by itself. Two errors of 5 %
    are counted from the start.
    """

    def __init__(self, *, discount: float = 0.5, window: int = 48) -> None:
        if not 0 <= discount < 1:
            raise ValueError(f"discount must be in [0, 1), got {discount}")
        self._discount = discount
        self._window = window
        self._level: float | None = None
        self._errors: list[float] = []

    def observe(self, value: float) -> None:
        """Values that are not positive and finite say nothing, and are passed over."""
        if not (value > 0 and math.isfinite(value)):
            return
        log = math.log(value)
        if self._level is None:
            self._level = log
            return
        self._errors = [*self._errors, log - self._level][-self._window :]
        self._level = self._discount * self._level + (1 - self._discount) * log

    @property
    def expected(self) -> float | None:
        """None before the first observation."""
        return None if self._level is None else math.exp(self._level)

    def margin(self, risk: float) -> float:
        """q: the log error that is exceeded on one side with probability `risk`."""
        return student_margin(self._errors, risk)

    def at_least(self, risk: float) -> float | None:
        """What the next value will fall short of with probability `risk`."""
        return None if self._level is None else math.exp(self._level - self.margin(risk))

    def state_dict(self) -> dict[str, Any]:
        return {"level": self._level, "errors": list(self._errors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._level = state["level"]
        self._errors = list(state["errors"])


def student_margin(errors: Sequence[float], risk: float) -> float:
    """The error that is exceeded with probability `risk`, if errors are normal around 0 with unknown spread."""
    count = len(errors) + _PRIOR_ERRORS
    rms = math.sqrt((math.fsum(error * error for error in errors) + _PRIOR_ERRORS * _PRIOR_RMS**2) / count)
    return float(stdtrit(count, 1 - risk)) * rms


class Speeds:
    """Seconds that each worker needs for one denoising step of a pass, learnt from the passes it served.

    A worker that has served nothing yet is taken to be like the others.
    """

    def __init__(self, *, discount: float = 0.8, window: int = 256) -> None:
        self._discount = discount
        self._window = window
        self._levels: dict[str, float] = {}
        self._pool: float | None = None
        self._errors: list[float] = []

    def observe(self, worker: str, steps: int, seconds: float) -> None:
        if not (seconds > 0 and math.isfinite(seconds)):
            return
        log = math.log(seconds / steps)
        if worker in self._levels:
            level = self._levels[worker]
            self._errors = [*self._errors, log - level][-self._window :]
            log_level = self._discount * level + (1 - self._discount) * log
        else:
            log_level = log
        self._levels[worker] = log_level
        self._pool = log if self._pool is None else self._discount * self._pool + (1 - self._discount) * log

    def step_s(self, worker: str) -> float | None:
        """Expected seconds per step; None if nobody has served anything."""
        level = self._levels.get(worker, self._pool)
        return None if level is None else math.exp(level)

    def slack(self, risk: float) -> float:
        """By which share of its time a pass is late with probability `risk`."""
        return math.expm1(min(student_margin(self._errors, risk), 5.0))

    def keep(self, workers: Sequence[Worker]) -> None:
        """Forgets workers that are gone: one that comes back may be another machine."""
        names = {worker.name for worker in workers}
        self._levels = {name: level for name, level in self._levels.items() if name in names}

    def state_dict(self) -> dict[str, Any]:
        return {"levels": dict(self._levels), "pool": self._pool, "errors": list(self._errors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._levels = dict(state["levels"])
        self._pool = state["pool"]
        self._errors = list(state["errors"])
