"""Post-trains a diffusion transformer with GRPO, exploring seeds on spot workers.

python train.py                                    # the default experiment
python train.py experiment=tiny_shapes seed=3      # any value under conf/ can be overridden
python train.py -m seed=1,2 algo.noise_level=0.5,0.7
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us as exceptions: we print one line, not a traceback

import hydra
from omegaconf import DictConfig

BAD_INPUT = 2


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Runs one job; returns the final held-out reward to the sweeper."""
    from src.app.config import ConfigError  # imported here: --help and --cfg answer without loading torch
    from src.app.job import launch

    try:
        return launch(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)


def _entry() -> None:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    _entry()
