"""A worker: pulls leases, makes their samples with its own engine and weights, and pushes the results.

It commits what is in flight every few steps. Once it knows that its node will be taken away, it finishes the step in
hand, commits, gives the rest back and ends. Exploration that was cut off in the middle is given back, too: rollouts are
waiting.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

from src.core.clock import Clock, monotonic_s
from src.core.protocols import Engine
from src.core.types import NO_WORK, Commit, Lease, Member, PolicyVersion, SampleResult, WorkReport
from src.spot import weights
from src.spot.market import Notice
from src.spot.members import Introduction, Joined
from src.spot.notices import NoticeSource

_TELL_S = 0.1
"""A step without a commit is told at most this often: fast models would send more messages than steps are worth."""
_LOOK_S = 10.0
"""How long a watching thread waits for a notice before it looks whether the worker has ended. Long beside the second
from which on GCP's metadata server is asked to answer when there is one (`clouds.GcpSigns`), short beside a notice."""


class Transport(Protocol):
    """A worker's way to the coordinator."""

    def join(self, joined: Joined) -> Introduction:
        """Becomes a member."""

    def pull(self, worker: str) -> Lease | None:
        """Waits for a lease; None tells the worker to end."""

    def commit(self, worker: str, lease: int, step: int, commits: Sequence[Commit]) -> None:
        """Tells how far a lease is, with commits if there are any; does not wait."""

    def is_dropped(self) -> bool:
        """Whether it was heard that the lease that was told of last is not to be gone on with: nobody waits for it any
        more, or the worker's team changes. Does not wait."""

    def push(self, worker: str, lease: int, results: Sequence[SampleResult], report: WorkReport) -> None:
        """Delivers results, after all commits."""

    def heartbeat(self, worker: str) -> None:
        """Shows that the worker lives; does not wait."""

    def notice(self, worker: str, grace_s: float) -> None:
        """Tells that the worker will be gone in `grace_s` seconds; does not wait."""


class Worker:
    """One engine that serves whatever it is leased.

    Args:
        commit_every: denoising steps from commit to commit; 0 commits at a notice only.
        notices: what may tell that the node will be taken away.
        fetch: gets the files of a policy for a while. None: they are in the folder that the coordinator names.
        held: the policy that the engine holds already.
    """

    def __init__(
        self,
        *,
        member: Member,
        engine: Engine,
        transport: Transport,
        commit_every: int = 0,
        notices: Sequence[NoticeSource] = (),
        fetch: Callable[[PolicyVersion], AbstractContextManager[weights.Published]] | None = None,
        held: PolicyVersion | None = None,
        now: Clock = monotonic_s,
    ) -> None:
        self.name = member.name
        self._member = member
        self._engine = engine
        self._transport = transport
        self._commit_every = commit_every
        self._notices = notices
        self._fetch = fetch
        self._now = now
        self._told_s = -math.inf
        self._noticed = threading.Event()
        self.notice: Notice | None = None
        """What told that the node will be taken away."""
        self._held = held

    def join(self) -> None:
        engine = self._engine
        joined = Joined(self._member, os.getpid(), engine.batch_size, engine.fingerprint)
        self._learn(self._transport.join(joined))

    def _learn(self, introduction: Introduction) -> None:
        self._weights_root = introduction.weights_root
        self._heartbeat_s = introduction.heartbeat_s

    def run(self) -> None:
        """Joins and serves until it is told to end, by the coordinator or by a notice.

        Raises what the engine raises, and ValueError if weights are not what was published: the worker is then lost.
        """
        self.join()
        with self._watching():
            while not self._noticed.is_set() and (lease := self._transport.pull(self.name)) is not None:
                self.serve(lease)

    def serve(self, lease: Lease) -> None:
        """Makes the samples of one lease under its policy and delivers them."""
        if self._noticed.is_set():
            self._transport.push(self.name, lease.id, (), NO_WORK)
            return
        self._prepare(lease)
        results, report = self._engine.serve(
            lease.requests,
            self.name,
            resume=lease.resume,
            commit_every=self._commit_every,
            on_step=partial(self._tell, lease.id),
            should_yield=lambda: self._noticed.is_set() or self._transport.is_dropped(),
        )
        self._transport.push(self.name, lease.id, results, report)

    def _prepare(self, lease: Lease) -> None:
        self._hold(lease.policy)

    def _hold(self, policy: PolicyVersion) -> None:
        """Has the engine hold a policy."""
        if policy != self._held:
            self._load(policy)

    def _load(self, policy: PolicyVersion) -> None:
        self._held = None  # a load that fails half-way leaves no policy in the engine
        with self._weights(policy) as published:
            weights.load(published, self._engine)
        self._held = policy

    def _weights(self, policy: PolicyVersion) -> AbstractContextManager[weights.Published]:
        """The files of a policy."""
        return nullcontext(weights.find(self._weights_root, policy)) if self._fetch is None else self._fetch(policy)

    def _tell(self, lease: int, step: int, commits: Sequence[Commit]) -> None:
        now_s = self._now()
        if commits or now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            self._transport.commit(self.name, lease, step, commits)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Shows signs of life and waits for notices, each in a thread of its own."""
        ended = threading.Event()
        threading.Thread(target=self._beat, args=(ended,), name="heartbeat", daemon=True).start()
        for source in self._notices:
            threading.Thread(target=self._watch, args=(source, ended), name="notices", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(self._heartbeat_s):
            self._transport.heartbeat(self.name)

    def _watch(self, source: NoticeSource, ended: threading.Event) -> None:
        while not (ended.is_set() or self._noticed.is_set()):
            notice = source.wait(_LOOK_S)
            if notice is not None and notice.grace_s < math.inf:  # a risk alone is no reason to give work back
                self.notice = notice
                self._transport.notice(self.name, notice.grace_s)  # first: the worker may end as soon as it knows
                self._noticed.set()


def give_way(*, niceness: int, cpus: Sequence[int] = ()) -> None:
    """Puts this process behind others that want the same cores, and onto `cpus` if any are given."""
    os.nice(niceness)
    if cpus:
        os.sched_setaffinity(0, cpus)
