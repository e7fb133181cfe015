"""How a bandit reckons with what it does not know: optimistically (UCB), or by drawing from its belief (Thompson)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from src.core import seeds
from src.spot.planning.allocation import Array


class Attitude(Protocol):
    """`draw` names a decision: (run seed, iteration, ...); the same name gives the same answer."""

    def value(self, mean: float, sd: float, draw: tuple[int, ...]) -> float:
        """The number to reckon with, for one that is believed to be mean +- sd and not negative."""

    def stretch(self, doubt_P: Array, draw: tuple[int, ...]) -> Array:
        """The factors to reckon with, for positive quantities that are known but for a relative deviation."""


class Ucb:
    """Upper confidence bound: mean + beta sd.

    Args:
        optimism: beta.
    """

    def __init__(self, *, optimism: float = 0.5) -> None:
        if optimism < 0:
            raise ValueError(f"planner.attitude.optimism must not be negative, got {optimism}")
        self._optimism = optimism

    def value(self, mean: float, sd: float, draw: tuple[int, ...]) -> float:
        return mean + self._optimism * sd

    def stretch(self, doubt_P: Array, draw: tuple[int, ...]) -> Array:
        return 1 + self._optimism * doubt_P


class Thompson:
    """Thompson sampling: a normal draw for numbers, a log-normal one for factors."""

    def value(self, mean: float, sd: float, draw: tuple[int, ...]) -> float:
        return max(0.0, seeds.generator("planner value", *draw).gauss(mean, sd))

    def stretch(self, doubt_P: Array, draw: tuple[int, ...]) -> Array:
        generator = seeds.generator("planner stretch", *draw)
        normal_P = np.array([generator.gauss(0.0, 1.0) for _ in doubt_P])
        return np.asarray(np.exp(normal_P * doubt_P))
