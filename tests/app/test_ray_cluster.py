"""`train.py cluster=ray` on a cluster of three raylets of this machine: a reserved one and two spot ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conservation import account
from src.app.processes import BAD_INPUT, INTERRUPTED
from tests.app import processes
from tests.app.processes import assert_gone, events, scratch_of, started, wait_for
from tests.app.raylets import LABEL, Raylets
from tests.app.runs import EXPLORED, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # two to eight minutes on two busy cores

RESERVED, SPOT, OTHER_SPOT = "127.0.0.2", "127.0.0.3", "127.0.0.4"


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with Raylets() as raylets:
        raylets.start_head("on-demand")
        for machine in (SPOT, OTHER_SPOT):
            raylets.start(machine, "spot")
        yield raylets


@pytest.fixture(autouse=True)
def token(raylets: Raylets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", raylets.token)


def job(raylets: Raylets, *overrides: str) -> list[str]:
    return [*TINY, EXPLORED, "cluster=ray", f"cluster.address={raylets.address}", *overrides]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["cluster.reserved=metal"], f"none of its 3 nodes is reserved: none has the label {LABEL}=metal"),
        (
            ["cluster.reserved=spot", "cluster.spot=on-demand"],
            f"this node is not reserved: it lacks the label {LABEL}=spot, as ['{SPOT}', '{OTHER_SPOT}'] have it",
        ),
    ],
)
def test_where_no_rank_may_run_the_job_does_not_start(raylets, tmp_path, overrides, reason):
    ended = processes.train(tmp_path / "run", *job(raylets, *overrides))
    assert ended.returncode == BAD_INPUT
    assert ended.stderr.splitlines() == [f"error: cluster.address={raylets.address}: {reason}"]


def test_a_wrong_token_is_told(raylets, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    ended = processes.train(tmp_path / "run", *job(raylets))
    assert ended.returncode == BAD_INPUT
    assert "is our token its token?" in ended.stderr
    assert "0" * 64 not in ended.stderr
    assert raylets.token not in ended.stderr


def test_spot_nodes_are_killed_and_return(raylets, tmp_path):
    folder = tmp_path / "run"
    overrides = ["trainer.max_steps=100000", "explore.sync=await", "cluster.commit_every=1"]
    with started(folder, *job(raylets, *overrides)) as parent:
        scratch = scratch_of(parent.pid)
        names = wait_for("two nodes at work", lambda: nodes_at_work(folder, {SPOT, OTHER_SPOT}))
        victim = names[SPOT]
        raylets.kill(SPOT)
        gone = wait_for("its loss", lambda: [e for e in events(folder) if e["kind"] == "worker_lost"])
        wait_for("its end", lambda: [e for e in events(folder) if e["kind"] == "node_went"])
        assert parent.poll() is None
        raylets.start(SPOT, "spot")
        first, later = f"spot-{victim}-0.0", set[str]()
        wait_for("work on it", lambda: later.update(workers_at_work(folder, victim) - {first}) or later)
        parent.send_signal(signal.SIGINT)
        _, stderr = parent.communicate(timeout=100)
    assert parent.returncode == INTERRUPTED, stderr
    assert_gone(scratch)
    log = events(folder)
    assert [(e["worker"], e["reason"]) for e in gone] == [(first, "killed")]
    assert [(e["kind"], e["node"], e.get("machine")) for e in log if e["kind"] in ("node_came", "node_went")] == [
        *(("node_came", node, machine) for node, machine in sorted((n, m) for m, n in names.items())),
        ("node_went", victim, None),
        ("node_came", victim, SPOT),
    ]
    found = account(log, commit_every=1)
    assert (found.problems, found.requests_lost, found.requests_twice) == ((), 0, 0)
    # Who is on another node has fetched its weights from the coordinator, and the results count.
    made = {e["worker"] for e in log if e["kind"] == "results_accepted"}
    assert {first, f"spot-{names[OTHER_SPOT]}-0.0", *later} <= made
    assert not [e for e in log if e["kind"] in ("worker_failed", "request_failed", "result_rejected")]


def test_workers_leave_a_node_that_has_notice(raylets, tmp_path):
    """One hears it by SIGTERM, and Ray is told; of the other one Ray is told, and the worker hears it from us. Ray then
    ends the nodes, which have nothing more to do: not before."""
    folder = tmp_path / "run"
    overrides = ["trainer.max_steps=100000", "explore.sync=await", "cluster.commit_every=1"]
    with started(folder, *job(raylets, *overrides)) as parent:
        scratch = scratch_of(parent.pid)
        names = wait_for("two nodes at work", lambda: nodes_at_work(folder, {SPOT, OTHER_SPOT}))
        first, other = (f"spot-{names[machine]}-0.0" for machine in (SPOT, OTHER_SPOT))
        (pid,) = (e["pid"] for e in events(folder) if e["kind"] == "worker_joined" and e["worker"] == first)
        os.kill(pid, signal.SIGTERM)
        wait_for("its end", lambda: lost(folder, first))
        wait_for("the end of its drained node", lambda: names[SPOT] in gone(folder))
        raylets.drain(OTHER_SPOT, deadline_s=600)
        wait_for("the end of the other one", lambda: lost(folder, other))
        wait_for("the end of its node", lambda: names[OTHER_SPOT] in gone(folder))
        assert parent.poll() is None
        for machine in (SPOT, OTHER_SPOT):
            raylets.kill(machine)  # `ray start --block` is left
            raylets.start(machine, "spot")
        later = wait_for("both nodes' return", lambda: returned(folder, {SPOT, OTHER_SPOT}))
        wait_for("work on both", lambda: all(workers_at_work(folder, name) - {first, other} for name in later))
        parent.send_signal(signal.SIGINT)
        _, stderr = parent.communicate(timeout=100)
    assert parent.returncode == INTERRUPTED, stderr
    assert_gone(scratch)
    log = events(folder)
    graces = {e["worker"]: e["grace_s"] for e in log if e["kind"] == "notice"}
    assert graces.keys() == {first, other}
    assert 500 < graces[other] <= 600
    assert [lost(folder, worker)["reason"] for worker in (first, other)] == ["preempted"] * 2
    given_back = [e for e in log if e["kind"] == "lease_lost" and e["worker"] in (first, other)]
    assert all((e["reason"], e["lost_steps"]) == ("preempted", 0) for e in given_back)
    found = account(log, commit_every=1)
    assert (found.problems, found.requests_lost, found.requests_twice) == ((), 0, 0)
    assert not [e for e in log if e["kind"] in ("worker_failed", "request_failed", "result_rejected")]


def lost(folder: Path, worker: str) -> dict[str, Any] | None:
    """How a worker left, if it has."""
    return next((e for e in events(folder) if e["kind"] == "worker_lost" and e["worker"] == worker), None)


def gone(folder: Path) -> list[str]:
    """Nodes that went."""
    return [e["node"] for e in events(folder) if e["kind"] == "node_went"]


def returned(folder: Path, machines: set[str]) -> list[str] | None:
    """What machines that came twice are called now, once all have."""
    names = [(e["machine"], e["node"]) for e in events(folder) if e["kind"] == "node_came"]
    later = dict(names[len(machines) :])
    return [later[machine] for machine in sorted(machines)] if set(later) == machines else None


def nodes_at_work(folder: Path, machines: set[str]) -> dict[str, str] | None:
    """Names of these machines, by machine, once all have delivered something."""
    names = {e["machine"]: e["node"] for e in events(folder) if e["kind"] == "node_came"}
    working = {machine: name for machine, name in names.items() if workers_at_work(folder, name)}
    return working if set(working) == machines else None


def workers_at_work(folder: Path, node: str) -> set[str]:
    """Those of a node that have delivered something."""
    return {e["worker"] for e in events(folder) if e["kind"] == "lease_done" and f"-{node}-" in e["worker"]}
