"""The seams between the layers: spot, rl and parallel never import one another, they meet here.

App wires the two sides of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from src.core.clock import Clock
from src.core.types import (
    Commit,
    Exploration,
    ExploredByInstance,
    Generation,
    PolicyVersion,
    Prompt,
    RequestKind,
    SampleRequest,
    SampleResult,
    Snapshot,
    WorkReport,
)

T = TypeVar("T")

OnStep = Callable[[int, Sequence[Commit]], None]
"""Told after each denoising step: the next step, and what is committed before it (often nothing)."""


def unwatched(step: int, commits: Sequence[Commit]) -> None:
    """Nobody wants to know."""


def never() -> bool:
    """Work is finished whatever comes."""
    return False


class GroupLost(RuntimeError):
    """A member died, froze or left in the middle of a collective. The group is dropped; form the next generation."""


class Engine(Protocol):
    """Makes samples: encodes the prompt, denoises, decodes, scores. One per process, one set of weights."""

    @property
    def fingerprint(self) -> str:
        """The arithmetic behind its numbers; log-probabilities compare only between equal fingerprints."""

    @property
    def batch_size(self) -> int:
        """Rows of every forward pass; leases come in multiples of it."""

    def load_weights(self, folder: Path) -> str:
        """Takes the weights published in `folder`; returns the checksum of what the model then holds."""

    def serve(
        self,
        requests: Sequence[SampleRequest],
        worker: str,
        *,
        resume: Sequence[Commit] = (),
        commit_every: int = 0,
        on_step: OnStep = unwatched,
        should_yield: Callable[[], bool] = never,
    ) -> tuple[list[SampleResult], WorkReport]:
        """One result per request, in order. It never raises for one sample: a failed one has `error` set.

        Args:
            requests: of one kind, policy and spec.
            resume: where each request goes on, all before the same step; empty to start from noise. With equal
                fingerprints the samples are bit-equal to uninterrupted ones.
            commit_every: `on_step` gets commits before every so many steps of the grid; 0 for none.
            should_yield: asked before each step. Once it is true, and it then stays so, what stands there is
                committed, and no result is returned unless only decoding and scoring are left.
        """

    def assist(
        self,
        requests: Sequence[SampleRequest],
        *,
        resume: Sequence[Commit] = (),
        should_yield: Callable[[], bool] = never,
    ) -> None:
        """Takes its part in samples that several processes make together, and whose results another one returns.

        It asks `should_yield` as often as `serve` does there.
        """

    def weights_changed(self) -> str:
        """Tells the engine that its model was updated in place; returns the new checksum."""


class Cluster(Protocol):
    """What a training rank sees of everybody else: the coordinator, and through it the spot workers."""

    run: str
    """Name of the run."""
    incarnation: int
    """How often it was started before."""
    now: Clock
    """What durations are measured by."""

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        """Makes weights available to the workers as `version`.

        `save(folder)` writes them and returns their checksum.

        Returns when they can be pulled; waits for no worker.
        """

    def submit(self, requests: Sequence[SampleRequest], *, behind_rollouts: bool = False) -> None:
        """Queues requests for the workers and returns at once.

        Args:
            behind_rollouts: not before the next rollouts are queued, so that no worker is busy when they come.
        """

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Queues requests, serves them too, and returns one result each in the order given when all are done.

        A request that failed for good has a result with `error` set.
        """

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        """Ends the submitted requests: returns what has come within `wait_s` seconds; the rest is dropped."""

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        """From now on the planner decides which seeds of it the workers explore; returns at once.

        Args:
            behind_rollouts: see `submit`.
        """

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        """Ends the exploration that is open, if any: returns what has come within `wait_s` seconds, in the order in
        which it was asked for; the rest is dropped."""

    def planner_state(self) -> Mapping[str, Any]:
        """What the planner has learnt, in JSON types."""

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        """Takes over what `planner_state` gave, before the first exploration is opened."""

    def workers(self) -> int:
        """Live spot workers."""

    def phase(self, name: str, iteration: int) -> AbstractContextManager[None]:
        """Marks what the trainer does for the timeline: `with cluster.phase("train", i): ...`."""

    def lead(self, act: Callable[[], T]) -> T:
        """Has one of the training ranks do something for all; returns on each what came of it. It may be done again."""

    def record(self, kind: str, **fields: Any) -> None:
        """Appends one event to the run's event log."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one row to metrics.jsonl and shows it to the loggers."""

    def should_stop(self) -> bool:
        """Whether the user asked the job to finish and save."""


class Team(Protocol):
    """An elastic group as one of its members sees whoever decides about it."""

    def next(self, after: int) -> Generation | None:
        """Waits for a generation later than `after` that includes this process; None if there will be none.

        Asking says that this process has left its group and is ready for another.
        """

    def broken(self, generation: int) -> None:
        """The group of this generation failed, and this process has dropped it."""

    def boundary(self, generation: int, *, admits: bool = True) -> bool:
        """Whether all members are to leave the group now, between two steps; asked by the first of them, and by
        all who still wait for the others' arrival.

        `admits` says whether it is a moment to end the group for the sake of who waits to join.
        """


class TeamEngine(Engine, Protocol):
    """The engine of a team's member: as long as a generation lasts, its members make samples together.

    The first of them leads: it serves, and the others follow. At the first error of the group it is dropped, and
    whatever the member was doing raises GroupLost.
    """

    @property
    def patience_s(self) -> float:
        """How long members wait for one another in the group. A leader has to speak more often."""

    def form(
        self,
        team: str,
        generation: Generation,
        rank: int,
        *,
        store_port: int,
        is_over: Callable[[], bool] = never,
    ) -> None:
        """Meets the other members of the generation as its member `rank`; `is_over` tells while it waits for them
        whether one is lost or leaves."""

    def drop(self) -> None:
        """Leaves the group, if there is one: from now on the engine works alone."""

    def announce(self, requests: Sequence[SampleRequest], *, resume: Sequence[Commit] = ()) -> None:
        """The leader is going to serve these next."""

    def remind(self) -> None:
        """The leader has nothing to do."""

    def release(self) -> None:
        """The leader ends the generation."""

    def follow(self, prepare: Callable[[PolicyVersion], None]) -> None:
        """Takes part in what the leader announces, until it ends the generation.

        Args:
            prepare: has this engine hold the policy.
        """


class Updater(Protocol):
    """Gradient steps across the training ranks: accumulation, clipping and recovery live behind it."""

    @property
    def snapshot(self) -> Snapshot:
        """The membership at this moment."""

    @property
    def skipped(self) -> int:
        """Updates so far that changed nothing, because their gradient was not finite."""

    def apply(self, update: int, closure: Callable[[], T]) -> tuple[float, T]:
        """Runs optimizer update `update`, counted from the start of the run.

        Returns the gradient norm, over all ranks and before clipping, and what `closure` returned. That computes all
        micro-batches of the update by calling `backward` for each; a change of membership may call it again.
        """

    def together(self, compute: Callable[[], T]) -> T:
        """Runs whatever else takes several ranks; a change of membership may call `compute` again."""

    def backward(self, loss: Any) -> None:
        """Accumulates the gradient of one micro-batch's share of the loss."""

    def total(self, sums: Any) -> Any:
        """A tensor of sums over this rank's micro-batches, added up over all ranks; to be called in `apply` or
        `together`."""

    def state(self, names: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The optimizer's whole state, tensors and scalars, keyed `field/parameter`. All ranks must call it.

        `names` are the model's parameters by name. The state fits any number of ranks.
        """

    def restore(self, names: Mapping[str, Any], tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Takes the optimizer state that `state` gave, and the weights that the model holds now."""


class Explorable(Protocol):
    """What exploration needs of the training module."""

    run: str
    seed: int
    cluster: Cluster

    @property
    def policy(self) -> PolicyVersion:
        """The version of the weights at this moment."""

    def publish(self) -> None:
        """Makes the current weights available to the workers, once per version."""

    def request(self, kind: RequestKind, iteration: int, instance: int, prompt: Prompt, seed: int) -> SampleRequest:
        """A sample of an iteration's batch under the current weights, denoised as that iteration's rollouts are."""

    def exploration(self, iteration: int, prompts: Sequence[Prompt]) -> Exploration:
        """What the current weights may explore for an iteration's batch."""

    def offer(self, iteration: int, explored: ExploredByInstance, version: PolicyVersion) -> None:
        """Hands over what a policy explored for an iteration's batch, so that it can choose its seeds."""

    def audit(self, iteration: int, fresh: Mapping[tuple[int, int], float]) -> Mapping[str, float]:
        """Metrics of how well the exploration of an iteration ranked.

        `fresh` holds rewards by (instance, seed) of audited seeds, made again under the iteration's weights.
        """

    def audited_seeds(self, iteration: int) -> Sequence[tuple[int, int]]:
        """(instance, seed) of explored seeds, drawn uniformly, that are to be made again as an audit."""
