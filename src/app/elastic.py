"""A training rank of an elastic job: how it comes in and shows that it is alive (see parallel/elastic.py)."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from src.app import checkpoint
from src.app.checkpoint import Checkpoint
from src.app.config import Config
from src.app.engine import RolloutEngine
from src.app.processes import TEAM
from src.core.clock import RunClock
from src.core.protocols import Engine
from src.parallel.cluster import ElasticCluster
from src.parallel.elastic import ElasticWorld, Recovery
from src.parallel.group import connect_store
from src.parallel.mesh import Mesh
from src.parallel.ulysses import SequenceGroup
from src.spot import session
from src.spot.client import OnceOnly, RayCluster, RayTeam, call
from src.spot.members import Introduction, rank_member


def come_in(
    config: Config, start: Mapping[str, Any], engine: RolloutEngine, group: SequenceGroup
) -> tuple[ElasticWorld, ElasticCluster, Checkpoint | None]:
    """Makes this process one of the training ranks, and returns what they know if they are at work already.

    Args:
        start: what the parent said: `address` of Ray, this rank's `number`, node and slot if it is on a `spot` GPU,
            whether it `joins` others at work.
        engine, group: follow the ranks from now on.
    """
    host = session.connect(start["address"])
    introduction: Introduction = call(host.introduce)
    member = rank_member(start["number"], introduction.incarnation, start["spot"])
    Pulse(host, member.name, introduction.heartbeat_s).start()
    assert introduction.store_port is not None
    section = config["parallel"]["mesh"]
    world = ElasticWorld(
        team=RayTeam(host, team=TEAM, member=member.name),
        member=member.name,
        store=connect_store("127.0.0.1", introduction.store_port),
        sp_degree=section["sp_degree"],
        device=section["device"],
        timeout_s=section["timeout_s"],
        joins=start["joins"],
        report=lambda recovery: _report(host, recovery),
    )

    def follow(mesh: Mesh) -> None:
        group.enter(mesh.sequence)
        engine.share(mesh.snapshot.sp_degree)

    def connect(shared: Engine) -> RayCluster:
        once = OnceOnly(host, number=lambda: world.number)
        leader = replace(member, gpus=world.mesh.snapshot.sp_degree)  # it serves for its whole group
        return RayCluster(host, engine=shared, member=leader, speaks_to=once)

    world.on_change(follow)
    world.enter()
    cluster = ElasticCluster(
        world=world,
        engine=engine,
        connect=connect,
        run=introduction.run,
        incarnation=introduction.incarnation,
        now=RunClock(elapsed_s=introduction.elapsed_s),
    )
    known = world.boundary(_nothing_to_tell) if start["joins"] else None
    return world, cluster, checkpoint.load(Path(known)) if known else None


def _report(host: Any, recovery: Recovery) -> None:
    seconds = {name: round(value, 6) for name, value in asdict(recovery).items() if name.endswith("_s")}
    call(host.record, "rank_recovered", {**asdict(recovery), **seconds})


def _nothing_to_tell() -> str:
    raise AssertionError("a rank that joins is never the first one")


class Pulse(threading.Thread):
    """Shows that this process is not frozen, and passes on a SIGTERM: it leaves at the end of the iteration. If all
    ranks are to leave, they save first, and the job ends."""

    def __init__(self, host: Any, member: str, every_s: float) -> None:
        super().__init__(name="pulse", daemon=True)
        self._host = host
        self._member = member
        self._every_s = every_s

    def run(self) -> None:
        while True:
            self._host.heartbeat.remote(self._member)
            if signal.sigtimedwait({signal.SIGTERM}, self._every_s) is not None:  # it is blocked in all threads
                self._host.notice.remote(self._member, math.inf)
