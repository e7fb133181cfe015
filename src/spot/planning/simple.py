"""Planners that do not learn what exploration brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from src.spot.planning.anytime import AnytimePlanner, Round
from src.spot.planning.protocol import Action, Event, Explore, Opened, StopExploring


class NoExploration:
    """Plain GRPO: random seeds."""

    training_s = None

    def handle(self, now_s: float, event: Event) -> list[Action]:
        return [StopExploring("exploration is off")] if isinstance(event, Opened) else []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take over."""


class Fixed:
    """The same number of seeds for every prompt, all at once, whether there is a worker or one is still to come.

    So what is asked for depends on nothing that is measured. They are asked for in rounds of one seed per prompt, so
    that prompts are treated alike wherever it is cut off.

    Args:
        seeds_per_prompt: N.
    """

    training_s = None

    def __init__(self, *, seeds_per_prompt: int) -> None:
        if seeds_per_prompt < 1:
            raise ValueError(f"planner.seeds_per_prompt must be at least 1, got {seeds_per_prompt}")
        self._seeds_per_prompt = seeds_per_prompt

    def handle(self, now_s: float, event: Event) -> list[Action]:
        if not isinstance(event, Opened):
            return []
        rounds, prompts = range(self._seeds_per_prompt), range(event.prompts)
        asked: list[Action] = [Explore(prompt, 1, event.steps) for _ in rounds for prompt in prompts]
        return [*asked, StopExploring("everything is asked for")]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take over."""


class LargestFeasible(AnytimePlanner):
    """The largest N that fits into the training phase, equal for all prompts, with full steps.

    It goes on, one seed for every prompt at a time, as long as such a round fits: what a plan made in advance would aim
    at, but right also if workers come, go or change speed meanwhile. If the time allows no more than the G seeds per
    prompt that are kept anyway, it explores nothing.
    """

    def _next(self, now: Round, room: float) -> Explore | str:
        prompts = now.opened.prompts
        done, part = divmod(sum(now.asked), prompts)
        if done >= self._max_seeds_per_prompt:
            return "all candidates are asked for"
        if not any(now.asked) and room < prompts * (now.opened.keep + 1):
            return "too little time to choose among seeds"
        if part == 0 and room < prompts:
            return "no time left"
        return Explore(part, 1, now.steps)
