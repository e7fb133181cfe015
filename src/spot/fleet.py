"""The parent process's side: starts Ray, coordinator and spot workers, and replaces workers that are lost.

with Fleet(...) as fleet:            # from here on, processes that are started belong to the job
    rank = subprocess.Popen(...)     # loads its model while Ray starts
    address = fleet.start()          # tell it the rank: it connects by client.RayCluster.connect(address)
    while rank.poll() is None:
        news = fleet.news(cursor, wait_s=0.5)

Without a market there is one node, `local`, which is always there. With one, nodes come and go as it says: at a notice
their workers get SIGTERM and are expected to give their work back; when the grace is over they are killed with SIGKILL;
when a node returns, its workers are started again. On a Ray cluster of several machines the table of its nodes takes
the place of the market (src/spot/ray_nodes.py): who is on another machine gets no signal from here, asks its own
machine for notices, and hears of others from the coordinator, with its next commit.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.core.clock import RunClock
from src.core.protocols import Engine
from src.core.types import Member
from src.spot import market as mk
from src.spot import session, weights
from src.spot.client import call
from src.spot.coordinator import Coordinator, CoordinatorLost
from src.spot.host import Host
from src.spot.members import LOCAL, Introduction, Lost
from src.spot.process import DEFAULTS, Process, WorkerSettings
from src.spot.run_log import News
from src.spot.session import OwnRay, Session, ray

log = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Workers in one slot that may fail by themselves, one after the other, before it is left empty."""
_LOOK_S = 0.2
"""How often the fleet looks around, if nothing happens."""
_BUILD_S = 1800.0
"""How long a process may take to build its engine: a large model may come from far away."""
_JOIN_S = 120.0
"""How long a worker whose engine is built may take to join."""
_PATIENCE_S = 2.0
"""How long the fleet waits at its end for a coordinator that may be frozen."""


@dataclass
class _Slot:
    """A place for a spot worker, the one that is in it now, and how many before it failed in a row."""

    member: Member
    process: Process
    failures: int
    doomed: bool = False
    """Its end is no fault of its own."""


class Fleet:
    """Everything that the job runs beside its training ranks.

    Args:
        coordinator: makes the coordinator in its own process (picklable).
        engine: makes a worker's engine in its own process (picklable); a `TeamEngine` if there are teams.
        spot_workers: how many to keep on each node that is there; 0 is fine.
        settings: how each runs.
        respawn: whether a lost worker is replaced while its node is there.
        market: which nodes are there. None: one, always.
        runs_on: the Ray for all of it. None: one of its own, on this machine.
        spares: processes that have built their engine, hold the newest policy and wait to take the place of a worker.
            They are no members and cost nothing in the ledger: they stand for a start from an image with everything in
            memory. On one machine only: they belong to no node.
        ranks_per_node: training ranks that are to run on each node. They are not the fleet's: who starts and ends them
            finds in `moves` what becomes of the nodes.
        teams: names of those whose workers share sequences, by (node, slot). The coordinator then needs a store.
    """

    def __init__(
        self,
        *,
        coordinator: Callable[[], Coordinator],
        engine: Callable[[], Engine],
        spot_workers: int,
        settings: WorkerSettings = DEFAULTS,
        respawn: bool = True,
        market: mk.Nodes | None = None,
        runs_on: Session | None = None,
        spares: int = 0,
        ranks_per_node: int = 0,
        teams: Mapping[tuple[str, int], str] | None = None,
    ) -> None:
        for name, value in (("spot_workers", spot_workers), ("spares", spares)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self._make_coordinator = coordinator
        self._make_engine = engine
        self._settings = settings
        self._spot_workers = spot_workers
        self._respawn = respawn
        self._market = market
        self._spares_wanted = spares
        self._ranks_per_node = ranks_per_node
        self._teams = teams or {}
        self._session = runs_on or OwnRay()
        self._slots: dict[Any, _Slot] = {}  # by the reference that resolves when the worker has ended
        self._starting: dict[Any, _Slot] = {}  # by the reference that resolves when its process is ready
        self._lives: dict[tuple[str, int], int] = {}  # how many workers each slot of each node has had
        self._present: set[str] = set()  # nodes on which workers are to run
        self._staff: int | None = None  # what the coordinator was told
        self._spares: deque[Process] = deque()
        self._ending = threading.Event()
        self._coordinator_lost = threading.Event()
        self._resources = ExitStack()
        self.host: Any = None
        """The coordinator's actor, once started."""
        self.incarnation = 0
        """How often the run was started before; known once started."""
        self.frozen: deque[str] = deque()
        """Processes that are silent and not the fleet's: who started them has to end them."""
        self.moves: deque[mk.Action] = deque()
        """What the market did to nodes with training ranks."""
        self.scratch = Path()
        """The job's own folder; its name marks the job's processes (see `reaper`)."""
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Fleet:
        """Lets what is started from now on belong to the job, and arms the reaper.

        Raises:
            ClusterError: the Ray that it is to run on lacks something.
        """
        settings = self._session.check()
        self.scratch = Path(tempfile.mkdtemp(prefix="spotlight-")).resolve()
        variables = session.environment(self.scratch)
        outside = {**os.environ, "PYTHONPATH": variables["PYTHONPATH"]}
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "src.spot.reaper", str(self.scratch)],
            stdin=subprocess.PIPE,
            env=outside,
            start_new_session=True,
        )
        self._resources.enter_context(session.environ({**variables, **settings}))
        self._variables = variables
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def start(self) -> str:
        """Starts Ray and the coordinator, which takes seconds; the workers then start on their own.

        Returns the address at which training ranks connect.

        Raises:
            ClusterError: Ray is to be there already, and cannot be used.
        """
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        threads = dict.fromkeys(names, str(self._settings.threads))
        address = self._session.start(self.scratch, {**self._variables, **threads})
        place = self._session.place(None)
        host = ray.remote(Host).options(name=session.COORDINATOR, num_cpus=0, max_restarts=0, **place.options)
        self.host = host.remote()
        call(self.host.begin, self._make_coordinator)
        self._host_pid = call(self.host.pid)
        self._alive = self.host.run.remote()
        self._losses = self.host.losses.remote()
        introduction: Introduction = call(self.host.introduce)
        self.incarnation = introduction.incarnation
        self._weights_root = introduction.weights_root
        self._now = RunClock(elapsed_s=introduction.elapsed_s)
        if self._market is None:
            self._node_returns(LOCAL)
        else:
            self._follow(self._market.handle(self._now(), mk.Start()))
        self._watcher = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._watcher.start()
        return address

    def news(self, cursor: int, wait_s: float) -> News:
        """Events and metrics since `cursor`; waits at most `wait_s` seconds for some."""
        self.check()
        news: News = call(self.host.news, cursor, wait_s)
        return news

    def stop(self, reason: str) -> None:
        """Asks the training ranks to finish and save."""
        call(self.host.stop, reason)

    def record(self, kind: str, **fields: Any) -> None:
        """Appends one event to the run's event log."""
        call(self.host.record, kind, fields)

    def notice(self, process: str, grace_s: float) -> None:
        """A process that the fleet did not start will be gone in `grace_s` seconds."""
        call(self.host.notice, process, grace_s)

    def leave(self, process: str, reason: str) -> None:
        """A process that the fleet did not start has ended."""
        call(self.host.leave, process, reason)

    def check(self) -> None:
        """Raises CoordinatorLost if the coordinator has died."""
        if self._coordinator_lost.is_set():
            raise CoordinatorLost

    def shutdown(self) -> None:
        """Ends every process of the job, also those that others started since `__enter__`, and cleans up."""
        self._ending.set()
        if self._watcher is not None:
            self._watcher.join(_PATIENCE_S)
            if self._watcher.is_alive():  # it waits for an answer
                os.kill(self._host_pid, signal.SIGKILL)
                self._watcher.join(_PATIENCE_S)
        self._session.stop()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()
        self._resources.close()

    # What runs where

    def _node_returns(self, node: str) -> None:
        self._present.add(node)
        taken = {slot.member.slot for slot in self._on(node)}
        for number in range(self._spot_workers):
            if number not in taken:  # who is still ending is replaced when it has
                self._spawn(node, number)

    def _spawn(self, node: str, number: int, failures: int = 0) -> None:
        """Puts the next worker into a slot: a spare, if there is one."""
        life = self._lives[node, number] = self._lives.get((node, number), -1) + 1
        member = Member(node, number, life)
        process = self._spares.popleft() if self._spares else self._process(node)
        call(self.host.expect, member.name, _BUILD_S)
        slot = _Slot(member, process, failures)
        if process.is_ready:
            self._run(slot)
        else:
            self._starting[process.prepared] = slot

    def _run(self, slot: _Slot) -> None:
        member = slot.member
        call(self.host.expect, member.name, _JOIN_S)
        self._slots[slot.process.run(member, self._teams.get((member.node, member.slot)), self.host)] = slot

    def _process(self, node: str) -> Process:
        return Process(self._make_engine, self._settings, self._session.place(node))

    def _keep_spares(self) -> None:
        """Makes one more spare, if they are too few and nobody is starting: a start takes the cores for seconds."""
        starting = self._starting or not all(spare.is_ready for spare in self._spares)
        if len(self._spares) < self._spares_wanted and not starting:
            self._spares.append(self._process(LOCAL))

    def _update_spares(self) -> None:
        """Those that stand by load the newest policy."""
        if self._spares and (published := weights.versions(self._weights_root)):
            for spare in self._spares:
                spare.catch_up(self._weights_root, published[-1])

    # What happens

    def _watch(self) -> None:
        """Plays the market, waits for workers and coordinator to end, and deals with it."""
        while not (self._ending.is_set() or self._coordinator_lost.is_set()):
            try:
                self._look()
            except (ray.exceptions.RayActorError, CoordinatorLost):
                self._coordinator_lost.set()
            except ray.exceptions.RayError:
                log.exception("the coordinator failed")
                ray.kill(self.host)  # so that the ranks see it, too
                self._coordinator_lost.set()
            except Exception:  # whatever it is: without this thread nobody would replace workers any more
                log.exception("the fleet goes on after an error")
                self._ending.wait(_LOOK_S)

    def _look(self) -> None:
        """Waits a moment for something to happen, and deals with it."""
        references = [self._alive, self._losses, *self._slots, *self._starting]
        for reference in ray.wait(references, timeout=self._pause_s())[0]:
            if reference in self._slots:
                self._replace(self._slots.pop(reference), reference)
            elif reference in self._starting:
                self._run(self._starting.pop(reference))
            else:
                self._kill_lost(ray.get(reference))
                self._losses = self.host.losses.remote()
        if self._market is not None:
            self._follow(self._market.handle(self._now(), mk.Tick()))
        self._keep_spares()
        self._update_spares()
        self._tell_staff()

    def _tell_staff(self) -> None:
        """Tells the coordinator how many workers live or are to come, on nodes that will return too."""
        away = [] if self._market is None else [node for node in self._market.nodes if node not in self._present]
        staff = len(self._slots) + len(self._starting) + self._spot_workers * len(away)
        if staff != self._staff:
            self._staff = staff
            self.host.staff.remote(staff)

    def _pause_s(self) -> float:
        next_s = math.inf if self._market is None else self._market.next_s - self._now()
        return min(_LOOK_S, max(0.0, next_s))

    def _follow(self, actions: Sequence[mk.Action]) -> None:
        """Does to the processes what the market does to their nodes."""
        for action in actions:
            if self._ranks_per_node:
                self.moves.append(action)
            match action:
                case mk.Return(node, machine):
                    where = {"machine": machine} if machine else {}
                    self.record("node_came", node=node, gpus=self._spot_workers + self._ranks_per_node, **where)
                    self._node_returns(node)
                case mk.Notice(node, grace_s):
                    self._present.discard(node)
                    self._call_off(node)
                    for slot in self._on(node):
                        slot.doomed = True
                        # The scheduler hears of it from here too: the process may be stopped, or just starting.
                        call(self.host.notice, slot.member.name, grace_s)
                        slot.process.send(signal.SIGTERM)
                case mk.Kill(node):
                    self._present.discard(node)  # it may have gone without notice
                    self._call_off(node)
                    for slot in self._on(node):
                        slot.doomed = True
                        slot.process.kill()
                    self.record("node_went", node=node)

    def _on(self, node: str) -> list[_Slot]:
        slots = [*self._slots.values(), *self._starting.values()]
        return [slot for slot in slots if slot.member.node == node]

    def _is_taken(self, place: Member) -> bool:
        return any(slot.member.slot == place.slot for slot in self._on(place.node))

    def _call_off(self, node: str) -> None:
        """Nobody starts on this node any more. A process that was about to be its worker may become a spare."""
        for reference, slot in list(self._starting.items()):
            if slot.member.node == node:
                del self._starting[reference]
                call(self.host.leave, slot.member.name, "left")
                if len(self._spares) < self._spares_wanted:
                    self._spares.append(slot.process)
                else:
                    slot.process.kill()

    def _kill_lost(self, losses: Sequence[Lost]) -> None:
        """Ends processes that the coordinator gave up. It is a worker's own fault if it never came."""
        absent = {lost.worker for lost in losses if lost.reason == "absent"}
        for slot in [*self._slots.values(), *self._starting.values()]:
            if slot.member.name in absent:
                slot.process.kill()
        given_up = {lost.worker for lost in losses if lost.reason in ("frozen", "preempted")}
        for slot in self._slots.values():
            if slot.member.name in given_up:
                slot.doomed = True
                slot.process.kill()
        own = {slot.member.name for slot in self._slots.values()}
        self.frozen.extend(lost.worker for lost in losses if lost.reason == "frozen" and lost.worker not in own)

    def _replace(self, slot: _Slot, ended: Any) -> None:
        """Reports a worker that has ended and starts the next one in its place."""
        reason, error, notice = _outcome(ended)
        member = slot.member
        served = call(self.host.leave, member.name, reason) or slot.doomed
        slot.process.kill()
        failures = 0 if served and error is None else slot.failures + 1
        if error is not None:
            log.warning("spot worker %s failed: %s", member.name, error)
            self.record("worker_failed", worker=member.name, error=error)
        if self._market is not None and reason != "failed":
            heard = mk.Heard(notice.node, notice.grace_s) if notice else mk.Missed(member.node)
            self._follow(self._market.handle(self._now(), heard))
        if failures >= _MAX_FAILURES:
            log.error("%d spot workers failed in a row in slot %d: it stays empty", failures, member.slot)
        elif self._respawn and member.node in self._present and not self._is_taken(member):
            self._spawn(member.node, member.slot, failures)


def _outcome(ended: Any) -> tuple[str, str | None, mk.Notice | None]:
    """How a worker ended, as the event log says it, its error if it failed by itself, and the notice that ended it."""
    try:
        notice: mk.Notice | None = ray.get(ended)
    # Died, or out of reach: a node that is gone shows as the latter for seconds, and then has no place for anybody.
    except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
        return "killed", None, None
    except Exception as error:  # whatever its engine raised, brought here by Ray
        return "failed", str(error).strip().splitlines()[-1], None
    return "left", None, notice
