"""Which spot nodes took part in training, and when: a pure fold over the event log of a run with elastic ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from src.core.events import Event


class SpotTraining:
    """Turns events into the fields of `spot_trained` events.

    A span begins with the train phase, or when the ranks change in it, and ends the same way. How far the update was
    that a death broke off, the log does not say: it counts as training, and so does what is made again.
    """

    def __init__(self) -> None:
        self._node_of: dict[str, str | None] = {}
        """Of each rank; None if it is on a reserved GPU."""
        self._nodes: list[str] = []
        """Of the spot ranks that train now, one for each GPU."""
        self._iteration: int | None = None
        """Of the train phase that lasts."""
        self._since_s = 0.0

    def add(self, event: Event) -> list[Mapping[str, Any]]:
        """The spans that end with this event."""
        time_s = float(event["time_s"])
        match event["kind"]:
            case "rank_started":
                self._node_of[event["worker"]] = event["node"]
            case "phase_started" if event["name"] == "train":
                self._iteration, self._since_s = event["iteration"], time_s
            case "phase" if event["name"] == "train":
                ended = self._span(float(event["end_s"]))
                self._iteration = None
                return ended
            case "regrouped" if any(member in self._node_of for member in event["members"]):
                ended = self._span(time_s - event["regroup_s"])
                nodes = [self._node_of.get(member) for member in event["members"]]
                self._nodes, self._since_s = [node for node in nodes if node is not None], time_s
                return ended
        return []

    def _span(self, end_s: float) -> list[Mapping[str, Any]]:
        if self._iteration is None or not self._nodes or end_s <= self._since_s:
            return []
        span = {"start_s": self._since_s, "end_s": end_s, "lost": False}
        nodes = sorted(set(self._nodes))
        return [{"iteration": self._iteration, "nodes": nodes, "gpus": len(self._nodes), **span}]
