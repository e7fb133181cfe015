"""Asking for seeds in small portions, as long as they will be back before training ends."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from src.spot.planning.outlook import Forecast, Speeds
from src.spot.planning.protocol import (
    Action,
    Audited,
    Closed,
    Event,
    Explore,
    KeptRegenerated,
    LeaseServed,
    Opened,
    SeedsExplored,
    StopExploring,
    TrainingEnded,
    TrainingStarted,
    Worker,
    WorkersChanged,
)

_PASSES_AHEAD = 2
"""Passes per worker that are asked for ahead: one that it makes and one that waits, so that nobody idles."""
_RESERVE_STEP = 0.1
"""Share of the training time that is held back more after a miss."""


@dataclass
class Round:
    """One iteration's exploration, while it is open."""

    opened: Opened
    opened_s: float
    steps: int
    workers: tuple[Worker, ...]
    asked: list[int]
    """Seeds asked for, by prompt."""
    rewards: list[list[float]]
    """What came back, by prompt."""
    back: list[int]
    """Seeds that came back, failed ones included, by prompt."""
    busy_since_s: dict[str, float] = field(default_factory=dict)
    """When each worker began the pass that it is making."""
    started_s: float | None = None
    seed_usd: float = 0.0
    """What exploring a seed costs at present: worker time at the spot price; 0 while nothing is known."""
    timed: bool = False
    """Whether it was known how much time there is."""
    ended: bool = False
    stopped: bool = False

    @classmethod
    def of(cls, now_s: float, opened: Opened) -> Round:
        return cls(
            opened=opened,
            opened_s=now_s,
            steps=opened.steps,
            workers=opened.workers,
            asked=[0] * opened.prompts,
            rewards=[[] for _ in range(opened.prompts)],
            back=[0] * opened.prompts,
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Round:
        opened = {**state["opened"], "previews": tuple(state["opened"]["previews"])}
        opened["workers"] = _workers(opened["workers"])
        return cls(**{**state, "opened": Opened(**opened), "workers": _workers(state["workers"])})

    @property
    def outstanding(self) -> int:
        """Seeds that were asked for and have not come back."""
        return sum(self.asked) - sum(self.back)

    @property
    def pass_size(self) -> int:
        """Samples that all workers together make in a pass each."""
        return sum(worker.batch_size for worker in self.workers)


def _workers(rows: Any) -> tuple[Worker, ...]:
    return tuple(Worker(**row) for row in rows)


class AnytimePlanner(ABC):
    """Keeps the workers supplied until the next portion would come too late; what to ask for is decided by subclasses.

    A portion is asked for if it fits beside all that is outstanding: until d, the end of training that is undercut with
    probability `miss_rate` / 2, worker w finishes floor((d - begin_w - slack_w) / pass_w) passes, begun at begin_w. In
    the first iteration nothing is known; then seeds are asked for until exploration is closed.

    Args:
        max_seeds_per_prompt: the largest N: never more seeds are asked for per prompt.
        miss_rate: accepted share of iterations in which a seed comes too late; it is then dropped, nothing waits.
    """

    def __init__(self, *, max_seeds_per_prompt: int = 64, miss_rate: float = 0.01) -> None:
        if max_seeds_per_prompt < 1:
            raise ValueError(f"planner.max_seeds_per_prompt must be at least 1, got {max_seeds_per_prompt}")
        if not 0 < miss_rate < 1:
            raise ValueError(f"planner.miss_rate must be between 0 and 1, got {miss_rate}")
        self._max_seeds_per_prompt = max_seeds_per_prompt
        self._miss_rate = miss_rate
        self._training = Forecast()
        self._iteration = Forecast()  # from batch start to the end of training
        self._speeds = Speeds()
        self._reserve = 0.0
        self._round: Round | None = None

    # What subclasses decide

    def _prepare(self, now: Round, room: float) -> None:  # noqa: B027
        """There are workers, and nothing is asked for yet: the last chance to choose `now.steps`."""

    @abstractmethod
    def _next(self, now: Round, room: float) -> Explore | str:
        """What to ask for next, if at most `room` more seeds fit, or the reason why nothing more."""

    def _begin(self, now: Round) -> None:  # noqa: B027
        """A round was opened."""

    def _learn(self, event: KeptRegenerated | Audited) -> None:  # noqa: B027
        """Takes news of how an earlier exploration did."""

    def _finish(self, now: Round) -> None:  # noqa: B027
        """The round is over."""

    @property
    def training_s(self) -> float | None:
        return self._training.expected

    # Events

    def handle(self, now_s: float, event: Event) -> list[Action]:
        match event:
            case Opened():
                return self._open(now_s, event)
            case LeaseServed(worker, steps, seconds):
                self._speeds.observe(worker, steps, seconds)
                if self._round is not None:
                    self._round.busy_since_s[worker] = now_s
                return []
            case KeptRegenerated() | Audited():
                self._learn(event)
                return []
        if self._round is None:
            return []
        match event:
            case SeedsExplored(iteration, rewards):
                if iteration != self._round.opened.iteration:
                    return []
                self._take(self._round, rewards)
            case WorkersChanged(workers):
                self._round.workers = workers
                self._round.stopped = False  # there may be time now
                self._speeds.keep(workers)
            case TrainingStarted():
                self._round.started_s = now_s
            case TrainingEnded(seconds):
                self._training.observe(seconds)
                self._iteration.observe(now_s - self._round.opened_s)
                self._round.ended = True
            case Closed():
                if self._round.timed:
                    missed = self._round.outstanding > 0
                    self._reserve = max(0.0, self._reserve + _RESERVE_STEP * (missed - self._miss_rate))
                self._finish(self._round)
                self._round = None
                return []
        return self._feed(now_s, self._round)

    def _open(self, now_s: float, opened: Opened) -> list[Action]:
        self._round = Round.of(now_s, opened)
        self._speeds.keep(opened.workers)
        self._begin(self._round)
        return self._feed(now_s, self._round)

    def _take(self, now: Round, rewards: tuple[tuple[int, float | None], ...]) -> None:
        for prompt, reward in rewards:
            now.back[prompt] += 1
            if reward is not None and math.isfinite(reward):
                now.rewards[prompt].append(reward)

    def _feed(self, now_s: float, now: Round) -> list[Action]:
        actions: list[Action] = []
        if now.stopped or now.ended or not now.workers:
            return actions
        if not any(now.asked):
            now.seed_usd = self._seed_usd(now)
            self._prepare(now, self._room(now_s, now))
        room = self._room(now_s, now)
        now.timed = now.timed or room < math.inf
        now.seed_usd = self._seed_usd(now)
        ahead = _PASSES_AHEAD * now.pass_size
        while now.outstanding < ahead:
            left = room - now.outstanding
            if left < 1 and now.started_s is None:
                break  # the time for training has not begun to pass
            choice: Explore | str = self._next(now, left) if left >= 1 else "no time left"
            if isinstance(choice, str):
                now.stopped = True
                return [*actions, StopExploring(choice)]
            now.asked[choice.prompt] += choice.count
            actions.append(choice)
        return actions

    # Prospects

    def _room(self, now_s: float, now: Round) -> float:
        """Seeds that will be explored before training ends, those that are outstanding included; may be infinite."""
        training_s = self._training.at_least(self._miss_rate / 2)
        if training_s is None:
            return math.inf
        start_s = now_s if now.started_s is None else now.started_s
        slack = self._speeds.slack(self._miss_rate / 2 / max(len(now.workers), 1))
        room = 0
        for worker in now.workers:
            step_s = self._speeds.step_s(worker.name)
            if step_s is None:
                return math.inf
            pass_s = step_s * now.steps
            begin_s = now_s
            if now.started_s is not None:  # before that it is making rollouts
                begin_s = max(now.busy_since_s.get(worker.name, now_s), now_s - pass_s)
            left_s = start_s + training_s * (1 - self._reserve) - begin_s - slack * pass_s
            room += max(0, math.floor(left_s / pass_s)) * worker.batch_size
        return room

    def _seed_usd(self, now: Round) -> float:
        rates = [
            worker.batch_size / (step_s * now.steps)
            for worker in now.workers
            if (step_s := self._speeds.step_s(worker.name)) is not None
        ]
        return now.opened.spot_usd_per_hour / 3600 * len(rates) / math.fsum(rates) if rates else 0.0

    # State

    def state_dict(self) -> dict[str, Any]:
        return {
            "training": self._training.state_dict(),
            "iteration": self._iteration.state_dict(),
            "speeds": self._speeds.state_dict(),
            "reserve": self._reserve,
            "round": None if self._round is None else asdict(self._round),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training.load_state_dict(state["training"])
        self._iteration.load_state_dict(state["iteration"])
        self._speeds.load_state_dict(state["speeds"])
        self._reserve = state["reserve"]
        self._round = None if state["round"] is None else Round.from_state(state["round"])
