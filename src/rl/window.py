"""Which denoising steps are stochastic in an iteration, and which of them each sample is trained on.

Both are pure functions. All members of a group share their stochastic steps: groups of mixed windows compare
samples that could not have been alike, and training collapses. The last step is never stochastic, since its
noise would stay in the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from src.core import seeds


class StepWindow(Protocol):
    """Chooses the stochastic steps of an iteration."""

    def steps(self, total_steps: int, run_seed: int, iteration: int) -> tuple[int, ...]:
        """Increasing indices below `total_steps - 1`, equal for all samples of the iteration."""


@dataclass(frozen=True)
class AllButLast:
    """Every step but the last (Flow-GRPO)."""

    def steps(self, total_steps: int, run_seed: int, iteration: int) -> tuple[int, ...]:
        return tuple(range(total_steps - 1))


@dataclass(frozen=True, kw_only=True)
class RandomWindow:
    """`size` successive steps among `low .. high - 1`, drawn for each iteration (Flow-GRPO-Fast)."""

    size: int
    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range(self)

    def steps(self, total_steps: int, run_seed: int, iteration: int) -> tuple[int, ...]:
        _check_total(self, total_steps)
        start = seeds.generator("window", run_seed, iteration).randint(self.low, self.high - self.size)
        return tuple(range(start, start + self.size))


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """`size` successive steps among `low .. high - 1` that move from noise to image (MixGRPO, arXiv 2507.21802).

    The window moves on by one step every `every` iterations, and from the end back to `low`.
    """

    size: int
    low: int
    high: int
    every: int

    def __post_init__(self) -> None:
        _check_range(self)
        if self.every < 1:
            raise ValueError(f"SlidingWindow.every must be at least 1, got {self.every}")

    def steps(self, total_steps: int, run_seed: int, iteration: int) -> tuple[int, ...]:
        _check_total(self, total_steps)
        positions = self.high - self.low - self.size + 1
        start = self.low + iteration // self.every % positions
        return tuple(range(start, start + self.size))


def _check_range(window: RandomWindow | SlidingWindow) -> None:
    name = type(window).__name__
    if window.low < 0:
        raise ValueError(f"{name}.low must not be negative, got {window.low}")
    if not 1 <= window.size <= window.high - window.low:
        raise ValueError(f"{name}.size must be in 1..high-low={window.high - window.low}, got {window.size}")


def _check_total(window: RandomWindow | SlidingWindow, total_steps: int) -> None:
    if window.high >= total_steps:
        raise ValueError(
            f"{type(window).__name__}.high must be below steps={total_steps} (the last stays ODE), got {window.high}"
        )


def trained_steps(
    stochastic: Sequence[int], count: int, *, run_seed: int, iteration: int, instance: int, seed: int
) -> tuple[int, ...]:
    """Which `count` of its stochastic steps a sample is trained on, increasing.

    Drawn for each sample, so that over a batch the gradient is that of all steps, at a part of the price.
    """
    if not 1 <= count <= len(stochastic):
        raise ValueError(f"trained_steps must be in 1..{len(stochastic)} (stochastic steps), got {count}")
    drawn = seeds.draw(stochastic, count, "trained steps", run_seed, iteration, instance, seed)
    return tuple(sorted(drawn))
