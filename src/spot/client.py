"""A training rank's view of everybody else, over Ray (`core.protocols.Cluster`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from src.core.clock import Clock, RunClock
from src.core.protocols import Engine
from src.core.types import (
    NO_WORK,
    Commit,
    Exploration,
    Generation,
    Lease,
    Member,
    PolicyVersion,
    SampleRequest,
    SampleResult,
    WorkReport,
)
from src.spot import session, weights
from src.spot.coordinator import CoordinatorLost
from src.spot.deaths import ProcessId
from src.spot.members import Introduction, Joined, rank_member, reserved
from src.spot.session import ray

T = TypeVar("T")


def call(method: Any, *arguments: Any) -> Any:
    """Calls a method of the coordinator and waits.

    Raises what the method raises, and CoordinatorLost if that process is dead.
    """
    return _wait(method.remote(*arguments))


def _wait(answer: Any) -> Any:
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise CoordinatorLost from error


class RayTransport:
    """A spot worker's way to the coordinator (`worker.Transport`)."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._commits: list[Any] = []  # on their way, since the last push
        self._dropped = False
        self._pulled: Any = None  # the answer that is waited for

    def introduce(self) -> Introduction:
        introduction: Introduction = call(self._host.introduce)
        return introduction

    def join(self, joined: Joined) -> Introduction:
        introduction: Introduction = call(self._host.join, joined)
        return introduction

    def pull(
        self, worker: str, *, meanwhile: Callable[[], None] | None = None, every_s: float | None = None
    ) -> Lease | None:
        self._pulled = self._host.pull.remote(worker)
        while meanwhile is not None and not ray.wait([self._pulled], timeout=every_s)[0]:
            meanwhile()
        lease: Lease | None = _wait(self._pulled)
        self._pulled = None
        return lease

    def stand_down(self, worker: str) -> None:
        call(self._host.stand_down, worker)
        if self._pulled is not None:  # `meanwhile` has failed: nobody else may fetch what is granted next
            _wait(self._pulled)
            self._pulled = None

    def commit(self, worker: str, lease: int, step: int, commits: Sequence[Commit]) -> None:
        self._commits.append(self._host.commit.remote(worker, lease, step, commits))

    def is_dropped(self) -> bool:
        if self._commits and not self._dropped:
            arrived, self._commits = ray.wait(self._commits, num_returns=len(self._commits), timeout=0)
            self._dropped = not all(_wait(arrived))
        return self._dropped

    def push(self, worker: str, lease: int, results: Sequence[SampleResult], report: WorkReport) -> None:
        # An actor with coroutines may start a small call before a large one that was sent earlier.
        _wait(self._commits)
        self._commits.clear()
        self._dropped = False
        call(self._host.push, worker, lease, results, report)

    def heartbeat(self, worker: str) -> None:
        self._host.heartbeat.remote(worker)

    def notice(self, worker: str, grace_s: float) -> None:
        self._host.notice.remote(worker, grace_s)


class RayTeam:
    """A process's place in an elastic group (`core.protocols.Team`). Its death is known at once from now on.

    Args:
        team, member: names of the group and of this process.
    """

    def __init__(self, host: Any, *, team: str, member: str) -> None:
        self._host = host
        self._team = team
        self._member = member
        host.watch.remote(member, ProcessId.own())

    def next(self, after: int) -> Generation | None:
        generation: Generation | None = call(self._host.next_generation, self._team, self._member, after)
        return generation

    def broken(self, generation: int) -> None:
        self._host.broken.remote(self._member, generation)  # `next` follows, which waits for its consequence

    def boundary(self, generation: int, *, admits: bool = True) -> bool:
        return bool(call(self._host.boundary, self._member, generation, admits))


class OnceOnly:
    """The coordinator as training ranks see it whose leader may die in the middle of a call (see `Host.once`).

    Args:
        number: of the call that is made now; the same one on every rank that makes it.
    """

    def __init__(self, host: Any, *, number: Callable[[], int]) -> None:
        self._host = host
        self._number = number

    def __getattr__(self, method: str) -> _Method:
        return _Method(lambda *arguments: self._host.once.remote(self._number(), method, arguments))


@dataclass(frozen=True)
class _Method:
    """Stands for a method of an actor."""

    remote: Callable[..., Any]


class RayCluster:
    """The cluster as a training rank sees it. All methods raise CoordinatorLost when the coordinator is dead.

    Args:
        engine: makes samples with the weights under training, which it never loads: its results must carry
            the checksum that `save` returned when they were published.
        member: this rank; by default the first one.
        speaks_to: through whom it says what concerns the job and not this rank alone, if not directly.
    """

    def __init__(
        self, host: Any, *, engine: Engine, member: Member | None = None, speaks_to: OnceOnly | None = None
    ) -> None:
        self._worker = host
        self._host = host if speaks_to is None else speaks_to
        self._engine = engine
        introduction: Introduction = call(host.introduce)
        self.run = introduction.run
        self.incarnation = introduction.incarnation
        self._weights_root = introduction.weights_root
        self.now: Clock = RunClock(elapsed_s=introduction.elapsed_s)
        joined = reserved(member or rank_member(0, self.incarnation), engine)
        self._name = joined.member.name
        call(host.join, joined)

    @classmethod
    def connect(cls, address: str, *, engine: Engine, rank: int = 0) -> RayCluster:
        """Connects this process, rank number `rank`, to the job's Ray at `address` (see `Fleet.start`)."""
        host = session.connect(address)
        return cls(host, engine=engine, member=rank_member(rank, call(host.introduce).incarnation))

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        start_s = self.now()
        if version in weights.versions(self._weights_root):  # whose publisher died before it could tell
            published = weights.verify(self._weights_root, version)
        else:
            published = weights.publish(self._weights_root, version, save)
        publish_s = self.now() - start_s
        old = call(self._host.publish, version, published.checksum, published.bytes, publish_s)
        weights.remove(self._weights_root, old)

    def submit(self, requests: Sequence[SampleRequest], *, behind_rollouts: bool = False) -> None:
        call(self._host.submit, requests, behind_rollouts)

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        self.submit(requests)
        self.serve(requests)
        return self.close(requests, wait_s=0.0)

    def serve(self, requests: Sequence[SampleRequest]) -> None:
        """Makes samples until all these requests have their results. A lease that ends in an error is given back."""
        keys = [request.key for request in requests]
        while (lease := call(self._worker.work, self._name, keys)) is not None:
            try:
                results, report = self._engine.serve(lease.requests, self._name, resume=lease.resume)
            except RuntimeError:  # its group is lost, and whoever is left may go on
                call(self._worker.push, self._name, lease.id, (), NO_WORK)
                raise
            call(self._worker.push, self._name, lease.id, results, report)

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        results: list[SampleResult] = call(self._host.close, [request.key for request in requests], wait_s)
        return results

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        call(self._host.open_exploration, exploration, behind_rollouts)

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        results: list[SampleResult] = call(self._host.close_exploration, wait_s)
        return results

    def planner_state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = call(self._host.planner_state)
        return state

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        call(self._host.restore_planner, state)

    def workers(self) -> int:
        return int(call(self._host.workers))

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        self.record("phase_started", name=name, iteration=iteration)
        start_s = self.now()
        try:
            yield
        finally:
            self.record("phase", name=name, iteration=iteration, start_s=start_s, end_s=self.now())

    def lead(self, act: Callable[[], T]) -> T:
        return act()

    def record(self, kind: str, **fields: Any) -> None:
        call(self._host.record, kind, fields)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        call(self._host.log_metrics, step, metrics)

    def should_stop(self) -> bool:
        return bool(call(self._host.should_stop))
