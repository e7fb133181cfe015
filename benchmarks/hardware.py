"""Seconds of this machine's work, in the units of a hardware profile (src/sim/hardware.py).

python -m benchmarks.hardware [hydra overrides ...]      # overrides of experiment=tiny_text

The product trains in one process, beside a neighbour (benchmarks/neighbour.py) that samples on the last core as a spot
worker would: in a job both are busy. Each figure is the median over iterations; `train` holds what the trainer does
besides, at the given sizes. Those of conf/hardware/local_cpu.yaml were measured without the neighbour.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.iteration import QUICK, product_phases
from benchmarks.job import build_job, quiet, resolved
from benchmarks.neighbour import neighbour
from benchmarks.output import print_figures
from src.app.config import geometry


def measure(overrides: Sequence[str], repetitions: int) -> dict[str, Any]:
    """Runs one iteration more than `repetitions`; the first one warms up."""
    config = resolved(["experiment=tiny_text", "planner=none", f"trainer.max_steps={repetitions + 1}", *overrides])
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(config, Path(folder))
        with neighbour(config, sorted(os.sched_getaffinity(0))[-1:]):
            job.run([job.exploration])
        phases = product_phases(Path(folder))[1:]
    sizes, passes = geometry(config), 1 if config["algo"]["guidance_scale"] == 1 else 2

    def median(phase: str) -> float:
        return statistics.median(seconds[phase] for seconds in phases)

    return {
        "repetitions": repetitions,
        "overrides": list(overrides),
        "denoise": median("rollout") / (sizes.samples * sizes.steps * passes),
        "decode_score": median("score") / sizes.samples,
        "train": median("train") / (sizes.pairs * passes),
        "publish": median("publish"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of experiment=tiny_text")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a few tiny iterations: a test")
    options = parser.parse_args(arguments)
    quiet()
    overrides = [*(QUICK if options.quick else ()), *options.overrides]
    print_figures("hardware", measure(overrides, 2 if options.quick else options.repetitions))


if __name__ == "__main__":
    main()
