"""A planner for runs of the tests."""

from __future__ import annotations

from src.spot.planning.protocol import Action, Event, Explore, Opened
from src.spot.planning.simple import NoExploration


class Previewing(NoExploration):
    """Five seeds for every prompt, with as few steps as there may be."""

    def handle(self, now_s: float, event: Event) -> list[Action]:
        return [Explore(p, 5, min(event.previews)) for p in range(event.prompts)] if isinstance(event, Opened) else []
