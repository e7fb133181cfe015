"""Whether a job learns the same on one rank, on two that share every sequence, and on two that die and come back.

python -m benchmarks.same_curve [--iterations 40] [--seed 0]

Each arm is a `python train.py experiment=tiny_digits` with a spot worker that explores; what is asked for is waited for
(explore.sync=await, planner=fixed), so that only the order of sums differs between the arms:

one        one training rank
rounding   the same with other micro-batches, so that gradients round otherwise: what differs here is no matter of ranks
shared     two ranks, parallel.sp_degree=2
elastic    the same with parallel.elastic=true: after a fifth of the iterations a rank is killed with SIGKILL; the other
           one goes on alone, until a new process joins it

Compared with `one` are the held-out rewards of all evaluations and the final weights: how far apart they are, as a part
of the way that training took from the base weights. Rounding grows with updates, and when two seeds change places in a
ranking, other samples are trained on. Ends with code 1 where arms differ by more than the tolerances. Jobs that are
done in --out are not run again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.job import ROOT, resolved
from benchmarks.output import print_figures, say
from src.app import checkpoint
from src.app.config import CHECKPOINTS
from src.app.sampling import build_rank_engine
from src.core.clock import sleep_s
from src.core.events import read_jsonl

REWARD_TOLERANCE = 0.05
"""Of held-out rewards, which lie between 0 and 1."""
WEIGHT_TOLERANCE = 1.5
"""Of the distance between final weights, relative to that of `rounding`."""

COMMON = (
    "experiment=tiny_digits",
    "logger=none",
    "explore.sync=await",
    "planner=fixed",
    "cluster.spot_workers=1",
    "cluster.spares=0",
    "callbacks.evaluate.every=5",
    "callbacks.evaluate.images=0",
)
SHARED = ("parallel=ulysses", "trainer.devices=2", "parallel.sp_degree=2")
ARMS: Mapping[str, Sequence[str]] = {
    "one": (),
    "rounding": ("algo.micro_batch=12",),
    "shared": SHARED,
    "elastic": (*SHARED, "parallel.elastic=true"),
}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    log = folder / "events.jsonl"
    return [event for event in read_jsonl(log) if event["kind"] == kind] if log.exists() else []


def train(arm: str, overrides: Sequence[str], folder: Path, *, kill_after: int | None) -> None:
    """Runs a job to its end; a rank is killed once so many iterations have begun.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, str(ROOT / "train.py"), f"paths.output_dir={folder}", *overrides]
    with (folder.with_suffix(".log")).open("w", encoding="utf-8") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while job.poll() is None:
            if kill_after is not None and len(events(folder, "kept")) > kill_after:
                kill_after = None
                ranks = [each for each in psutil.Process(job.pid).children() if "src.app.rank" in each.cmdline()]
                ranks[-1].send_signal(signal.SIGKILL)
            sleep_s(0.2)
    if job.returncode:
        raise RuntimeError(f"arm {arm} ended with {job.returncode}: see {folder.with_suffix('.log')}")


def curve(folder: Path) -> list[float]:
    """Held-out rewards, in order."""
    return [row["eval/reward"] for row in read_jsonl(folder / "metrics.jsonl") if "eval/reward" in row]


def policy(folder: Path) -> Tensor:
    """The final weights, as one vector."""
    return flat(checkpoint.load(checkpoint.found(folder / CHECKPOINTS)[-1]).tensors["policy"])


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where run folders are kept")
    options = parser.parse_args()
    common = (*COMMON, f"trainer.max_steps={options.iterations}", f"seed={options.seed}")
    root = options.out or Path(tempfile.mkdtemp(prefix="same-curve-"))
    root.mkdir(parents=True, exist_ok=True)
    for arm, overrides in ARMS.items():
        if not any(event["status"] == "done" for event in events(root / arm, "run_ended")):
            say(f"{arm} ...")
            kill_after = options.iterations // 5 if arm == "elastic" else None
            train(arm, (*common, *overrides), root / arm, kill_after=kill_after)
        say(f"{arm}: " + " ".join(f"{reward:.3f}" for reward in curve(root / arm)))
    sampler, _ = build_rank_engine(resolved(common))
    reference, way = policy(root / "one"), policy(root / "one") - flat(sampler.adapter.trainable_state())
    figures: dict[str, Any] = {"curve": {arm: curve(root / arm) for arm in ARMS}}
    for arm in list(ARMS)[1:]:
        rewards = zip(curve(root / arm), curve(root / "one"), strict=True)
        figures[arm] = {
            "reward_difference": max(abs(mine - theirs) for mine, theirs in rewards),
            "weight_difference": float((policy(root / arm) - reference).norm() / way.norm()),
        }
    worlds = [event["world"] for event in events(root / "elastic", "rank_recovered")]
    figures["elastic"]["ranks"] = [2, *worlds]
    print_figures("same_curve", figures)
    limit = WEIGHT_TOLERANCE * figures["rounding"]["weight_difference"]
    equal = all(
        figures[arm]["reward_difference"] <= REWARD_TOLERANCE and figures[arm]["weight_difference"] <= limit
        for arm in ("shared", "elastic")
    )
    sys.exit(0 if equal and worlds == [1, 2] else 1)


if __name__ == "__main__":
    main()
