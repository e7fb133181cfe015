"""What the training ranks see of the cluster when there are several.

All ranks run the same training loop on the same samples; they share the work of making them and of the updates. Ranks
that share sequences are one worker: their leader leases requests, and all of them denoise. Rank 0 speaks for the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from src.core.clock import monotonic_s
from src.core.protocols import Cluster, Engine, OnStep, never, unwatched
from src.core.types import Commit, Exploration, PolicyVersion, SampleRequest, SampleResult, WorkReport
from src.parallel.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class _Part:
    """What the ranks of a group denoise together."""

    requests: tuple[SampleRequest, ...]
    resume: tuple[Commit, ...]


class SharedEngine:
    """The engines of ranks that share sequences, as one (`core.protocols.Engine`).

    The leader serves, and tells the others what to denoise; these `follow` meanwhile.

    Args:
        engine: this rank's.
    """

    def __init__(self, *, engine: Engine, mesh: Mesh) -> None:
        self._engine = engine
        self._mesh = mesh

    @property
    def fingerprint(self) -> str:
        return self._engine.fingerprint

    @property
    def batch_size(self) -> int:
        return self._engine.batch_size

    def load_weights(self, folder: Path) -> str:
        return self._engine.load_weights(folder)

    def weights_changed(self) -> str:
        return self._engine.weights_changed()

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
        self._tell(_Part(tuple(requests), tuple(resume)))
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

    def _tell(self, part: _Part | None) -> _Part | None:
        return _broadcast(part, self._mesh.sequence_objects)


class RankCluster:
    """The cluster as one of several training ranks sees it (`core.protocols.Cluster`).

    Every method is called by all ranks, in the same order. What rank 0 hears is told to all, so they decide alike.

    Args:
        mesh: the ranks.
        engine: of this rank.
        connect: connects to the coordinator with this engine, as worker number `dp_rank`; only leaders do.
    """

    def __init__(self, *, mesh: Mesh, engine: Engine, connect: Callable[[Engine, int], Cluster]) -> None:
        self._mesh = mesh
        self._engine = SharedEngine(engine=engine, mesh=mesh)
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
        if self._speaker is not None:
            self._speaker.submit(requests, behind_rollouts=behind_rollouts)

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Each group of ranks sees to its share of the requests (helped by whoever is idle); all get all results."""
        results: list[SampleResult] = []
        if self._own is None:
            self._engine.follow()
        else:
            snapshot = self._mesh.snapshot
            results = self._own.collect(requests[snapshot.dp_rank :: snapshot.dp])
            self._engine.release()
        gathered: list[list[SampleResult]] = [[]] * self._mesh.snapshot.world
        dist.all_gather_object(gathered, results, group=self._mesh.world_objects)
        by_key = {result.key: result for of_rank in gathered for result in of_rank}
        return [by_key[request.key] for request in requests]

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        return self._hear(lambda cluster: cluster.close(requests, wait_s=wait_s))

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        if self._speaker is not None:
            self._speaker.open_exploration(exploration, behind_rollouts=behind_rollouts)

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        return self._hear(lambda cluster: cluster.close_exploration(wait_s=wait_s))

    def planner_state(self) -> Mapping[str, Any]:
        return self._hear(lambda cluster: cluster.planner_state())

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        if self._speaker is not None:
            self._speaker.restore_planner(state)

    def workers(self) -> int:
        return self._hear(lambda cluster: cluster.workers())

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        if self._speaker is None:
            yield
            return
        with self._speaker.phase(name, iteration):
            yield

    def record(self, kind: str, **fields: Any) -> None:
        if self._speaker is not None:
            self._speaker.record(kind, **fields)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._speaker is not None:
            self._speaker.log_metrics(step, metrics)

    def should_stop(self) -> bool:
        return self._hear(lambda cluster: cluster.should_stop())

    def _hear(self, ask: Callable[[Cluster], T]) -> T:
        """Rank 0 asks; all get the answer."""
        answer = None if self._speaker is None else ask(self._speaker)
        heard: T = _broadcast(answer, self._mesh.world_objects)  # type: ignore[assignment]
        return heard


def _broadcast(value: T, group: ProcessGroup) -> T:
    """The value of the group's first rank."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
