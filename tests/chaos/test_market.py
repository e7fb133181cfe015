"""`python train.py market=replay`: nodes get notice, are killed and come back, and nothing is lost.

make test-slow ARGS="tests/chaos/test_market.py -s"      # -s shows the figures
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conservation import account, count_regroups
from tests.app.processes import JOB, events, started
from tests.dense import dense_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NODES = 3
COMMIT_EVERY = 1
UP_S = (9.0, 14.0)


def train_until(enough: Callable[[list[dict[str, Any]]], bool], folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The log of a run that is stopped, as a user would, when it holds enough: so a fast machine sees as much as a slow
    one."""
    with started(folder, *overrides, "trainer.max_steps=1000", "callbacks.evaluate.every=1000") as parent:
        deadline = time.monotonic() + 700
        while not enough(events(folder)):
            assert parent.poll() is None, parent.communicate()
            assert time.monotonic() < deadline, "too little happened"
            time.sleep(2)
        parent.send_signal(signal.SIGINT)
        told = parent.communicate(timeout=150)
    assert parent.returncode == 130, told
    return events(folder)


def test_spot_workers_that_share_sequences_regroup_and_go_on(tmp_path: Path) -> None:
    """Both nodes are one team."""
    trace = dense_trace(tmp_path / "dense.csv", nodes=NODES, up_s=UP_S)
    market = ["market=replay", f"market.trace={trace}", "market.nodes=2", "market.time_scale=1"]
    cluster = ["cluster.sp_degree=2", f"cluster.commit_every={COMMIT_EVERY}", "cluster.spares=2"]
    batch = ["planner.seeds_per_prompt=128", "algo.group_size=16", "market.grace_s=1.5"]
    log = train_until(lambda log: count_regroups(log)[1] >= 5, tmp_path / "run", *JOB, *batch, *market, *cluster)
    found = account(log, commit_every=COMMIT_EVERY)
    sizes = Counter(len(event["members"]) for event in log if event["kind"] == "regrouped")
    print(f"regroups to {dict(sizes)} members, {found}")
    assert found.problems == ()
    assert {1, 2} <= set(sizes)
    assert found.regroups_resumed >= 5
    assert {event["gpus"] for event in log if event["kind"] == "worker_joined" and event["role"] == "spot"} == {1, 2}


def test_a_run_on_a_dense_market_loses_nothing(tmp_path: Path) -> None:
    trace = dense_trace(tmp_path / "dense.csv", nodes=NODES, up_s=UP_S)
    market = ["market=replay", f"market.trace={trace}", f"market.nodes={NODES}", "market.time_scale=1"]
    cluster = [f"cluster.commit_every={COMMIT_EVERY}", f"cluster.spares={NODES}", "market.grace_s=1.5"]
    batch = ["planner.seeds_per_prompt=128", "algo.group_size=16"]
    folder = tmp_path / "run"

    def enough(log: list[dict[str, Any]]) -> bool:
        return sum(event["kind"] == "worker_lost" and event["reason"] == "preempted" for event in log) >= 12

    log = train_until(enough, folder, *JOB, *batch, *market, *cluster)
    found = account(log, commit_every=COMMIT_EVERY)
    summary = json.loads((folder / "summary.json").read_text())
    reasons = Counter(e["reason"] for e in log if e["kind"] == "worker_lost")
    starts = [e["start_s"] for e in log if e["kind"] == "lease_granted" and "start_s" in e and "spot" in e["worker"]]
    print(f"{dict(reasons)} {found}, {summary['wall_s']:.0f} s, first leases after {sorted(starts)} s")

    assert found.problems == ()
    assert summary["preemptions"] >= 12
    assert found.leases_resumed >= 3
    assert reasons["killed"] == 0  # everybody had notice
    assert summary["failed_samples"] == 0
    assert summary["lost_steps"] == found.repeated_steps
    for event in (e for e in log if e["kind"] == "explored"):  # debug=fast waits for all
        assert Counter((row["instance"], row["seed"]) for row in event["results"]).most_common(1)[0][1] == 1
        assert len(event["results"]) == 3 * 128
    closed = [e for e in log if e["kind"] == "closed"]
    assert all(e["dropped"] == 0 for e in closed)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    priced = [row["cost/usd"] for row in rows if "cost/usd" in row]
    assert len(priced) == summary["steps"] >= 12
    assert priced == sorted(priced)
    assert summary["gpu_s"]["spot_explore"] > 0
