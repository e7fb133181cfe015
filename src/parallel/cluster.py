"""What the training ranks see of the cluster when there are several.

All ranks run the same training loop on the same samples; they share the work of making them and of the updates. Ranks
that share sequences are one worker: their leader leases requests, and all of them denoise. Rank 0 speaks for the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from src.core.clock import Clock, monotonic_s
from src.core.protocols import Cluster, Engine, OnStep, never, unwatched
from src.core.types import Commit, Exploration, PolicyVersion, SampleRequest, SampleResult, WorkReport
from src.parallel.mesh import World
from src.parallel.shared import EngineOfGroup, Part

T = TypeVar("T")


class SharedEngine(EngineOfGroup):
    """The engines of ranks that share sequences, as one (`core.protocols.Engine`).

    The leader serves, and tells the others what to denoise; these `follow` meanwhile.

    Args:
        engine: this rank's.
    """

    def __init__(self, *, engine: Engine, world: World) -> None:
        super().__init__(engine)
        self._world = world

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
        if should_yield is not never:  # the others would go on, and wait for this rank in the next step
            raise ValueError("ranks that share sequences finish what they began: should_yield must be `never`")
        self._tell(Part(tuple(requests), tuple(resume)))
        return self._engine.serve(requests, worker, resume=resume, commit_every=commit_every, on_step=on_step)

    def assist(
        self,
        requests: Sequence[SampleRequest],
        *,
        resume: Sequence[Commit] = (),
        should_yield: Callable[[], bool] = never,
    ) -> None:
        self._engine.assist(requests, resume=resume, should_yield=should_yield)

    def follow(self) -> None:
        """Denoises what the leader serves, until it `release`s."""
        while (part := self._tell(None)) is not None:
            self._engine.assist(part.requests, resume=part.resume)

    def release(self) -> None:
        """The leader has served all."""
        self._tell(None)

    def _tell(self, part: Part | None) -> Part | None:
        return _broadcast(part, self._world.mesh.sequence_objects)


class RankCluster:
    """The cluster as one of several training ranks sees it (`core.protocols.Cluster`).

    Every method is called by all ranks, in the same order. What rank 0 hears is told to all, so they decide alike.

    Args:
        world: the ranks.
        engine: of this rank.
        connect: connects to the coordinator with this engine, as worker number `dp_rank`; only leaders do.
    """

    now: Clock

    def __init__(self, *, world: World, engine: Engine, connect: Callable[[Engine, int], Cluster]) -> None:
        self._world = world
        self._engine = SharedEngine(engine=engine, world=world)
        mesh = world.mesh
        self._own = connect(self._engine, mesh.snapshot.dp_rank) if mesh.leads_sequence else None
        self._speaker = self._own if mesh.snapshot.is_leader else None
        """The connection of rank 0; None on all others."""
        self.now = monotonic_s
        self.run, self.incarnation = self._hear(lambda cluster: (cluster.run, cluster.incarnation))

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        if self._speaker is None:
            self._engine.weights_changed()
        self._hear(lambda cluster: cluster.publish(version, save))  # nobody serves before it can be pulled

    def submit(self, requests: Sequence[SampleRequest], *, behind_rollouts: bool = False) -> None:
        self._say(lambda cluster: cluster.submit(requests, behind_rollouts=behind_rollouts))

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Each group of ranks sees to its share of the requests (helped by whoever is idle); all get all results."""
        results: list[SampleResult] = []
        if self._own is None:
            self._engine.follow()
        else:
            snapshot = self._world.mesh.snapshot
            results = self._own.collect(requests[snapshot.dp_rank :: snapshot.dp])
            self._engine.release()
        gathered: list[list[SampleResult]] = [[]] * self._world.mesh.snapshot.world
        dist.all_gather_object(gathered, results, group=self._world.mesh.world_objects)
        by_key = {result.key: result for of_rank in gathered for result in of_rank}
        return [by_key[request.key] for request in requests]

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        return self._hear(lambda cluster: cluster.close(requests, wait_s=wait_s))

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        self._say(lambda cluster: cluster.open_exploration(exploration, behind_rollouts=behind_rollouts))

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        return self._hear(lambda cluster: cluster.close_exploration(wait_s=wait_s))

    def planner_state(self) -> Mapping[str, Any]:
        return self._hear(lambda cluster: cluster.planner_state())

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        self._say(lambda cluster: cluster.restore_planner(state))

    def workers(self) -> int:
        return self._hear(lambda cluster: cluster.workers())

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        if self._speaker is None:
            yield
            return
        with self._speaker.phase(name, iteration):
            yield

    def lead(self, act: Callable[[], T]) -> T:
        return self._hear(lambda cluster: act())

    def record(self, kind: str, **fields: Any) -> None:
        self._say(lambda cluster: cluster.record(kind, **fields))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say(lambda cluster: cluster.log_metrics(step, metrics))

    def should_stop(self) -> bool:
        return self._hear(lambda cluster: cluster.should_stop())

    def _hear(self, ask: Callable[[Cluster], T]) -> T:
        """Rank 0 asks; all get the answer."""
        answer = None if self._speaker is None else ask(self._speaker)
        heard: T = _broadcast(answer, self._world.mesh.world_objects)  # type: ignore[assignment]
        return heard

    def _say(self, tell: Callable[[Cluster], None]) -> None:
        """Rank 0 tells something; the others do not wait for it."""
        if self._speaker is not None:
            tell(self._speaker)


class Connection(Cluster, Protocol):
    """A connection whose samples may also be asked for and taken by others."""

    def serve(self, requests: Sequence[SampleRequest]) -> None:
        """Makes samples until all these requests have their results."""


class ElasticCluster(RankCluster):
    """The cluster as one of several training ranks sees it that come and go: each method is an operation of the world.

    Results stay with the coordinator until all are there, so those of a rank that dies are not lost. Whoever is rank 0
    speaks; when it dies in the middle of a call, the next one makes the call again, and the coordinator, which knows
    the operation's number, does not do it twice.

    Args:
        world: the ranks.
        engine: of this rank.
        connect: connects to the coordinator with this engine; called once, when this rank first leads its group.
        run, incarnation, now: see `core.protocols.Cluster`.
    """

    def __init__(
        self,
        *,
        world: World,
        engine: Engine,
        connect: Callable[[Engine], Connection],
        run: str,
        incarnation: int,
        now: Clock,
    ) -> None:
        self._world = world
        self._engine = SharedEngine(engine=engine, world=world)
        self._connect = connect
        self._connection: Connection | None = None
        self.run, self.incarnation, self.now = run, incarnation, now

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        self._engine.weights_changed()  # whoever publishes
        self._hear(lambda cluster: cluster.publish(version, save))

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        self.submit(requests)
        self._world.run(lambda: self._serve(requests))
        return self.close(requests, wait_s=0.0)

    def _serve(self, requests: Sequence[SampleRequest]) -> None:
        if self._own is None:
            self._engine.follow()
        else:
            self._own.serve(requests)
            self._engine.release()

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        self.record("phase_started", name=name, iteration=iteration)
        start_s = self.now()
        yield
        self.record("phase", name=name, iteration=iteration, start_s=start_s, end_s=self.now())

    @property
    def _own(self) -> Connection | None:  # type: ignore[override]
        if not self._world.mesh.leads_sequence:
            return None
        if self._connection is None:
            self._connection = self._connect(self._engine)
        return self._connection

    @property
    def _speaker(self) -> Connection | None:  # type: ignore[override]
        return self._own if self._world.mesh.snapshot.is_leader else None

    def _hear(self, ask: Callable[[Cluster], T]) -> T:
        return self._world.run(lambda: super(ElasticCluster, self)._hear(ask))

    def _say(self, tell: Callable[[Cluster], None]) -> None:
        """Unlike ranks that stay, the others wait: rank 0 may die before it has spoken, and then another one must."""
        self._hear(tell)


def _broadcast(value: T, group: ProcessGroup) -> T:
    """The value of the group's first rank."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
