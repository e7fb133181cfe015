"""`python train.py cluster.spot_trains=true market=replay`: training ranks on spot nodes that come and go."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.app.processes import assert_gone, events, scratch_of, started, train
from tests.app.runs import Run
from tests.dense import dense_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NODES = 2
LOSSES = 6
RUN = (
    "experiment=tiny_digits",
    "logger=none",
    "planner=none",
    "explore.sync=race",
    "cluster.spot_workers=0",
    "callbacks.evaluate.every=20",
    "callbacks.evaluate.images=0",
)
SPOT = ("parallel=ulysses", "parallel.elastic=true", "trainer.devices=1", "cluster.spot_trains=true")


def lost(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of spot ranks that were at work."""
    return [event for event in log if event["kind"] == "worker_lost" and event["worker"].startswith("spot-")]


def held_out(folder: Path) -> dict[int, float]:
    return {row["step"]: row["eval/reward"] for row in Run(folder).metrics if "eval/reward" in row}


def test_ranks_on_a_dense_market_learn_what_one_learns(tmp_path: Path):
    """One reserved rank, two spot nodes with a rank each. Most have no time to leave in."""
    trace = dense_trace(tmp_path / "dense.csv", nodes=NODES, up_s=(35.0, 45.0))
    market = ("market=replay", f"market.trace={trace}", f"market.nodes={NODES}", "market.time_scale=1")
    job = (*RUN, *SPOT, *market, "market.grace_s=0.3")
    folder = tmp_path / "run"
    with started(folder, *job, "trainer.max_steps=1000") as parent:
        scratch = scratch_of(parent.pid)
        deadline = time.monotonic() + 900
        while len(lost(events(folder))) < LOSSES and parent.poll() is None and time.monotonic() < deadline:
            time.sleep(2)
        parent.send_signal(signal.SIGINT)
        told = parent.communicate(timeout=200)
    assert parent.returncode == 130, told
    assert_gone(scratch)
    log = events(folder)
    assert len(lost(log)) >= LOSSES
    reasons = Counter(event["reason"] for event in log if event["kind"] == "rank_ended")
    print(f"{len(lost(log))} losses, {dict(reasons)}, {Run(folder).checkpoint.state['iteration']} iterations")
    assert reasons["killed"] > 0
    assert not [event for event in log if event["kind"] == "rank_ended" and event["restarts"]]

    last = Run(folder).checkpoint.state["iteration"] + 5
    ended = train(folder, *job, f"trainer.max_steps={last}", "ckpt_path=last", timeout_s=300)
    assert ended.returncode == 0, ended.stderr
    steps = [row["step"] for row in Run(folder).metrics if "train/reward" in row]
    assert steps == list(range(1, last + 1)), "every iteration once, in order"
    alone = train(tmp_path / "alone", *RUN, f"trainer.max_steps={last}", timeout_s=600)
    assert alone.returncode == 0, alone.stderr
    ours, theirs = held_out(folder), held_out(tmp_path / "alone")
    print(f"held-out reward by iteration {ours}, undisturbed {theirs}")
    assert ours == pytest.approx(theirs, abs=0.1)

    summary = json.loads((folder / "summary.json").read_text())
    print(f"spot GPU-seconds {summary['gpu_s']}, {summary['reserved_usd']:.3f} + {summary['spot_usd']:.3f} usd")
    assert summary["status"] == "done"
    assert summary["preemptions"] >= LOSSES
    assert summary["gpu_s"]["spot_train"] > 0
    assert summary["gpu_s"]["spot_rollout"] > 0
    assert 0 < summary["spot_utilisation"] < 1
    assert 0 < summary["spot_usd"] < summary["usd"]
