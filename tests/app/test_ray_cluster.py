"""`train.py cluster=ray` on a cluster of three raylets of this machine: a reserved one and two spot ones."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

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


def nodes_at_work(folder: Path, machines: set[str]) -> dict[str, str] | None:
    """Names of these machines, by machine, once all have delivered something."""
    names = {e["machine"]: e["node"] for e in events(folder) if e["kind"] == "node_came"}
    working = {machine: name for machine, name in names.items() if workers_at_work(folder, name)}
    return working if set(working) == machines else None


def workers_at_work(folder: Path, node: str) -> set[str]:
    """Those of a node that have delivered something."""
    return {e["worker"] for e in events(folder) if e["kind"] == "lease_done" and f"-{node}-" in e["worker"]}
