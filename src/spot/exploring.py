"""Between the planner and the queue: what the log tells the planner, and what becomes of its decisions. Pure.

`PlannerFeed` folds the event log, row by row, into the planner's events. So a recorded log, fed to a planner of the
same kind and state, gives the recorded decisions (its rows `explore_asked` and `explore_stopped`) again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from src.core.types import Exploration, RequestKey, SampleRequest
from src.spot.planning.protocol import (
    Action,
    Audited,
    Closed,
    Event,
    Explore,
    KeptRegenerated,
    LeaseServed,
    Opened,
    Pair,
    Planner,
    SeedsExplored,
    StopExploring,
    TrainingEnded,
    TrainingStarted,
    Worker,
    WorkersChanged,
)
from src.spot.sizing import passes_of


@dataclass
class _Spot:
    """A live spot worker."""

    worker: Worker
    noticed: bool = False
    warm: bool = False
    """It has served a lease."""


@dataclass(frozen=True)
class _Lease:
    worker: str
    granted_s: float


class PlannerFeed:
    """Tells a planner what was logged: `feed.add(row)` returns what the planner wants done about it.

    A pass is what a lease took, from grant to results, divided by its passes: a lease holds several if they are short.
    The first lease of a worker is passed over, since it warms up: it loads weights, allocates, compiles.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._spot: dict[str, _Spot] = {}
        self._leases: dict[int, _Lease] = {}
        self._rolled_out: dict[int, list[float]] = {}
        """Rewards by prompt of the batch that is being rolled out."""
        self._forecast_s: float | None = None
        self.metrics: dict[str, float] = {}
        """How well the last training time was foreseen."""

    def add(self, row: Mapping[str, Any]) -> list[Action]:
        """Takes the next row of the log, and returns what the planner answers, in order."""
        time_s = float(row["time_s"])
        return [action for event in self._events(row, time_s) for action in self._planner.handle(time_s, event)]

    def _events(self, row: Mapping[str, Any], time_s: float) -> Sequence[Event]:
        match row["kind"]:
            case "worker_joined" if row["role"] == "spot":
                self._spot[row["worker"]] = _Spot(Worker(row["worker"], row["batch_size"]))
                return [WorkersChanged(self._workers)]
            case "notice" if spot := self._spot.get(row["worker"]):
                spot.noticed = True
                return [WorkersChanged(self._workers)]
            case "worker_lost" if spot := self._spot.pop(row["worker"], None):
                return [] if spot.noticed else [WorkersChanged(self._workers)]
            case "lease_granted" if row["worker"] in self._spot:
                self._leases[row["lease"]] = _Lease(row["worker"], time_s)
            case "lease_lost":
                self._leases.pop(row["lease"], None)
            case "lease_done" if lease := self._leases.pop(row["lease"], None):
                return self._served(lease, row, time_s)
            case "results_accepted":
                return self._accepted(row)
            case "request_failed" if row["request_kind"] == "explore":
                return [SeedsExplored(row["iteration"], ((row["instance"], None),))]
            case "exploration_opened":
                return [self._opened(row)]
            case "exploration_closed":
                return [Closed()]
            case "phase_started" if row["name"] == "rollout":
                self._rolled_out = {}
            case "phase_started" if row["name"] == "train":
                self._forecast_s = self._planner.training_s
                groups = [tuple(sorted(group)) for _, group in sorted(self._rolled_out.items())]
                return [KeptRegenerated(row["iteration"], tuple(groups)), TrainingStarted()]
            case "phase" if row["name"] == "train":
                return [self._trained(row["end_s"] - row["start_s"])]
            case "audited":
                pairs = tuple(Pair(pair["instance"], pair["stale"], pair["fresh"]) for pair in row["pairs"])
                return [Audited(row["iteration"], pairs)]
        return []

    @property
    def _workers(self) -> tuple[Worker, ...]:
        """Those that may get leases."""
        return tuple(spot.worker for spot in self._spot.values() if not spot.noticed)

    def _served(self, lease: _Lease, row: Mapping[str, Any], time_s: float) -> Sequence[Event]:
        """A lease that was begun by another worker has its last steps only; one without any was only decoded."""
        spot, steps = self._spot.get(lease.worker), row["steps"] // row["count"]
        if spot is None:
            return []
        cold, spot.warm = not spot.warm, True
        if cold or not steps:
            return []
        passes = passes_of(row["count"], spot.worker.batch_size)
        return [LeaseServed(lease.worker, steps, (time_s - lease.granted_s) / passes)]

    def _accepted(self, row: Mapping[str, Any]) -> Sequence[Event]:
        rewards = tuple((instance, reward) for instance, _, reward in row["results"])
        if row["request_kind"] == "rollout":
            for instance, reward in rewards:
                if reward is not None:
                    self._rolled_out.setdefault(instance, []).append(reward)
        return [SeedsExplored(row["iteration"], rewards)] if row["request_kind"] == "explore" else []

    def _opened(self, row: Mapping[str, Any]) -> Opened:
        return Opened(
            iteration=row["iteration"],
            prompts=row["prompts"],
            keep=row["keep"],
            steps=row["steps"],
            workers=self._workers,
            previews=tuple(row["previews"]),
            reserved_usd_per_hour=row["reserved_usd_per_hour"],
            spot_usd_per_hour=row["spot_usd_per_hour"],
        )

    def _trained(self, seconds: float) -> TrainingEnded:
        self.metrics = {}
        if self._forecast_s is not None and seconds > 0:
            error = abs(math.log(self._forecast_s / seconds))
            self.metrics = {"time/train_forecast_s": self._forecast_s, "time/train_forecast_error": error}
        return TrainingEnded(seconds)

    def state_dict(self) -> dict[str, Any]:
        """The planner's state and kind, in JSON types: nothing else outlives an iteration."""
        return {"planner": type(self._planner).__name__, "state": self._planner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave. A planner of another kind has its own knowledge, and begins anew."""
        if state["planner"] == type(self._planner).__name__:
            self._planner.load_state_dict(state["state"])


class OpenExploration:
    """The exploration that is open: which candidate seeds were asked for."""

    def __init__(self, exploration: Exploration) -> None:
        self._exploration = exploration
        self._next = [0] * len(exploration.prompts)
        self.iteration = exploration.iteration
        self.keys: list[RequestKey] = []
        """In the order in which they were asked for."""

    def ask(self, actions: Sequence[Explore]) -> list[SampleRequest]:
        """The requests of the next candidates."""
        requests = [request for action in actions for request in self._candidates(action)]
        self.keys += [request.key for request in requests]
        return requests

    def _candidates(self, action: Explore) -> list[SampleRequest]:
        first = self._next[action.prompt]
        self._next[action.prompt] += action.count
        return [
            self._exploration.request(action.prompt, first + offset, action.steps) for offset in range(action.count)
        ]

    def metrics(self, came: int) -> dict[str, float]:
        """Of the exploration that ends with so many results."""
        steps = {"explore/steps": float(self.keys[-1].steps)} if self.keys else {}
        return {"explore/requested": float(len(self.keys)), "explore/late": float(len(self.keys) - came), **steps}


def opening(exploration: Exploration) -> dict[str, Any]:
    """The fields of an `exploration_opened` row, prices apart."""
    return {
        "iteration": exploration.iteration,
        "version": str(exploration.policy),
        "prompts": len(exploration.prompts),
        "keep": exploration.keep,
        "steps": exploration.spec.steps,
        "previews": [spec.steps for spec in exploration.previews],
    }


def asked_rows(actions: Sequence[Explore]) -> list[list[int]]:
    """The `seeds` field of an `explore_asked` row: neighbours of one prompt and number of steps are added up."""
    runs = groupby(actions, key=lambda action: (action.prompt, action.steps))
    return [[prompt, sum(action.count for action in run), steps] for (prompt, steps), run in runs]


def decisions(actions: Sequence[Action]) -> tuple[list[Explore], list[str]]:
    """What is to be explored, and the reasons to stop."""
    asked = [action for action in actions if isinstance(action, Explore)]
    return asked, [action.reason for action in actions if isinstance(action, StopExploring)]
