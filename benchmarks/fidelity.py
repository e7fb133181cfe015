"""Does a virtual cluster tell how long a job takes? A profile of this machine, and a real and a virtual job of it.

python -m benchmarks.fidelity             # six real jobs (minutes, on a machine that does nothing else)
python -m benchmarks.fidelity --quick     # tiny: a test

The profile is measured without spot workers, beside a process that samples (benchmarks.hardware). The jobs have one
training rank and one spot worker, on a core each. With 8 seeds per prompt there is more time than they take, so that
the worker idles for a part of each iteration; with 12 the last lease is or is not done when training ends.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hardware import measure
from benchmarks.iteration import QUICK
from benchmarks.job import ROOT, quiet, resolved
from benchmarks.output import print_figures, say, spread
from src.app.virtual import rehearse
from src.core.events import read_jsonl
from src.core.stats import mean

JOB = (
    "experiment=tiny_text",
    "callbacks.evaluate.every=1000",
    "callbacks.evaluate.images=0",
    "explore.audit.prompts=0",
    "~callbacks.checkpoint",
    "~callbacks.export",
)
SEEDS_PER_PROMPT = (8, 12)
WARM_UP = 4
"""First iterations, in which the worker starts."""


def real(overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """A job of processes.

    Raises:
        RuntimeError: it did not come to its end.
    """
    cores = sorted(os.sched_getaffinity(0))
    own = ("cluster=local", "cluster.spot_workers=1", "cluster.spares=0", f"cluster.cpus=[{cores[-1]}]", "logger=none")
    command = [sys.executable, "train.py", f"paths.output_dir={folder}", *JOB, *own, *overrides]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr}")
    return outcome(folder)


def virtual(overrides: Sequence[str], figures: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """The same job on a virtual cluster whose GPUs are as fast as this machine's cores were measured to be."""
    sizes = resolved([*JOB, *overrides])
    tiny = {
        "prompts": sizes["data"]["prompts_per_iteration"],
        "group_size": sizes["algo"]["group_size"],
        "steps": sizes["algo"]["steps"],
        "trained_steps": sizes["algo"]["trained_steps"],
    }
    cluster = (
        "cluster=virtual",
        "hardware=local_cpu",
        "cluster.reserved_gpus=1",
        "cluster.spot_nodes=1",
        "cluster.gpus_per_node=1",
        f"cluster.batch_size={sizes['model']['batch_size']}",
        *(f"cluster.{name}={sizes['cluster'][name]}" for name in ("lease_target_s", "commit_every")),
        "workload.guidance=false",
        *(f"workload.{job}.{name}={value}" for job in ("real", "tiny") for name, value in tiny.items()),
        *(f"hardware.figures.{name}.value={figures[name]}" for name in ("denoise", "decode_score", "train", "publish")),
    )
    config = resolved([*JOB, *cluster, *overrides])
    rehearse(config, folder).shutdown()
    return outcome(folder)


def outcome(folder: Path) -> dict[str, float]:
    """Seconds per iteration, and the idle share of the spot worker, once it works."""
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    first, *_, last = [row for row in rows if "cost/usd" in row and row["step"] >= WARM_UP]
    explored = [row["explore/explored"] for row in rows if row["step"] >= WARM_UP and "explore/explored" in row]
    spot_s = {name: last[name] - first.get(name, 0.0) for name in last if re.fullmatch("cost/spot_.*_s", name)}
    return {
        "iteration_s": (last["time_s"] - first["time_s"]) / (last["step"] - first["step"]),
        "idle_share": spot_s["cost/spot_idle_s"] / sum(spot_s.values()),
        "explored": mean(explored),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of the jobs")
    parser.add_argument("--repetitions", type=int, default=3, help="real jobs of each kind")
    parser.add_argument("--iterations", type=int, default=24, help="of each job")
    parser.add_argument("--quick", action="store_true", help="one tiny job: a test")
    options = parser.parse_args(arguments)
    quiet()
    small = (*QUICK, "data.eval_prompts=4") if options.quick else ()
    iterations, repetitions = (WARM_UP + 4, 1) if options.quick else (options.iterations, options.repetitions)
    job = (*small, f"trainer.max_steps={iterations}", *options.overrides)
    profile = measure([*small, *options.overrides, "planner=none"], 2 if options.quick else 8)
    print_figures(
        "fidelity",
        {
            "profile": {name: profile[name] for name in ("denoise", "decode_score", "train", "publish")},
            "by_seeds_per_prompt": {
                count: compared([f"planner.seeds_per_prompt={count}", *job], profile, repetitions)
                for count in ((4,) if options.quick else SEEDS_PER_PROMPT)
            },
        },
    )


def compared(overrides: Sequence[str], profile: Mapping[str, Any], repetitions: int) -> dict[str, Any]:
    """A virtual job and real ones."""
    with tempfile.TemporaryDirectory() as name:
        predicted = virtual(overrides, profile, Path(name) / "virtual")
        say(f"virtual: {predicted}")
        found = []
        for number in range(repetitions):
            found.append(real(overrides, Path(name) / f"real{number}"))
            say(f"real: {found[-1]}")
    measured = {key: spread([each[key] for each in found]) for key in predicted}
    return {
        "virtual": predicted,
        "real": measured,
        **{f"{key}_ratio": predicted[key] / measured[key]["mean"] for key in ("iteration_s", "idle_share")},
    }


if __name__ == "__main__":
    main()
