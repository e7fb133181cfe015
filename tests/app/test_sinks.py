import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from src.app import sinks
from src.app.sinks import CsvSink, Guarded, NoSink, Row, Sink, TensorBoardSink, WandbSink, has_wandb_key
from tests.report.synthetic import write_run

ROOT = Path(__file__).parents[2]


class Flaky:
    """Fails at the named call; notes every call that it gets."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.calls: list[str] = []

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._call("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log")

    def images(self, step: int, rows: Sequence[Row]) -> None:
        self._call("images")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._call("finish")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise ConnectionError("no route")


def use(sink: Sink, folder: Path) -> None:
    """A whole run's life of a sink."""
    sink.start(folder, {"seed": 1})
    sink.log(0, {"eval/reward": 0.4})
    sink.log(1, {"train/reward": 0.5})
    sink.log(1, {"eval/reward": 0.6})
    sink.images(1, json.loads((folder / "images" / "manifest.json").read_text())[-2:])
    sink.finish({"eval_reward_end": 0.6, "eval_judge_end": None})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", iterations=1)


@pytest.mark.parametrize(
    ("fails_at", "calls"),
    [
        ("start", ["start"]),
        ("images", ["start", "log", "log", "log", "images"]),
        ("finish", ["start", "log", "log", "log", "images", "finish"]),
    ],
)
def test_a_failing_sink_warns_once_and_is_left_out(folder: Path, fails_at: str, calls: list[str]) -> None:
    warnings: list[str] = []
    flaky = Flaky(fails_at)
    use(Guarded(flaky, warnings.append), folder)
    assert flaky.calls == calls
    assert warnings == ["Flaky failed and is left out from here on: no route"]


def test_a_working_sink_gets_every_call(folder: Path) -> None:
    warnings: list[str] = []
    flaky = Flaky("never")
    use(Guarded(flaky, warnings.append), folder)
    assert flaky.calls == ["start", "log", "log", "log", "images", "finish"]
    assert warnings == []


def test_no_sink_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    use(NoSink(), folder)
    assert sorted(folder.rglob("*")) == before


def test_csv_has_one_row_per_step_and_goes_on_after_a_resume(folder: Path) -> None:
    use(CsvSink(), folder)
    resumed = CsvSink()
    resumed.start(folder, {})
    resumed.log(2, {"train/kl": 0.1})
    with (folder / "metrics.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "eval/reward", "train/kl", "train/reward"],
            ["0", "0.4", "", ""],
            ["1", "0.6", "", "0.5"],
            ["2", "", "0.1", ""],
        ]


def test_tensorboard_reads_back_what_was_logged(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    use(TensorBoardSink(), folder)
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    assert [(point.step, round(point.value, 6)) for point in read.Scalars("eval/reward")] == [
        (0, 0.4),
        (1, 0.6),
    ]
    assert sorted(read.Tags()["images"]) == ["images/6", "images/7"]


@pytest.mark.parametrize(
    ("environ", "netrc", "found"),
    [
        ({"WANDB_API_KEY": "k"}, None, True),
        ({}, None, False),
        ({}, "machine api.wandb.ai login user password k\n", True),
        ({}, "machine elsewhere login user password k\n", False),
        ({}, "machine w.example login user password k\n", False),
        ({"WANDB_BASE_URL": "https://w.example"}, "machine w.example login user password k\n", True),
        ({}, "not a netrc", False),
    ],
)
def test_a_wandb_key_is_found_where_wandb_looks(
    tmp_path: Path, environ: dict[str, str], netrc: str | None, found: bool
) -> None:
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
        (tmp_path / ".netrc").chmod(0o600)
    assert has_wandb_key({"HOME": str(tmp_path), **environ}) is found


def test_wandb_falls_back_to_offline_when_it_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modes: list[str] = []

    class Run:
        def define_metric(self, *args: Any, **kwargs: Any) -> None: ...

    def init(self: WandbSink, folder: Path, config: Mapping[str, Any], mode: str) -> Run:
        modes.append(mode)
        if mode == "online":
            raise ConnectionError("no route")
        return Run()

    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(WandbSink, "_init", init)
    WandbSink(project="p").start(tmp_path, {})
    assert modes == ["online", "offline"]
    assert "kept offline: no route" in caplog.text


def test_wandb_refuses_a_timeout_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"logger\.timeout_s must be positive, got 0"):
        WandbSink(project="p", timeout_s=0)


@pytest.mark.timeout(120)
def test_a_real_offline_wandb_run_is_written_and_continued(folder: Path) -> None:
    """In a process of its own, as in a job: W&B starts a service process that ends with it."""
    code = (
        "import sys, json; from pathlib import Path; from tests.app.test_sinks import use\n"
        "from src.app.sinks import WandbSink, earlier_wandb_id\n"
        "folder = Path(sys.argv[1])\n"
        "use(WandbSink(project='p', group='g', tags=['t']), folder); first = earlier_wandb_id(folder)\n"
        "use(WandbSink(project='p'), folder); print(json.dumps([first, earlier_wandb_id(folder)]))\n"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environ |= {"HOME": str(folder), "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=110,
    )  # fmt: skip
    first, second = json.loads(done.stdout)
    assert first == second
    logs = list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert logs
    assert all(log.stat().st_size > 1000 for log in logs)


@pytest.mark.parametrize("name", ["wandb", "csv", "tensorboard", "none"])
def test_every_logger_config_constructs_its_sink_without_loading_its_package(name: str) -> None:
    config = yaml.safe_load((ROOT / "conf" / "logger" / f"{name}.yaml").read_text())
    sink = getattr(sinks, config.pop("_target_").removeprefix("src.app.sinks."))
    code = f"from src.app.sinks import {sink.__name__}; import sys; {sink.__name__}(**{config!r})\n"
    code += "print([n for n in ('torch', 'wandb', 'tensorboard', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
