"""Planners that do not learn what exploration brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from src.spot.planning.anytime import AnytimePlanner, Round
from src.spot.planning.protocol import Action, Closed, Event, Explore, Opened, StopExploring, WorkersChanged


class NoExploration:
    """Plain GRPO: random seeds."""

    def handle(self, now_s: float, event: Event) -> list[Action]:
        return [StopExploring("exploration is off")] if isinstance(event, Opened) else []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take over."""


class Fixed:
    """The same number of seeds for every prompt, all at once, as soon as there is a worker.

    They are asked for in rounds of one seed per prompt, so that prompts are treated alike wherever it is cut off.

    Args:
        seeds_per_prompt: N.
    """

    def __init__(self, *, seeds_per_prompt: int) -> None:
        if seeds_per_prompt < 1:
            raise ValueError(f"planner.seeds_per_prompt must be at least 1, got {seeds_per_prompt}")
        self._seeds_per_prompt = seeds_per_prompt
        self._waiting: tuple[int, int, int] | None = None  # (prompts, seeds, steps) until a worker comes

    def handle(self, now_s: float, event: Event) -> list[Action]:
        match event:
            case Opened():
                count = min(self._seeds_per_prompt, event.candidates)
                self._waiting = (event.prompts, count, event.steps)
                return self._ask() if event.workers else []
            case WorkersChanged(workers):
                return self._ask() if workers else []
            case Closed():
                self._waiting = None
        return []

    def _ask(self) -> list[Action]:
        if self._waiting is None:
            return []
        prompts, count, steps = self._waiting
        self._waiting = None
        asked: list[Action] = [Explore(prompt, 1, steps) for _ in range(count) for prompt in range(prompts)]
        return [*asked, StopExploring("everything is asked for")]

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": None if self._waiting is None else list(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = None if state["waiting"] is None else tuple(state["waiting"])


class LargestFeasible(AnytimePlanner):
    """The largest N that fits into the training phase, equal for all prompts, with full steps.

    It goes on, one seed for every prompt at a time, as long as such a round fits: what a plan made in advance would aim
    at, but right also if workers come, go or change speed meanwhile. If the time allows no more than the G seeds per
    prompt that are kept anyway, it explores nothing.
    """

    def _next(self, now: Round, room: float) -> Explore | str:
        prompts = now.opened.prompts
        done, part = divmod(sum(now.asked), prompts)
        if done >= now.opened.candidates:
            return "all candidates are asked for"
        if not any(now.asked) and room < prompts * (now.opened.keep + 1):
            return "too little time to choose among seeds"
        if part == 0 and room < prompts:
            return "no time left"
        return Explore(part, 1, now.steps)
