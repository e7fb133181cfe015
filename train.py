"""Post-trains a diffusion transformer with GRPO, exploring seeds on spot workers.

python train.py                                    # the default experiment
python train.py experiment=tiny_shapes seed=3      # any value under conf/ can be overridden
python train.py -m seed=1,2 algo.noise_level=0.5,0.7
"""

from __future__ import annotations

import os
import sys

os.environ["SPOTLIGHT_ROOT"] = os.path.dirname(os.path.abspath(__file__))
os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us as exceptions: we print one line, not a traceback

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Runs one job; returns the final held-out reward to the sweeper."""
    from src.app import errors, job  # imported here: --help and --cfg answer without loading anything else

    try:
        return job.launch(config)
    except (Exception, KeyboardInterrupt) as error:  # here and not outside, where Hydra would add lines of its own
        sys.exit(errors.exit_code_of(error))


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        sys.exit()  # under torchrun the first process is the job, which starts all of its ranks
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:  # Hydra's: a misspelt override, a broken YAML file
        from src.app import errors

        sys.exit(errors.exit_code_of(error))
