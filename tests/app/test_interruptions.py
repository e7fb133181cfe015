"""Real runs that are stopped or killed: their exit codes, that nothing of them is left, and that they go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from src.app import checkpoint
from src.app.config import CHECKPOINTS
from tests.app.processes import (
    JOB,
    assert_gone,
    coordinator_of,
    events,
    kill,
    living,
    scratch_of,
    started,
    train,
    wait_for,
)
from tests.app.runs import Run, assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FOUR = (*JOB, "trainer.max_steps=4")
"""The run of `conftest.plain`."""
LONG = (*JOB, "trainer.max_steps=400", "callbacks.evaluate.every=50", "callbacks.checkpoint.every=5")


def of_kind(folder: Path, kind: str) -> list[dict]:
    return [event for event in events(folder) if event["kind"] == kind]


def pid_of(folder: Path, role: str) -> int:
    """Of the newest member with a role."""
    pid: int = [event["pid"] for event in of_kind(folder, "worker_joined") if event["role"] == role][-1]
    return pid


def niceness(pid: int) -> int:
    """The larger, the more it yields the CPU to others."""
    return os.getpriority(os.PRIO_PROCESS, pid)


def explores(folder: Path) -> bool:
    """Both workers have explored."""
    done = {e["worker"] for e in of_kind(folder, "lease_done") if e["request_kind"] == "explore"}
    return len(done) >= 2


def explorer(folder: Path) -> int | None:
    """Process id of the worker that was the first to explore: on a busy machine it may be the only one for long."""
    at_work = [e["worker"] for e in of_kind(folder, "lease_granted") if e["request_kind"] == "explore"]
    pids: dict[str, int] = {event["worker"]: event["pid"] for event in of_kind(folder, "worker_joined")}
    return pids[at_work[0]] if at_work else None


def finish(parent: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the parent."""
    stdout, stderr = parent.communicate(timeout=timeout_s)
    return parent.returncode, stdout, stderr


def assert_interrupted(parent: subprocess.Popen[str], scratch: Path, *, timeout_s: float = 60.0) -> str:
    """It ends with 130 and no traceback, and nothing of it is left; returns what it said on standard error."""
    code, _, stderr = finish(parent, timeout_s)
    assert code == 130, stderr
    assert "Traceback" not in stderr
    assert_gone(scratch)
    return stderr


def resumed(folder: Path) -> Run:
    """Goes on with the run of four iterations."""
    done = train(folder, *FOUR, "ckpt_path=last", timeout_s=150)
    assert (done.returncode, done.stderr) == (0, "")
    return Run(folder)


def test_a_killed_rank_goes_on_bit_equal(tmp_path, plain: Run):
    folder = tmp_path / "run"
    with started(folder, *FOUR) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("two iterations", lambda: len(of_kind(folder, "checkpoint_saved")) >= 2)
        kill(pid_of(folder, "reserved"))
        code, _, stderr = finish(parent)
    assert code == 1
    (line,) = stderr.splitlines()
    assert "training rank was killed by SIGKILL" in line
    assert f"ckpt_path=last paths.output_dir={folder}" in line
    assert_gone(scratch)
    run = resumed(folder)
    assert_same_run(run, plain)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["steps"]) == ("done", 1, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_ends_with_130_and_goes_on(tmp_path, plain: Run, number):
    folder = tmp_path / "run"
    with started(folder, *FOUR, "callbacks.checkpoint.every=100") as parent:
        scratch = scratch_of(parent.pid)
        wait_for("an iteration", lambda: any(e["name"] == "train" for e in of_kind(folder, "phase")))
        parent.send_signal(number)
        stderr = assert_interrupted(parent, scratch)
    assert stderr.splitlines()[-1].startswith(f"error: stopped by {number.name}; go on with: python train.py ")
    (saved,) = checkpoint.found(folder / CHECKPOINTS)
    assert checkpoint.load(saved).state["iteration"] < 4
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert_same_run(resumed(folder), plain)


@pytest.mark.parametrize("reach", ["group", "all"])
def test_a_signal_to_every_process_saves_too(tmp_path, plain: Run, reach):
    """As a terminal or batch system sends it to the process group, and systemd or Slurm to whatever is in the job."""
    folder = tmp_path / "run"
    with started(folder, *FOUR, "callbacks.checkpoint.every=100", own_group=True) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("an iteration", lambda: any(e["name"] == "train" for e in of_kind(folder, "phase")))
        if reach == "group":
            os.killpg(parent.pid, signal.SIGTERM)
        else:
            for pid in {parent.pid, *living(scratch)}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        stderr = assert_interrupted(parent, scratch, timeout_s=120)
    assert stderr.splitlines()[-1].startswith("error: stopped by SIGTERM; go on with: python train.py ")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert len(checkpoint.found(folder / CHECKPOINTS)) == 1
    assert_same_run(resumed(folder), plain)


def test_two_signals_at_the_start_end_at_once(tmp_path):
    folder = tmp_path / "run"
    with started(folder, *LONG) as parent:
        scratch = scratch_of(parent.pid)
        parent.send_signal(signal.SIGINT)
        time.sleep(0.3)
        parent.send_signal(signal.SIGINT)
        assert_interrupted(parent, scratch)


def test_a_frozen_coordinator_does_not_keep_a_job_from_ending(tmp_path):
    folder = tmp_path / "run"
    with started(folder, *LONG) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("exploration", lambda: explores(folder))
        os.kill(coordinator_of(scratch, folder), signal.SIGSTOP)
        parent.send_signal(signal.SIGINT)
        time.sleep(1.0)  # it is noted, and the coordinator is told, who does not answer
        parent.send_signal(signal.SIGINT)
        assert_interrupted(parent, scratch)


def test_a_signal_before_training_ends_with_130(tmp_path):
    folder = tmp_path / "run"
    with started(folder, *FOUR) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("the coordinator", lambda: of_kind(folder, "run_started"))
        parent.send_signal(signal.SIGINT)
        assert_interrupted(parent, scratch)


def test_a_second_signal_ends_at_once(tmp_path):
    folder = tmp_path / "run"
    with started(folder, *LONG) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("exploration", lambda: explores(folder))
        os.kill(pid_of(folder, "reserved"), signal.SIGSTOP)  # else its iteration would soon end
        parent.send_signal(signal.SIGINT)
        wait_for("the request", lambda: of_kind(folder, "stop_requested"))
        parent.send_signal(signal.SIGINT)
        assert_interrupted(parent, scratch, timeout_s=20)


def test_a_killed_parent_leaves_nothing(tmp_path):
    folder = tmp_path / "run"
    with started(folder, *LONG) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("exploration", lambda: explores(folder))
        assert len(living(scratch)) >= 6  # rank, coordinator, two workers, Ray's own
        own = niceness(os.getpid())
        assert niceness(pid_of(folder, "reserved")) == niceness(coordinator_of(scratch, folder)) == own
        assert niceness(pid_of(folder, "spot")) == own + 1  # cluster.nice
        kill(parent.pid)
        code, _, _ = finish(parent)
        assert code == -signal.SIGKILL
        assert_gone(scratch, within_s=10)


def test_a_killed_coordinator_ends_the_job_with_one_line(tmp_path):
    folder = tmp_path / "run"
    with started(folder, *LONG) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("exploration", lambda: explores(folder))
        kill(coordinator_of(scratch, folder))
        code, _, stderr = finish(parent, timeout_s=30)
    assert code == 1
    (line,) = stderr.splitlines()
    assert line.startswith("error: the coordinator died")
    assert "ckpt_path=last" in line
    assert_gone(scratch)


def test_a_killed_worker_is_replaced_and_costs_nothing(tmp_path, plain: Run):
    folder = tmp_path / "run"
    with started(folder, *FOUR) as parent:
        scratch = scratch_of(parent.pid)
        kill(wait_for("exploration", lambda: explorer(folder)))
        code, _, stderr = finish(parent, timeout_s=120)
    assert (code, stderr) == (0, "")
    assert_gone(scratch, within_s=2)
    run = Run(folder)
    assert_same_run(run, plain)  # under await lost seeds are explored again
    assert "killed" in [event["reason"] for event in run.events("worker_lost")]
    assert json.loads((folder / "summary.json").read_text())["preemptions"] == 1


def test_without_any_worker_left_a_run_goes_on_with_random_seeds(tmp_path):
    folder = tmp_path / "run"
    overrides = ("explore.sync=race", "cluster.respawn=false", "callbacks.evaluate.every=100")
    with started(folder, *JOB, "trainer.max_steps=40", *overrides) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("exploration", lambda: explores(folder))
        for event in of_kind(folder, "worker_joined"):
            if event["role"] == "spot":
                kill(event["pid"])
        code, _, stderr = finish(parent, timeout_s=120)
    assert (code, stderr) == (0, "")
    assert_gone(scratch, within_s=2)
    run = Run(folder)
    last_loss = max(event["time_s"] for event in run.events("worker_lost") if event["reason"] == "killed")
    later = [event for event in run.events("explored") if event["time_s"] > last_loss][1:]
    assert later, "the workers were killed too late to see what follows"
    assert all(event["results"] == [] for event in later)
    assert run.metrics[-1]["step"] == 40


def test_a_sweep_makes_a_folder_for_each_run(tmp_path):
    folder = tmp_path / "sweep"
    done = train(None, "-m", f"paths.output_dir={folder}", *JOB, "seed=1,2", "trainer.max_steps=1", timeout_s=200)
    assert (done.returncode, done.stderr) == (0, "")
    seeds = {}
    for number in (0, 1):
        summary = json.loads((folder / str(number) / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("done", 1)
        config = (folder / str(number) / "config.yaml").read_text()
        assert f"output_dir: {folder}/{number}\n" in config
        seeds[number] = f"\nseed: {number + 1}\n" in config
    assert seeds == {0: True, 1: True}


@pytest.mark.parametrize(
    ("logger", "leaves"),
    [("csv", "metrics.csv"), ("tensorboard", "tensorboard/events.*"), ("wandb", "wandb/offline-run-*/*.wandb")],
)
def test_loggers(tmp_path, logger, leaves):
    folder = tmp_path / "run"
    done = train(folder, *JOB, f"logger={logger}", "trainer.max_steps=1", timeout_s=150)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (file,) = folder.glob(leaves)
    assert file.stat().st_size > 100
