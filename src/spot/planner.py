"""How many seeds to explore for each prompt of the next batch. Pure: decides from what it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Outlook:
    """What is known when an iteration's exploration is planned."""

    iteration: int
    """The iteration whose seeds are explored."""
    prompts: int
    workers: int
    """Live spot workers."""


class Planner(Protocol):
    """Decides the exploration of one iteration."""

    def plan(self, outlook: Outlook) -> tuple[int, ...]:
        """Seeds to explore (N) for each prompt of the batch; zeros explore nothing."""


@dataclass(frozen=True)
class Fixed:
    """The same number of seeds for every prompt, whenever there is a worker."""

    seeds_per_prompt: int

    def __post_init__(self) -> None:
        if self.seeds_per_prompt < 1:
            raise ValueError(f"planner.seeds_per_prompt must be at least 1, got {self.seeds_per_prompt}")

    def plan(self, outlook: Outlook) -> tuple[int, ...]:
        return (self.seeds_per_prompt if outlook.workers else 0,) * outlook.prompts


@dataclass(frozen=True)
class NoExploration:
    """Plain Flow-GRPO: random seeds."""

    def plan(self, outlook: Outlook) -> tuple[int, ...]:
        return (0,) * outlook.prompts
