"""A training rank: `python -m src.app.rank RUN_FOLDER`, started by the job's parent process (src/app/job.py).

It loads its libraries and model while the parent starts Ray; one JSON line on standard input then says where
it is, and from which checkpoint to go on. It ends with the parent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml

from src.app import checkpoint
from src.app.build import build_training
from src.app.checkpoint import CheckpointError
from src.app.config import Config, ConfigError, build, refusing
from src.app.elastic import come_in
from src.app.processes import BAD_INPUT, DONE, FAILED, LEFT, LOST, die_with_parent
from src.app.sampling import build_rank_engine
from src.core.protocols import Cluster, Engine
from src.parallel.cluster import RankCluster
from src.parallel.elastic import Left, StateLost
from src.parallel.mesh import FixedWorld, World
from src.parallel.ulysses import SequenceGroup
from src.spot.client import RayCluster


def main(folder: Path) -> None:
    """Trains until the last iteration, or until the user asks to stop."""
    die_with_parent()
    config: Config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    parallel = config["parallel"]
    group = SequenceGroup() if parallel["mesh"] else None
    world: World | None = None
    if parallel["elastic"] and config["trainer"]["accelerator"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything is on a GPU
    if group is not None and not parallel["elastic"]:
        world = FixedWorld(build(parallel["mesh"], "parallel.mesh")())
        group.enter(world.mesh.sequence)
    sampler, engine = build_rank_engine(config, group)
    start: dict[str, Any] = json.loads(sys.stdin.readline())
    resume = checkpoint.load(Path(start["resume"])) if start["resume"] and not start.get("joins") else None

    def connect(engine: Engine, number: int = 0) -> Cluster:
        return RayCluster.connect(start["address"], engine=engine, rank=number)

    cluster: Cluster
    if parallel["elastic"]:
        assert group is not None
        world, cluster, known = come_in(config, start, engine, group)
        resume = known or resume
    elif world is not None:
        cluster = RankCluster(world=world, engine=engine, connect=connect)
    else:
        cluster = connect(engine)
    with refusing():
        trainer, module, data = build_training(config, folder, cluster, sampler, engine, resume, world)
    trainer.fit(module, data)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop, so that a checkpoint is saved
    warnings.filterwarnings("ignore", module="pytorch_lightning")  # advice on settings that are chosen on purpose
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    to_parent, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # one line tells the parent what went wrong
    os.dup2(2, 1)  # gloo and NCCL write to it, whatever Python's is
    code = DONE
    try:
        main(Path(sys.argv[1]))
    except (ConfigError, CheckpointError) as error:
        code = BAD_INPUT
        print(error, file=to_parent)
    except Left:
        code = LEFT
    except StateLost as error:
        code = LOST
        print(error, file=to_parent)
    except Exception as error:
        code = FAILED
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=to_parent)
    to_parent.flush()
    sys.stderr.flush()
    os._exit(code)  # all is said and saved; taking torch, diffusers and Ray apart would cost seconds
