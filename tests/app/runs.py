"""Training runs in this process, built by the product's own functions around an inline cluster."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from src.app import checkpoint
from src.app.build import build_training
from src.app.config import CHECKPOINTS, Config, build, check, find_checkpoint
from src.app.engine import RolloutEngine
from src.app.sampling import build_rank_engine, build_worker_engine
from src.core.events import read_jsonl
from src.core.protocols import Engine
from src.core.types import Batch
from src.spot.coordinator import Coordinator
from src.spot.inline import InlineCluster
from src.spot.scheduler import Scheduler

ROOT = Path(__file__).parents[2]

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)

TINY = (
    "experiment=tiny_digits",
    "debug=fast",
    "data.prompts_per_iteration=3",
    "data.eval_prompts=8",
    "algo.group_size=4",
    "algo.steps=3",
    "algo.eval_steps=3",
    "algo.trained_steps=2",
    "model.batch_size=12",
)
"""An iteration takes a fifth of a second and still does everything."""

EXPLORED = "planner.seeds_per_prompt=8"

LORA = "model.lora={rank: 4, alpha: 8, target_modules: [to_q, to_k, to_v]}"

Wrap = Callable[[RolloutEngine], Engine]


def composed(*overrides: str) -> DictConfig:
    """The configuration of `python train.py <overrides>`."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", list(overrides))


def configuration(folder: Path, *overrides: str) -> Config:
    """The same, resolved for a run in `folder`, and checked."""
    config = composed(f"paths.output_dir={folder}", *overrides)
    resolved: Config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    check(resolved)
    return resolved


@dataclass(frozen=True)
class Run:
    """What is left of a run."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl without times and costs, which differ from run to run."""
        rows = [
            {name: value for name, value in row.items() if not name.startswith(("time", "cost/"))}
            for row in read_jsonl(self.folder / "metrics.jsonl")
        ]
        return [row for row in rows if row.keys() > {"step"}]

    def metric(self, name: str) -> list[float]:
        """All values of one metric, in order."""
        return [row[name] for row in self.metrics if name in row]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of one kind, in order."""
        return [event for event in read_jsonl(self.folder / "events.jsonl") if event["kind"] == kind]

    @property
    def checkpoint(self) -> checkpoint.Checkpoint:
        """The newest one."""
        return checkpoint.load(checkpoint.found(self.folder / CHECKPOINTS)[-1])

    @property
    def policy(self) -> dict[str, Tensor]:
        """The trained parameters at the end."""
        return dict(self.checkpoint.tensors["policy"])


class StopAfter(pl.Callback):
    """Presses Ctrl-C at the start of iteration number `iterations` (counted from 1)."""

    def __init__(self, iterations: int, coordinator: Coordinator) -> None:
        self._iterations = iterations
        self._coordinator = coordinator

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if batch.iteration + 1 == self._iterations:
            self._coordinator.stop("SIGINT")


def run_inline(
    folder: Path,
    *overrides: str,
    workers: int = 1,
    ckpt_path: str | None = None,
    stop_after: int | None = None,
    trainer_engine: Wrap = lambda engine: engine,
    worker_engine: Wrap = lambda engine: engine,
) -> Run:
    """Runs `python train.py <overrides>` without its processes.

    Args:
        workers: spot workers.
        stop_after: the user stops the run in this iteration.
        trainer_engine, worker_engine: replace the engines, to make them fail or lie.
    """
    config = configuration(folder, *overrides)
    found, _ = find_checkpoint(ckpt_path, folder)
    resume = checkpoint.load(found) if found else None
    sampler, engine = build_rank_engine(config)
    coordinator = Coordinator(
        run=folder.name,
        folder=folder,
        scheduler=Scheduler(),
        planner=build(config["planner"], "planner"),
        iteration=resume.state["iteration"] if resume else 0,
    )
    try:
        cluster = InlineCluster(
            coordinator=coordinator,
            engine=trainer_engine(engine),
            spot_engines=[worker_engine(build_worker_engine(config)) for _ in range(workers)],
        )
        trainer, module, data = build_training(config, folder, cluster, sampler, engine, resume)
        if stop_after is not None:
            trainer.callbacks.insert(0, StopAfter(stop_after, coordinator))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="pytorch_lightning")  # as src/app/rank.py does
            trainer.fit(module, data)
    finally:
        coordinator.shutdown()
    return Run(folder)


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Equal names, equal bits."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} tensors differ, first {different[:3]}"


def assert_same_run(one: Run, other: Run) -> None:
    """Policy, optimizer, random state and all metrics are equal, bit for bit."""
    mine, theirs = one.checkpoint, other.checkpoint
    assert mine.tensors.keys() == theirs.tensors.keys()
    for name in mine.tensors:
        assert_same_tensors(dict(mine.tensors[name]), dict(theirs.tensors[name]))
    assert mine.state["optimizer"] == theirs.state["optimizer"]
    assert one.metrics == other.metrics
