"""Reward models that drift, and clusters that change: what planners are tried on.

A seed's fresh reward is q_p(z), its explored one q_p(rho z + sqrt(1 - rho^2) z'), with z, z' standard normal scores and
q_p what prompt p makes of a score. So rho is the correlation of normal rewards, and near that of others. All draws
depend on (world, seed, iteration, prompt, candidate) alone: planners meet the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from src.core import seeds

Array = NDArray[np.float64]
Score = Callable[[Array], Array]
"""A prompt's rewards as a function of standard normal scores; does not decrease."""

KEEP = 8
CANDIDATES = 64
STEPS = 10
LEVELS: Array = ndtri((np.arange(400) + 0.5) / 400)
"""Scores that stand for the normal distribution."""


def normal(draw: np.random.Generator) -> Score:
    return lambda z: 0.5 + 0.2 * z


def spread(draw: np.random.Generator) -> Score:
    """Prompts of very different spread; two of five have none (solved, or hopeless)."""
    sd = 0.0 if draw.random() < 0.4 else 0.2 * math.exp(0.7 * draw.normal())
    return lambda z: 0.5 + sd * z


def skewed(draw: np.random.Generator) -> Score:
    """Log-normal, half of them mirrored: a long tail on one side."""
    sign, sd = (1 if draw.random() < 0.5 else -1), 0.2 * math.exp(0.3 * draw.normal())
    return lambda z: sign * sd * np.exp(0.8 * sign * z)


def binary(draw: np.random.Generator) -> Score:
    """Right or wrong, with a probability that differs between prompts."""
    threshold = ndtri(1 - draw.beta(0.7, 1.5))
    return lambda z: (z > threshold).astype(np.float64)


def letters(draw: np.random.Generator) -> Score:
    """Share of four letters that are right."""
    probability = draw.beta(1.5, 1.5)
    bounds = ndtri(np.cumsum([math.comb(4, k) * probability**k * (1 - probability) ** (4 - k) for k in range(4)]))
    return lambda z: (z[..., None] > bounds).sum(-1) / 4


def steady(iteration: int) -> float:
    return 0.93


def ups_and_downs(iteration: int) -> float:
    """A correlation that is lost twice, at once, and comes back: at once, and slowly."""
    if iteration % 60 < 20:
        return 0.95
    if iteration % 60 < 35:
        return 0.2
    return min(0.95, 0.2 + 0.05 * (iteration % 60 - 35))


@dataclass(frozen=True)
class World:
    """One trial: rewards and machines."""

    name: str
    reward: Callable[[np.random.Generator], Score] = spread
    correlation: Callable[[int], float] = steady
    preview_correlation: Callable[[int], float] | None = None
    """With half of the steps; None offers no preview."""
    prompts: int = 16
    workers: int = 8
    changing: bool = False
    """Workers come and go, speeds and training time drift."""
    spot_usd_per_hour: float = 2.66
    seed: int = 0

    def iteration(self, number: int) -> Draws:
        """Everything about the batch of an iteration that no planner decides."""
        return Draws(self, number)

    def generator(self, *purpose: int | str) -> np.random.Generator:
        return np.random.default_rng(seeds.derive("world", self.name, self.seed, *purpose))

    def correlation_of(self, steps: int, iteration: int) -> float:
        if steps == STEPS or self.preview_correlation is None:
            return self.correlation(iteration)
        return self.preview_correlation(iteration)


@dataclass(frozen=True)
class Draws:
    world: World
    number: int
    _slopes: dict[int, float] = field(default_factory=dict)
    _step_s: dict[int, float] = field(default_factory=dict)

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        draw = self.world.generator(self.number, "prompts")
        return tuple(self.world.reward(draw) for _ in range(self.world.prompts))

    @cached_property
    def _normals(self) -> tuple[Array, Array]:
        draw = self.world.generator(self.number, "rewards")
        shape = (self.world.prompts, CANDIDATES + KEEP)
        return draw.normal(size=shape), draw.normal(size=shape)

    def stale(self, prompt: int, index: int, steps: int) -> float:
        """The reward of a candidate when it is explored."""
        fresh, noise = (values[prompt, index] for values in self._normals)
        rho = self.world.correlation_of(steps, self.number)
        return float(self.scores[prompt](np.array(rho * fresh + math.sqrt(1 - rho * rho) * noise)))

    def fresh(self, prompt: int, index: int) -> float:
        """Its reward when it is made again. Candidates from CANDIDATES on are for prompts without a choice."""
        return float(self.scores[prompt](self._normals[0][prompt, index]))

    @cached_property
    def random_variance(self) -> float:
        """True variance within a prompt, of random seeds, on average."""
        return float(np.mean([score(LEVELS).var() for score in self.scores]))

    def slope(self, steps: int) -> float:
        """b as it really is: fresh variance gained per stale variance gained with N = 4G, by simulation."""
        if steps not in self._slopes:
            draw = self.world.generator(self.number, "slope", steps)
            rho = self.world.correlation_of(steps, self.number)
            gains = np.zeros(2)
            for score in self.scores:
                stale_z = np.sort(draw.normal(size=(40, 4 * KEEP)), axis=1)
                kept_z = np.concatenate([stale_z[:, : KEEP // 2], stale_z[:, -KEEP // 2 :]], axis=1)
                fresh_z = rho * kept_z + math.sqrt(1 - rho * rho) * draw.normal(size=kept_z.shape)
                at_random = score(LEVELS).var() * (1 - 1 / KEEP)
                gains += [score(z).var(axis=1).mean() - at_random for z in (kept_z, fresh_z)]
            self._slopes[steps] = float(max(gains[1], 0.0) / max(gains[0], 1e-9))
        return self._slopes[steps]

    @cached_property
    def training_s(self) -> float:
        draw = self.world.generator(self.number, "training")
        drift = (
            0.3 * math.sin(self.number / 9) + (0.25 if self.number % 100 > 70 else 0.0) if self.world.changing else 0.0
        )
        return float(100 * math.exp(drift + 0.03 * draw.normal()))

    def step_s(self, worker: int) -> float:
        """Seconds per denoising step of a pass of 8, of a worker."""
        if worker not in self._step_s:
            own = self.world.generator("worker", worker).normal() * 0.25
            drift = 0.3 * math.sin(self.number / 13 + worker) if self.world.changing else 0.0
            self._step_s[worker] = float(math.exp(own + drift))
        return self._step_s[worker]

    def jitter(self, worker: int, passes: int) -> float:
        """How much longer than usual a pass takes; now and then much longer."""
        draw = self.world.generator(self.number, "jitter", worker, passes)
        return float(math.exp(0.04 * draw.normal()) * (1.5 if draw.random() < 0.002 else 1.0))

    def alive(self, worker: int, second: float) -> bool:
        """Whether a worker is there: those of a changing world are away for about 40 % of the time, in long pieces."""
        if not self.world.changing:
            return True
        block = int((self.number * 100 + second) // 37)
        level = sum(self.world.generator("alive", worker, block - k).normal() * 0.8**k for k in range(8))
        return bool(ndtr(level * 0.6) > 0.4)


WORLDS = (
    World("normal", normal),
    World("spread"),
    World("skewed", skewed),
    World("binary", binary),
    World("letters", letters),
    World("correlation", normal, ups_and_downs),
    World("scarce", workers=2),
    World("plenty", workers=24),
    World("dear", spot_usd_per_hour=16.0),
    World("changing", letters, lambda i: 0.75 + 0.2 * math.sin(i / 11), workers=14, changing=True),
    World("preview", preview_correlation=lambda i: 0.85 if i % 80 < 40 else 0.3, workers=4),
)
