"""Spot and reserved GPUs on a virtual clock: who serves what, for how long, and who is taken away meanwhile.

The coordinator, the market and the plan of groups are those of a real run; only the workers are make-believe. They
behave as real ones (`spot.worker`): a lease goes step by step, with a commit every few steps; at a notice the step in
hand is finished and committed, and the rest is given back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from src.core.types import (
    NO_WORK,
    Blob,
    Commit,
    Lease,
    Member,
    PolicyVersion,
    Trajectory,
    WorkReport,
)
from src.parallel.plan import groups_of
from src.sim.shape import ClusterShape, Durations, Samples
from src.sim.timeline import Timeline
from src.spot import market as mk
from src.spot.coordinator import Coordinator
from src.spot.members import RESERVED_KINDS, Joined
from src.spot.messages import EVERY_KIND
from src.spot.sizing import passes_of


@dataclass(eq=False)
class _Run:
    """A lease in work."""

    lease: Lease
    step: int
    denoise_s: float = 0.0


@dataclass(eq=False)
class _Worker:
    """A group of GPUs that serves one lease at a time."""

    number: int
    """In the order of joining."""
    member: Member
    gpus: tuple[Member, ...]
    held: PolicyVersion | None = None
    run: _Run | None = None
    yields: bool = False
    """It ends as soon as it has committed what it is doing."""

    @property
    def name(self) -> str:
        return self.member.name


@dataclass(eq=False)
class Node:
    """A spot node, from its coming to its going: so long is it paid for."""

    name: str
    gpus: tuple[Member, ...]
    noticed: bool = False
    ready: bool = False
    gone: bool = False


FINGERPRINT = "virtual"
_EMPTY = Blob("float32", (0,), b"")


class VirtualFleet:
    """The workers of a virtual cluster.

    Args:
        nodes: spot nodes if there is no market; they are always there.
        market: which nodes there are when.
    """

    def __init__(
        self,
        *,
        timeline: Timeline,
        coordinator: Coordinator,
        durations: Durations,
        samples: Samples,
        shape: ClusterShape,
        nodes: int,
        market: mk.Market | None = None,
    ) -> None:
        self._timeline = timeline
        self._coordinator = coordinator
        self._durations = durations
        self._samples = samples
        self._shape = shape
        self._market = market
        self._trainer_waits = False
        self._nodes: dict[str, Node] = {}
        self._workers: dict[str, _Worker] = {}
        self._number = count()
        self._lives: Counter[tuple[str, str, int]] = Counter()
        self._serving: dict[Member, _Worker] = {}  # by GPU
        self._regroups: dict[float, dict[str, None]] = {}  # when groups are formed anew, and on which nodes
        self._free_s: dict[Member, float] = {}  # from when on a GPU that was in a group may be in another
        reserved = [Member("reserved", slot, role="reserved") for slot in range(shape.reserved_gpus)]
        for group in _groups(reserved, shape):
            self._join(group)
        if market is None:
            for number in range(nodes):
                self._node_comes(f"node{number}", start_s=0.0)
        else:
            self._follow(market.handle(timeline(), mk.Start()), start_s=0.0)

    def training_nodes(self) -> list[Node]:
        """Spot nodes that can train from now on: they are ready, and not about to go."""
        nodes = self._nodes.values() if self._shape.spot_trains else ()
        return [node for node in nodes if node.ready and not node.noticed]

    @property
    def reserved_gpus(self) -> int:
        return self._shape.reserved_gpus

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The trainer waits: reserved GPUs serve meanwhile, and ask for leases after the spot GPUs that wait already,
        as training ranks do (`host.work`)."""
        reserved = [worker for worker in self._workers.values() if worker.member.role == "reserved"]
        self._trainer_waits = True
        for worker in reserved:
            if worker.run is None:
                self._pull(worker)
        self.start_granted()
        try:
            yield
        finally:
            self._trainer_waits = False
            for worker in reserved:
                self._coordinator.withdraw(worker.name)

    def start_granted(self) -> None:
        """Starts all leases that were granted."""
        granted = self._coordinator.granted
        while granted:
            name = next(iter(granted))
            self._begin(self._workers[name], granted.pop(name))

    # Leases

    def _begin(self, worker: _Worker, lease: Lease) -> None:
        worker.run = _Run(lease, lease.step)
        load_s = 0.0
        if worker.held != lease.policy:
            worker.held, load_s = lease.policy, self._durations.load_s
        self._next_step(worker, worker.run, load_s)

    def _next_step(self, worker: _Worker, run: _Run, delay_s: float = 0.0) -> None:
        if run.step < run.lease.requests[0].spec.steps:
            step_s = self._durations.denoise_s(self._rows(run.lease), 1, len(worker.gpus))
            run.denoise_s += step_s
            self._timeline.after(delay_s + step_s, lambda: self._stepped(worker, run))
        else:
            finish_s = self._finish_s(worker, run.lease)
            self._timeline.after(delay_s + finish_s, lambda: self._finished(worker, run))

    def _rows(self, lease: Lease) -> int:
        """Samples that its passes take as long as: an engine fills up the last one."""
        size = self._shape.batch_size
        return passes_of(len(lease.requests), size) * size

    def _finish_s(self, worker: _Worker, lease: Lease) -> float:
        return self._durations.finish_s(self._rows(lease), len(worker.gpus))

    def _stepped(self, worker: _Worker, run: _Run) -> None:
        if worker.run is not run:
            return  # it was taken away meanwhile
        run.step += 1
        is_last, every = run.step == run.lease.requests[0].spec.steps, self._shape.commit_every
        gives_back = worker.yields and not is_last
        due = gives_back or (every > 0 and run.step % every == 0)
        commits = _commits(run, self._checksum(run.lease)) if due and self._shape.keeps_commits else ()
        is_wanted = self._coordinator.commit(worker.name, run.lease.id, run.step, commits)
        if gives_back or not (is_wanted or is_last):
            worker.run = None
            self._coordinator.push(worker.name, run.lease.id, (), NO_WORK)
            self._go_on(worker)
        else:
            self._next_step(worker, run, self._durations.commit_s if commits else 0.0)
        self.start_granted()

    def _finished(self, worker: _Worker, run: _Run) -> None:
        if worker.run is not run:
            return
        lease = run.lease
        report = WorkReport(
            denoise_s=run.denoise_s,
            decode_s=self._finish_s(worker, lease),
            score_s=0.0,
            steps=len(lease.requests) * (run.step - lease.step),
        )
        worker.run = None
        self._coordinator.push(worker.name, lease.id, self._samples.make(lease.requests), report)
        self._go_on(worker)
        self.start_granted()

    def _go_on(self, worker: _Worker) -> None:
        """The worker has no lease any more."""
        if worker.yields:
            self._leave(worker, "left")
        else:
            self._pull(worker)

    def _pull(self, worker: _Worker) -> None:
        """The worker asks for a lease; a reserved one only while the trainer waits."""
        if self._trainer_waits or worker.member.role == "spot":
            self._coordinator.pull(worker.name)

    def _checksum(self, lease: Lease) -> str:
        return self._coordinator.checksum(lease.policy)

    # Workers

    def _join(self, group: tuple[Member, ...]) -> None:
        first = group[0]
        place = (first.role, first.node, first.slot)
        member = Member(first.node, first.slot, self._lives[place], first.role, len(group))
        self._lives[place] += 1
        worker = _Worker(next(self._number), member, group)
        self._workers[worker.name] = worker
        self._serving |= dict.fromkeys(group, worker)
        explores = first.role == "spot" or self._shape.reserved_explores
        kinds = EVERY_KIND if explores else RESERVED_KINDS
        self._coordinator.join(Joined(member, 0, self._shape.batch_size, FINGERPRINT, frozenset(kinds), watched=False))
        self._pull(worker)
        self.start_granted()

    def _leave(self, worker: _Worker, reason: str) -> None:
        """The worker is no more; its GPUs may form another."""
        worker.run = None
        del self._workers[worker.name]
        self._coordinator.leave(worker.name, reason)
        for gpu in worker.gpus:
            del self._serving[gpu]
            self._free_s[gpu] = self._timeline() + self._durations.regroup_s
            self._regroup_after(self._durations.regroup_s, gpu.node)

    def _regroup_after(self, delay_s: float, node: str) -> None:
        due_s = self._timeline() + delay_s
        if due_s not in self._regroups:
            self._regroups[due_s] = {}
            self._timeline.after(delay_s, self._regroup)
        self._regroups[due_s][node] = None

    def _regroup(self) -> None:
        """Forms the groups of the plan whose GPUs are free, and calls off those that are not in it."""
        now_s = self._timeline()
        changed = self._regroups.pop(now_s)
        names = self._nodes if self._shape.across_nodes else changed  # groups inside a node depend on no other
        nodes = [self._nodes[name] for name in names if name in self._nodes]
        ready = [gpu for node in nodes if node.ready and not node.noticed for gpu in node.gpus]
        planned = dict.fromkeys(_groups(ready, self._shape))
        for worker in self._on(nodes):
            if worker.gpus not in planned:
                self._call_off(worker)
        for group in planned:
            if all(gpu not in self._serving and self._free_s.get(gpu, 0.0) <= now_s for gpu in group):
                self._join(group)

    def _call_off(self, worker: _Worker) -> None:
        """The worker ends: now if it is idle, else when it has committed what it is doing."""
        if worker.run is None:
            self._leave(worker, "left")
        else:
            worker.yields = True

    # The market

    def _follow(self, actions: Iterable[mk.Action], *, start_s: float | None = None) -> None:
        for action in actions:
            match action:
                case mk.Return(node):
                    self._node_comes(node, start_s=self._durations.start_s if start_s is None else start_s)
                case mk.Notice(node, grace_s):
                    self._node_is_warned(node, grace_s)
                case mk.Kill(node):
                    self._node_goes(node)
        assert self._market is not None
        if self._market.next_s < math.inf:
            wait_s = max(0.0, self._market.next_s - self._timeline())
            self._timeline.after(wait_s, self._market_moves)

    def _market_moves(self) -> None:
        assert self._market is not None
        self._follow(self._market.handle(self._timeline(), mk.Tick()))
        self.start_granted()

    def _node_comes(self, name: str, *, start_s: float) -> None:
        node = Node(name, tuple(Member(name, slot) for slot in range(self._shape.gpus_per_node)))
        self._nodes[name] = node
        self._coordinator.record("node_came", node=name, gpus=len(node.gpus))

        def is_ready() -> None:
            if self._nodes.get(name) is node:
                node.ready = True
                self._regroup_after(0.0, name)  # when all are ready that become so at this moment

        self._timeline.after(start_s, is_ready)

    def _node_is_warned(self, name: str, grace_s: float) -> None:
        node = self._nodes[name]
        node.noticed = True
        for worker in self._on([node]):
            self._coordinator.notice(worker.name, grace_s)
            self._call_off(worker)

    def _node_goes(self, name: str) -> None:
        node = self._nodes.pop(name)
        node.gone = True
        for worker in self._on([node]):
            self._leave(worker, "killed")
        self._coordinator.record("node_went", node=name)

    def _on(self, nodes: Iterable[Node]) -> list[_Worker]:
        """Workers with a GPU on these nodes, in the order of joining."""
        found = {self._serving[gpu] for node in nodes for gpu in node.gpus if gpu in self._serving}
        return sorted(found, key=lambda worker: worker.number)


def _groups(gpus: Sequence[Member], shape: ClusterShape) -> list[tuple[Member, ...]]:
    """Groups of the full degree first; of what is left over, groups of half of it, and so on."""
    groups: list[tuple[Member, ...]] = []
    degree, left = shape.degree, list(gpus)
    while left:
        found = groups_of(left, degree, across_nodes=shape.across_nodes)
        groups += [group for group in found if len(group) == degree]
        left = [gpu for group in found if len(group) < degree for gpu in group]
        degree //= 2
    return groups


def _commits(run: _Run, checksum: str) -> list[Commit]:
    """The place where each sample stands. A seed decides a sample whatever interrupts it, so no latents are kept."""
    path = Trajectory(_EMPTY, _EMPTY, _EMPTY, FINGERPRINT)
    return [Commit(request.key, run.step, _EMPTY, path, checksum) for request in run.lease.requests]
