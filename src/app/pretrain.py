"""The job of `experiment=pretrain_*`: makes shipped weights again."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from src.app.config import build


def run(config: DictConfig) -> float:
    """Runs the recipe in `config.pretrain`, prints its held-out scores and returns the first: the reward."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    recipe = build(OmegaConf.to_container(config.pretrain, resolve=True), "pretrain")  # type: ignore[arg-type]
    scores: dict[str, float] = recipe(assets=Path(config.paths.assets_dir))
    for name, score in scores.items():
        print(f"{name:16} {score:.3f}")
    return next(iter(scores.values()))
