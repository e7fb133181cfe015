"""Where metrics go besides the run folder: W&B, CSV, TensorBoard. They run in the job's parent process.

Each sink imports its package when it starts, so that a job pays only for the one it uses. Hydra constructs it
from conf/logger/*.yaml.
"""

from __future__ import annotations

import csv
import logging
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
"""An entry of images/manifest.json: iteration, index, prompt, reward, judge, file."""


class Sink(Protocol):
    """Takes what a run logs. `start` is called first, `finish` last."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """`folder` is the run folder, `config` its resolved configuration."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics after `step` iterations; several calls for one step add up."""

    def images(self, step: int, rows: Sequence[Row]) -> None:
        """Held-out images of an evaluation; the files lie in `images/` of the run folder."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended with these figures."""


class NoSink:
    """Logs to the run folder alone."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def images(self, step: int, rows: Sequence[Row]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Guarded:
    """A sink that cannot hurt the run: its first error is reported, and it is left out from then on."""

    def __init__(self, sink: Sink, warn: Callable[[str], None] = log.warning) -> None:
        self._sink: Sink | None = sink
        self._warn = warn

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._try(lambda sink: sink.start(folder, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda sink: sink.log(step, metrics))

    def images(self, step: int, rows: Sequence[Row]) -> None:
        self._try(lambda sink: sink.images(step, rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._try(lambda sink: sink.finish(summary))

    def _try(self, call: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            call(self._sink)
        except Exception as error:
            self._warn(f"{type(self._sink).__name__} failed and is left out from here on: {error}")
            self._sink = None


class WandbSink:
    """Weights & Biases: online if there is a key (WANDB_API_KEY or netrc), else offline; WANDB_MODE rules.

    A resumed run folder goes on with the W&B run that it had. If the network does not answer, the run is kept
    offline in the run folder, for `wandb sync`.

    Args:
        project, group, name, tags: as W&B shows them; `name` None takes the run folder's.
        timeout_s: how long to wait for the network at the start and at the end.
    """

    def __init__(
        self,
        *,
        project: str,
        group: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        timeout_s: float = 30.0,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"logger.timeout_s must be positive, got {timeout_s}")
        self._project = project
        self._group = group
        self._name = name
        self._tags = tuple(tags)
        self._timeout_s = timeout_s
        self._run: Any = None
        self._folder = Path()

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key(os.environ) else "offline")
        try:
            self._run = self._init(folder, config, mode)
        except Exception as error:
            if mode == "offline":
                raise
            log.warning("W&B cannot be reached, the run is kept offline: %s", error)
            self._run = self._init(folder, config, "offline")
        # Rows of one step come from several processes, so W&B's own counter is not the step.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def images(self, step: int, rows: Sequence[Row]) -> None:
        import wandb

        pictures = [
            wandb.Image(str(self._folder / "images" / row["file"]), caption=f"{row['prompt']} ({row['reward']:.2f})")
            for row in rows
        ]
        self._run.log({"step": step, "images": pictures})

    def finish(self, summary: Mapping[str, Any]) -> None:
        import wandb

        self._run.summary.update(dict(summary))
        self._run.finish()
        wandb.teardown()  # its service process is one of the job's, and ends with it

    def _init(self, folder: Path, config: Mapping[str, Any], mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            init_timeout=self._timeout_s, finish_timeout=self._timeout_s, silent=True, console="off"
        )
        return wandb.init(
            project=self._project,
            group=self._group,
            name=self._name or folder.name,
            tags=self._tags,
            id=earlier_wandb_id(folder),
            resume="allow",
            dir=folder,
            config=dict(config),
            mode=mode,  # type: ignore[arg-type]
            settings=settings,
        )


def has_wandb_key(environ: Mapping[str, str]) -> bool:
    """Whether W&B would find a key without asking: in the environment, or in the user's netrc file."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def earlier_wandb_id(folder: Path) -> str | None:
    """The id of the W&B run that this run folder has, from the folders `[offline-]run-<time>-<id>` in it."""
    names = sorted(path.name.removeprefix("offline-") for path in (folder / "wandb").glob("*run-*"))
    return names[-1].split("-")[2] if names else None


class CsvSink:
    """metrics.csv in the run folder: one row per step, one column per metric."""

    def __init__(self) -> None:
        self._file = Path()
        self._rows: dict[int, dict[str, Any]] = {}

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Goes on with the file of a resumed run."""
        self._file = folder / "metrics.csv"
        if self._file.is_file():
            with self._file.open(newline="", encoding="utf-8") as file:
                self._rows = {int(row.pop("step")): dict(row) for row in csv.DictReader(file)}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the whole file anew: runs have few steps, and a later metric needs its own column."""
        self._rows.setdefault(step, {}).update(metrics)
        names = sorted({name for row in self._rows.values() for name in row})
        with self._file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["step", *names])
            writer.writeheader()
            writer.writerows({"step": step, **row} for step, row in sorted(self._rows.items()))

    def images(self, step: int, rows: Sequence[Row]) -> None:
        """The run folder has them."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run folder has it."""


class TensorBoardSink:
    """Event files in `tensorboard/` of the run folder: `tensorboard --logdir outputs`."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._folder = Path()

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def images(self, step: int, rows: Sequence[Row]) -> None:
        import numpy as np
        from PIL import Image

        for row in rows:
            with Image.open(self._folder / "images" / row["file"]) as image:
                pixels_HWC = np.asarray(image.convert("RGB"))
            self._writer.add_image(f"images/{row['index']}", pixels_HWC, step, dataformats="HWC")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()
