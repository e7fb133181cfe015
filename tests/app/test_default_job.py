"""What `python train.py` promises: the default job learns to write, in minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.app.processes import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def test_the_default_job_learns_to_write(tmp_path: Path):
    done = train(tmp_path / "run", "logger=csv", timeout_s=400)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] <= 24
    assert summary["eval_reward_start"] < 0.5
    assert summary["eval_reward_end"] >= 0.6
    assert summary["wall_s"] < 360
