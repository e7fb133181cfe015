"""One real run, with all its processes: what it leaves behind, and that it is the run in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from src.app import checkpoint
from src.app.config import CHECKPOINTS
from src.core.events import read_jsonl
from src.models.adapter import state_checksum
from tests.app.processes import JOB, assert_gone, events, scratch_of, started, wait_for
from tests.app.runs import ROOT, Run, assert_same_run

pytestmark = pytest.mark.timeout(180)

KINDS = ("rollout", "eval", "audit", "explore")


@dataclass(frozen=True)
class Finished(Run):
    """A run that was a real job."""

    scratch: Path
    returncode: int
    stdout: str
    stderr: str


def came(folder: Path, role: str) -> list[dict[str, Any]]:
    """Who has come so far."""
    return [event for event in events(folder) if event["kind"] == "worker_joined" and event["role"] == role]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run of `plain`, with a parent, a coordinator, a training rank and two spot workers."""
    folder = tmp_path_factory.mktemp("real") / "run"
    with started(folder, *JOB, "trainer.max_steps=4") as parent:
        scratch = scratch_of(parent.pid)
        rank = wait_for("the rank", lambda: came(folder, "reserved"))[0]["pid"]
        os.kill(rank, signal.SIGSTOP)  # the run is so short that the second spot worker might come too late
        wait_for("both spot workers", lambda: len(came(folder, "spot")) == 2)
        os.kill(rank, signal.SIGCONT)
        stdout, stderr = parent.communicate(timeout=150)
    return Finished(folder, scratch, parent.returncode, stdout, stderr)


def test_it_ends_well_and_tells_what_it_came_to(real: Finished):
    assert (real.returncode, real.stderr) == (0, "")
    learnt, effort, exploration, folder, report = real.stdout.splitlines()[-5:]
    assert learnt.startswith("Held-out reward 0.")
    assert effort.startswith("4 iterations in ")
    assert exploration.startswith("72 seeds explored")
    assert folder == f"Run folder: {real.folder}"
    assert report.endswith(f"python -m src.report {real.folder}")


def test_no_process_and_no_scratch_file_is_left(real: Finished):
    assert_gone(real.scratch)


def test_it_is_bit_equal_to_the_run_in_one_process(real: Finished, plain: Run):
    """Real processes, two workers instead of one, rollouts made by whoever came first: nothing of it shows."""
    assert_same_run(real, plain)
    assert [event["results"] for event in real.events("explored")] == [
        event["results"] for event in plain.events("explored")
    ]


def test_the_folder_holds_what_the_interface_says(real: Finished):
    assert {path.name for path in real.folder.iterdir()} == {
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "images",
        "rank.log",
    }
    assert (real.folder / "rank.log").read_text() == ""
    assert [path.name for path in checkpoint.found(real.folder / CHECKPOINTS)] == [
        "iteration_000003",
        "iteration_000004",
    ]


def test_the_configuration_is_resolved(real: Finished):
    text = (real.folder / "config.yaml").read_text()
    assert "${" not in text
    config = yaml.safe_load(text)
    assert config["paths"]["output_dir"] == str(real.folder)
    assert (config["trainer"]["max_steps"], config["seed"]) == (4, 0)


def test_every_event_has_a_time_and_a_kind(real: Finished):
    log = list(read_jsonl(real.folder / "events.jsonl"))
    assert all({"time_s", "kind"} <= event.keys() for event in log)
    times = [event["time_s"] for event in log]
    assert times == sorted(times)
    kinds = [event["kind"] for event in log]
    last = kinds.index("run_ended")
    assert (kinds[0], log[last]["status"], log[last]["iteration"]) == ("run_started", "done", 4)
    assert kinds[last + 1 :] == []
    phases = Counter(event["name"] for event in log if event["kind"] == "phase")
    assert phases == {"rollout": 4, "train": 4, "evaluate": 5}


def test_metrics_have_the_names_of_the_interface(real: Finished):
    rows = list(read_jsonl(real.folder / "metrics.jsonl"))
    assert all({"step", "time_s"} <= row.keys() for row in rows)
    names = {name for row in rows for name in row}
    assert names >= {
        "eval/reward",
        "eval/judge",
        "train/reward",
        "train/ratio_first",
        "train/clip_fraction",
        "train/grad_norm",
        "train/zero_variance_groups",
        "train/failed_samples",
        "train/delta_log_prob/0",
        "explore/spearman",
        "explore/variance_kept",
        "explore/variance_random",
        "images/mean",
        "time/rollout_s",
        "time/train_s",
        "time/evaluate_s",
    }
    for phase in ("rollout", "train", "evaluate"):
        assert min(row[f"time/{phase}_s"] for row in rows if f"time/{phase}_s" in row) > 0


def test_the_summary_has_the_names_of_the_interface(real: Finished):
    summary = json.loads((real.folder / "summary.json").read_text())
    rewards = real.metric("eval/reward")
    assert summary["eval_reward_start"] == rewards[0]
    assert summary["eval_reward_end"] == rewards[-1]
    assert {name: summary[name] for name in ("status", "steps", "seeds_explored", "preemptions", "lost_steps")} == {
        "status": "done",
        "steps": 4,
        "seeds_explored": 3 * 3 * 8,
        "preemptions": 0,
        "lost_steps": 0,
    }
    assert summary["wall_s"] > 0
    assert summary["usd"] > 0


def test_every_explored_seed_counts_once(real: Finished):
    closed = {e["iteration"]: e for e in real.events("closed") if e["request_kind"] == "explore"}
    for event in real.events("explored"):
        seen = Counter((row["instance"], row["seed"]) for row in event["results"])
        assert set(seen.values()) == {1}
        assert len(seen) == closed[event["iteration"]]["accepted"] == 24
        assert closed[event["iteration"]]["dropped"] == 0


def test_exploration_is_one_version_stale_and_nothing_else_is(real: Finished):
    versions = {"rollout": set(), "eval": set(), "audit": set(), "explore": set()}
    for event in real.events("lease_granted"):
        incarnation, version = map(int, event["version"].split("."))
        assert incarnation == 0
        versions[event["request_kind"]].add((event["iteration"], version))
    assert versions["rollout"] == {(i, i) for i in range(4)}
    assert versions["eval"] == {(i, i) for i in range(5)}
    assert versions["audit"] <= {(i, i) for i in range(4)}
    assert versions["explore"] == {(i, i - 1) for i in (1, 2, 3)}
    assert [event["version"] for event in real.events("explored")] == ["0.0", "0.1", "0.2"]


def test_what_was_published_is_what_was_trained(real: Finished):
    published = {event["version"]: event["checksum"] for event in real.events("policy_published")}
    assert len(set(published.values())) == len(published) == 5
    for iteration in (3, 4):
        saved = checkpoint.load(real.folder / CHECKPOINTS / f"iteration_{iteration:06d}")
        assert published[f"0.{iteration}"] == state_checksum(saved.tensors["policy"])
    assert real.events("result_rejected") == []


def test_all_processes_had_the_same_arithmetic_and_did_their_part(real: Finished):
    joined = real.events("worker_joined")
    assert sorted((e["role"], e["slot"]) for e in joined) == [("reserved", 0), ("spot", 0), ("spot", 1)]
    assert len({e["fingerprint"] for e in joined}) == 1
    assert len({e["pid"] for e in joined}) == 3
    done = {(e["worker"].split("-")[0], e["request_kind"]) for e in real.events("lease_done")}
    assert {kind for role, kind in done if role == "reserved"} <= {"rollout", "eval"}
    assert done >= {("spot", "explore"), ("spot", "audit")}
    made, asked = (
        Counter({kind: sum(e["count"] for e in real.events(event) if e["request_kind"] == kind) for kind in KINDS})
        for event in ("lease_done", "submitted")
    )
    assert made == asked  # nobody was lost, so nothing was made twice
    assert asked["rollout"] == 4 * 3 * 4
    assert asked["explore"] == 3 * 3 * 8


def test_the_report_is_one_page(real: Finished):
    done = subprocess.run(
        [sys.executable, "-m", "src.report", str(real.folder)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (real.folder / "report.html").read_text()
    assert "<svg" in page
    assert "data:image/png" in page
    (real.folder / "report.html").unlink()
