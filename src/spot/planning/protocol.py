"""What a planner is told and what it answers: its events and actions.

Opened(i+1)          exploration of batch i+1 may begin; the workers are still rolling out batch i
KeptRegenerated(i)   the rollouts of batch i are there: the payoff of what was explored for it
TrainingStarted      the time that exploration has, begins
SeedsExplored ...    rewards come in, in any order; LeaseServed and WorkersChanged tell how fast
TrainingEnded        the time is over
Audited(i)           uniformly drawn seeds of batch i, made again: how well exploration ranked
Closed               what has come counts, the rest is dropped
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Worker:
    """A live spot worker. A lease is one pass of `batch_size` samples, and takes as long if it holds fewer."""

    name: str
    batch_size: int


# What happens


@dataclass(frozen=True)
class Opened:
    """Seeds may be explored for the batch of `iteration`. Prompts are positions 0..prompts-1 in that batch."""

    iteration: int
    prompts: int
    """P"""
    keep: int
    """G: seeds per prompt that will be trained on."""
    steps: int
    """T: denoising steps of a rollout."""
    workers: tuple[Worker, ...]
    previews: tuple[int, ...] = ()
    """Fewer step counts that exploration may use instead of T; correlation decides whether it does."""
    reserved_usd_per_hour: float = 0.0
    """Of all training GPUs together."""
    spot_usd_per_hour: float = 0.0
    """Of one worker."""

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("keep", 2), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"Opened.{name} must be at least {least}, got {getattr(self, name)}")
        if not all(0 < steps < self.steps for steps in self.previews):
            raise ValueError(f"Opened.previews must be in 1..steps-1={self.steps - 1}, got {self.previews}")


@dataclass(frozen=True)
class SeedsExplored:
    """Results of an iteration's exploration: (prompt, reward); the reward is None if the sample failed for good."""

    iteration: int
    rewards: tuple[tuple[int, float | None], ...]


@dataclass(frozen=True)
class LeaseServed:
    """A worker finished a pass, of whatever kind: `steps` denoising steps for a full batch or less."""

    worker: str
    steps: int
    seconds: float


@dataclass(frozen=True)
class WorkersChanged:
    """Who is alive now. What the others held is made by those who remain."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class TrainingStarted:
    """The trainer has its rollouts and computes updates from now on."""


@dataclass(frozen=True)
class TrainingEnded:
    """The updates are done; they took `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Closed:
    """Exploration is over; requests without a result are dropped."""


@dataclass(frozen=True)
class KeptRegenerated:
    """Rewards of the trained samples of `iteration`, by prompt: made with fresh weights from the kept seeds."""

    iteration: int
    rewards_PG: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Pair:
    """The reward of a uniformly drawn seed of a prompt when it was explored, and with fresh weights."""

    prompt: int
    stale: float
    fresh: float


@dataclass(frozen=True)
class Audited:
    """The audit of what was explored for `iteration`."""

    iteration: int
    pairs: tuple[Pair, ...]


Event = (
    Opened
    | SeedsExplored
    | LeaseServed
    | WorkersChanged
    | TrainingStarted
    | TrainingEnded
    | Closed
    | KeptRegenerated
    | Audited
)


# What is to be done about it


@dataclass(frozen=True)
class Explore:
    """Explore the next `count` candidate seeds of a prompt, with `steps` denoising steps each."""

    prompt: int
    count: int
    steps: int


@dataclass(frozen=True)
class StopExploring:
    """Nothing more will be asked for in this iteration, unless workers change. What was asked for still counts."""

    reason: str


Action = Explore | StopExploring


class Planner(Protocol):
    """Plans exploration, one iteration after the other.

    Events of a time that has passed (results after `Closed`, news of unknown iterations) are no errors: they change
    nothing. All methods are deterministic; worker names matter only as identities.
    """

    @property
    def training_s(self) -> float | None:
        """How long the next training is expected to take, if the planner has any idea."""

    def handle(self, now_s: float, event: Event) -> list[Action]:
        """Takes one event and returns what follows from it, in order. `now_s` never decreases."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but the constructor's arguments, in JSON types; may be taken at any moment."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave: the same events are answered by the same actions from then on."""
