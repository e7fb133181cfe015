"""A training job in one process: the product's module, trainer, engines and scheduler, without Ray.

Which parts it is made of is the caller's choice, so a variant is a composition and never a copy of the loop.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from src.app.build import (
    build_callbacks,
    build_data,
    build_module,
    build_trainer,
)
from src.app.callbacks import Evaluation
from src.app.config import Config, build, check
from src.app.engine import RolloutEngine
from src.app.sampling import build_rank_engine, build_worker_engine
from src.core.protocols import Engine
from src.models.sampler import Sampler
from src.rl.module import FlowGRPO, RunIdentity
from src.spot.callback import SpotExploration
from src.spot.coordinator import Coordinator
from src.spot.inline import InlineCluster
from src.spot.scheduler import Scheduler

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """Everything that was built for a run. `exploration` and `evaluation` are the product's callbacks."""

    config: Config
    folder: Path
    sampler: Sampler
    engine: RolloutEngine
    spot_engines: Sequence[Engine]
    coordinator: Coordinator
    cluster: InlineCluster
    module: FlowGRPO
    exploration: SpotExploration
    evaluation: Evaluation

    def run(self, callbacks: Sequence[pl.Callback]) -> None:
        """Trains to the last iteration; the metrics are in the folder's metrics.jsonl."""
        trainer = build_trainer(self.config, callbacks, None)
        try:
            trainer.fit(self.module, build_data(self.config, first=0))
        finally:
            self.coordinator.shutdown()


def resolved(overrides: Sequence[str]) -> Config:
    """The configuration of `python train.py <overrides>`, composed and checked."""
    os.environ["SPOTLIGHT_ROOT"] = str(ROOT)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config: Config = OmegaConf.to_container(compose("train", list(overrides)), resolve=True)  # type: ignore[assignment]
    check(config)
    return config


def build_job(
    config: Config,
    folder: Path,
    *,
    spot_engine: Callable[[RolloutEngine], Engine] | None = None,
    cluster_of: type[InlineCluster] = InlineCluster,
) -> Job:
    """Builds a run in `folder`.

    Args:
        spot_engine: makes the one spot worker's engine of the product's; None for no spot worker.
        cluster_of: who answers the trainer.
    """
    sampler, engine = build_rank_engine(config)
    planner = build(config["planner"], "planner")
    coordinator = Coordinator(run=folder.name, folder=folder, scheduler=Scheduler(), planner=planner)
    spot = [spot_engine(build_worker_engine(config))] if spot_engine else []
    cluster = cluster_of(coordinator=coordinator, engine=engine, spot_engines=spot)
    identity = RunIdentity(run=folder.name, seed=config["seed"], incarnation=cluster.incarnation)
    exploration, evaluation, *_ = build_callbacks(config, folder, base="", resume=None)
    assert isinstance(exploration, SpotExploration)
    assert isinstance(evaluation, Evaluation)
    return Job(
        config=config,
        folder=folder,
        sampler=sampler,
        engine=engine,
        spot_engines=spot,
        coordinator=coordinator,
        cluster=cluster,
        module=build_module(config, identity, cluster, sampler, engine),
        exploration=exploration,
        evaluation=evaluation,
    )


def quiet() -> None:
    """Keeps Lightning's advice off the terminal, as the product's rank does."""
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
