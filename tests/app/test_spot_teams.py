"""Spot workers that share sequences, as real processes: members are killed and warned, and no sample changes.

make test ARGS="tests/app/test_spot_teams.py -s"      # -s shows how long regroups took
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.conservation import account
from src.app.config import spot_teams
from src.app.engine import RolloutEngine
from src.app.job import make_coordinator, make_engine
from src.app.sampling import build_worker_engine
from src.core.types import PolicyVersion, Prompt, RequestKind, SampleRequest, SampleResult, SampleSpec
from src.models.blobs import from_blob
from tests.app.runs import TINY, configuration
from tests.spot.conftest import Run, until
from tests.spot.fakes import requests

ROLLOUT = RequestKind.ROLLOUT
SPEC = SampleSpec(steps=40, stochastic_steps=(1, 2))
PROMPT = Prompt(0, "065", {"target": "065"})
COUNT = 48
IN_THE_MIDDLE_S = 0.2
"""Of a lease."""
WITHIN_S = 200.0
TOLERANCE = 1e-4
SETTINGS = (
    *TINY,
    "cluster.sp_degree=2",
    "cluster.spot_workers=3",
    "algo.steps=40",
    "cluster.commit_every=1",
    "cluster.lease_target_s=0",
)


class Teams(Run):
    """The run's team and its generations."""

    def generation(self) -> dict:
        return self.events("regrouped")[-1]

    def complete(self) -> dict:
        """A generation of two that works."""
        until(
            lambda: self.events("regrouped") and len(self.generation()["members"]) == 2,
            within_s=WITHIN_S,
            what="a pair",
        )
        return self.generation()

    def working(self, leader: str) -> dict:
        """A lease of a leader that has committed a step."""
        known = {event["lease"] for kind in ("lease_done", "lease_lost") for event in self.events(kind)}

        def find():
            granted = [event for event in self.events("lease_granted", worker=leader) if event["lease"] not in known]
            return granted and granted[-1]

        return until(find, within_s=WITHIN_S, what=f"a lease of {leader}")


@contextmanager
def started(folder: Path, make: Callable[..., Any], *overrides: str) -> Iterator[Teams]:
    """A fleet with a pair and a spare, whose engines are `make(config)`."""
    from src.spot.client import RayCluster
    from src.spot.fleet import Fleet
    from src.spot.process import WorkerSettings

    config = configuration(folder, *SETTINGS, *overrides)
    assert spot_teams(config) == {("local", 0): "sp0", ("local", 1): "sp0"}, "the third one serves alone"
    fleet = Fleet(
        coordinator=partial(make_coordinator, config, run="run", folder=folder, iteration=0),
        engine=partial(make, config),
        spot_workers=2,
        settings=WorkerSettings(niceness=0, commit_every=1, grace_s=5.0),
        spares=1,
        teams=spot_teams(config),
    )
    mine = build_worker_engine(config)
    with fleet:
        fleet.start()
        yield Teams(folder, fleet, RayCluster(fleet.host, engine=mine), mine)


def pid_of(run: Teams, member: str) -> int:
    """Followers are in no event: the team's processes are told by their names."""
    slot = next(slot for slot in run.fleet._slots.values() if slot.member.name == member)
    from src.spot.session import ray

    return int(ray.get(slot.process._pid))


def publish(run: Teams, iteration: int) -> PolicyVersion:
    engine: RolloutEngine = run._engine
    version = PolicyVersion(0, iteration)
    run.cluster.publish(version, engine.save_weights)
    return version


def asked_for(policy: PolicyVersion) -> list[SampleRequest]:
    asked = requests(ROLLOUT, COUNT, policy=policy, iteration=policy.iteration, spec=SPEC)
    return [replace(request, prompt=PROMPT) for request in asked]


def difference(made: SampleResult, alone: SampleResult) -> float:
    pairs = [(made.trajectory.after_SLC, alone.trajectory.after_SLC)]
    return max(float((from_blob(one) - from_blob(other)).abs().max()) for one, other in pairs)


@pytest.fixture(scope="module")
def teams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teams]:
    with started(tmp_path_factory.mktemp("teams"), make_engine) as fleet:
        yield fleet


BLOWS = {"kill a follower": (1, signal.SIGKILL), "kill a leader": (0, signal.SIGKILL), "notice": (1, signal.SIGTERM)}


@pytest.mark.timeout(600)
def test_members_are_killed_and_warned_and_samples_stay_the_same(teams: Teams):
    torch.set_num_threads(1)
    for iteration, (blow, (rank, number)) in enumerate(BLOWS.items()):
        policy = publish(teams, iteration)
        asked = asked_for(policy)
        until(lambda: teams.fleet._spares and teams.fleet._spares[0].is_ready, within_s=WITHIN_S, what="a spare")
        before = teams.complete()
        teams.cluster.submit(asked)
        lease = teams.working(before["members"][0])
        time.sleep(IN_THE_MIDDLE_S)
        victim = before["members"][rank]
        os.kill(pid_of(teams, victim), number)
        made = teams.cluster.close(asked, wait_s=WITHIN_S)
        assert [result.key for result in made] == [request.key for request in asked]
        assert [result.error for result in made] == [None] * COUNT
        alone, _ = teams._engine.serve(asked, "me")
        assert max(map(difference, made, alone)) < TOLERANCE
        after = [e for e in teams.events("regrouped") if e["generation"] > before["generation"]]
        assert after, blow
        assert victim not in after[0]["members"]
        lost = teams.events("lease_lost", lease=lease["lease"])
        print(f"{blow}: {lost}, {[(e['members'], e['regroup_s']) for e in after]}")
    log = teams.events
    degrees = {event["gpus"] for event in log("worker_joined", role="spot")}
    assert degrees == {1, 2}
    assert {event["fingerprint"].split(" sp")[1][0] for event in log("worker_joined", gpus=2)} == {"2"}
    found = account([*log_of(teams)], commit_every=1)
    assert found.problems == ()
    assert found.leases_resumed >= 2


def log_of(run: Teams):
    from src.core.events import read_jsonl

    return read_jsonl(run.folder / "events.jsonl")
