"""`python train.py parallel.elastic=true`: ranks of a whole job are killed, frozen and told to leave, and come back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.app.processes import assert_gone, events, kill, living, scratch_of, started, wait_for
from tests.app.runs import TINY, Run
from tests.app.test_average import BRIGHTNESS, EMA
from tests.app.test_ranks import assert_same_curve, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ELASTIC = ("parallel=ulysses", "parallel.elastic=true")
QUIET = ("planner=none", "explore.sync=race", "cluster.spot_workers=0")
LONG = (*TINY, *ELASTIC, *QUIET, "trainer.max_steps=100000", "callbacks.evaluate.every=100000")
"""Until it is stopped."""


def ranks_of(scratch: Path) -> dict[int, int]:
    """Process ids of the training ranks by place."""
    found = {}
    for pid, command in living(scratch).items():
        if "src.app.rank" in command:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found[int(next(e for e in entries if e.startswith(b"RANK=")).removeprefix(b"RANK="))] = pid
    return found


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(folder) if event["kind"] == kind]


def wait_for_ranks(folder: Path, count: int, *, after: int) -> dict[str, Any]:
    """The first recovery of so many ranks in a generation later than `after`."""

    def found() -> dict[str, Any] | None:
        told = of_kind(folder, "rank_recovered")
        return next((e for e in told if e["world"] == count and e["generation"] > after), None)

    recovered: dict[str, Any] = wait_for(f"{count} ranks after generation {after}", found, timeout_s=400)
    return recovered


@pytest.mark.parametrize(("devices", "degree"), [(3, 1), (4, 2)])
def test_a_job_outlives_each_of_its_ranks(tmp_path: Path, devices: int, degree: int):
    """The last one is killed, the first one frozen, the second told to leave. The first two come back; the weights of
    all ranks stay equal, or the job would end."""
    folder = tmp_path / "run"
    with started(folder, *LONG, f"trainer.devices={devices}", f"parallel.sp_degree={degree}") as parent:
        scratch = scratch_of(parent.pid)
        wait_for("two iterations", lambda: len(of_kind(folder, "kept")) > 2, timeout_s=400)
        kill(ranks_of(scratch)[devices - 1])
        shrunk = wait_for_ranks(folder, devices - 1, after=0)
        assert shrunk["sp_degree"] == 1, "three ranks cannot share in pairs"
        grown = wait_for_ranks(folder, devices, after=shrunk["generation"])
        assert grown["sp_degree"] == degree
        os.kill(ranks_of(scratch)[0], signal.SIGSTOP)
        shrunk = wait_for_ranks(folder, devices - 1, after=grown["generation"])
        grown = wait_for_ranks(folder, devices, after=shrunk["generation"])
        os.kill(ranks_of(scratch)[1], signal.SIGTERM)
        wait_for_ranks(folder, devices - 1, after=grown["generation"])
        before = len(of_kind(folder, "kept"))
        wait_for("more iterations", lambda: len(of_kind(folder, "kept")) > before + 2)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(200) == 130
    assert_gone(scratch)
    ended = [(event["reason"], event["restarts"]) for event in of_kind(folder, "rank_ended")]
    assert ended[:3] == [("killed", True), ("frozen", True), ("left", False)]
    run = Run(folder)
    kept = [event["iteration"] for event in run.events("kept")]
    assert kept == list(range(len(kept))), "every iteration once, in order"
    steps = [row["step"] for row in run.metrics if "train/reward" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert run.checkpoint.state["iteration"] == len(steps)
    assert not Path("/dev/shm", scratch.name).exists()


def test_ranks_that_nothing_happens_to_train_like_one(tmp_path: Path):
    run, one = train(tmp_path / "elastic", *ELASTIC, "trainer.devices=2"), train(tmp_path / "one")
    assert_same_curve(run, one)
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "done"


AVERAGED = (
    *("callbacks.evaluate.every=1", "callbacks.evaluate.average=true", "data.eval_prompts=24", "algo.eval_steps=150"),
    *(EMA, "algo.warmup_updates=0", *BRIGHTNESS),
)
"""Most of the time held-out images are made with the average of the weights: there are few iterations for rounding to
grow in. An average that is lost would move their reward by hundredths."""


def test_the_average_of_the_weights_outlives_every_rank_that_made_it(tmp_path: Path):
    """Both first ranks are killed while the average is in the model's place; in the end only newcomers know it."""
    folder = tmp_path / "run"

    def kill_in_evaluation(place: int) -> None:
        seen = len(of_kind(folder, "policy_published"))

        def averaged() -> bool:
            return any(event["version"].endswith(".average") for event in of_kind(folder, "policy_published")[seen:])

        pid = ranks_of(scratch)[place]
        wait_for("an evaluation", averaged)
        kill(pid)

    with started(folder, *LONG, *AVERAGED, "trainer.devices=2") as parent:
        scratch = scratch_of(parent.pid)
        wait_for("two evaluations", lambda: len(of_kind(folder, "evaluated")) > 2, timeout_s=400)
        known = {"generation": 0}
        for place in (1, 0):
            kill_in_evaluation(place)
            known = wait_for_ranks(folder, 2, after=known["generation"])
        before = len(of_kind(folder, "evaluated"))
        wait_for("more evaluations", lambda: len(of_kind(folder, "evaluated")) > before + 2)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(200) == 130
    assert [event["reason"] for event in of_kind(folder, "rank_ended")][:2] == ["killed", "killed"]
    run = Run(folder)
    one = train(tmp_path / "one", *AVERAGED, f"trainer.max_steps={run.checkpoint.state['iteration']}")
    assert run.metric("eval/reward") == pytest.approx(one.metric("eval/reward"), abs=2e-3)


def test_ranks_that_are_all_told_to_leave_save_first(tmp_path: Path):
    """And the job goes on from there."""
    folder = tmp_path / "run"
    with started(folder, *LONG, "trainer.devices=2") as parent:
        scratch = scratch_of(parent.pid)
        wait_for("two iterations", lambda: len(of_kind(folder, "kept")) > 2, timeout_s=400)
        for pid in ranks_of(scratch).values():
            os.kill(pid, signal.SIGTERM)
        assert parent.wait(200) == 130
        assert parent.stderr is not None
        assert "stopped by SIGTERM; go on with: " in parent.stderr.read()
    assert_gone(scratch)
    reached = Run(folder).checkpoint.state["iteration"]
    assert reached == len([row for row in Run(folder).metrics if "train/reward" in row])
    run = train(folder, *ELASTIC, "trainer.devices=2", f"trainer.max_steps={reached + 1}", "ckpt_path=last")
    assert run.checkpoint.state["iteration"] == reached + 1


def test_the_job_fails_when_all_ranks_are_killed(tmp_path: Path):
    folder = tmp_path / "run"
    with started(folder, *LONG, "trainer.devices=2") as parent:
        scratch = scratch_of(parent.pid)
        wait_for("an iteration", lambda: of_kind(folder, "kept"), timeout_s=400)
        for pid in ranks_of(scratch).values():
            kill(pid)
        assert parent.wait(300) == 1
        assert parent.stderr is not None
        assert "was killed by SIGKILL" in parent.stderr.read()
    assert_gone(scratch)
