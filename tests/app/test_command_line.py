"""What `python train.py` answers before it starts anything: help, and mistakes in its input."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from src.app.config import CHECKPOINTS
from tests.app.processes import JOB, command, environment, train
from tests.app.runs import ROOT, Run

HEAVY = {"torch", "ray", "pytorch_lightning", "diffusers", "peft", "wandb", "numpy"}


@pytest.mark.parametrize("option", [["--help"], ["--cfg", "job"]], ids=["help", "cfg"])
def test_help_and_the_configuration_load_nothing_heavy(option):
    script, *arguments = command(None, *option)[1:]
    probe = (
        f"import runpy, sys; sys.argv = {[script, *arguments]!r}\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"finally:\n    print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert "prompts_per_iteration" in done.stdout


MISTAKES = {
    "override": (["algo.group_sise=3"], ["algo.group_sise"]),
    "group": (["experiment=tiny_txt"], ["experiment/tiny_txt", "tiny_text"]),
    "argument": (["+planner.seeds=3"], ["planner", "seeds"]),
    "value": (["algo.updates=4"], ["algo.updates", "1..3", "got 4"]),
    "checkpoint": (["ckpt_path=/nowhere"], ["ckpt_path", "/nowhere"]),
    "last": (["ckpt_path=last"], ["ckpt_path=last"]),
    "logger": (["logger=wandb", "logger.timeout_s=0"], ["logger.timeout_s", "got 0"]),
}
"""One of each kind; `test_configuration` has the values."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_code_2_and_one_line_that_names_it(tmp_path, mistake):
    overrides, named = MISTAKES[mistake]
    done = train(tmp_path / "run", *JOB, *overrides)
    assert_refused(done, named)


def assert_refused(done: subprocess.CompletedProcess[str], named: list[str]) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert [text for text in named if text not in line] == []


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, plain: Run):
    folder = tmp_path / "run"
    shutil.copytree(plain.folder, folder)
    before = (folder / "events.jsonl").read_bytes()
    assert_refused(train(folder, *JOB), ["paths.output_dir", str(folder), "ckpt_path=last"])
    assert (folder / "events.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, plain: Run):
    newest = tmp_path / "run" / CHECKPOINTS / "iteration_000004"
    shutil.copytree(plain.folder, tmp_path / "run")
    (newest / "policy.safetensors").write_bytes(b"")
    assert_refused(train(tmp_path / "new", *JOB, f"ckpt_path={newest}"), [str(newest), "policy.safetensors"])
