"""What a spot market does to learning: whole jobs, undisturbed, on a recorded market, and there without exploration.

python -m benchmarks.market                  # five seeds of four jobs, each a few minutes
python -m benchmarks.market --sync race      # what is explored in time counts, as in a job by default
python -m benchmarks.market --quick          # two iterations of everything: a test

Arms, each a `python train.py experiment=tiny_text` with processes of its own:

undisturbed      four spot workers that nobody takes away
market           four nodes with a spot worker each, which come and go as four of a public trace did: notice, kill after
                 a grace period, return
market_pairs     the same market; its workers share sequences in two pairs (cluster.sp_degree=2), which form anew
                 whenever a node comes or goes
market_random    the market, but trained on random seeds (planner=none)

With --sync await, training waits for all that was asked for: then what is learnt must not depend on the market at all,
but for the rounding of sequences that are shared.
With --sync race it depends on how much the workers get done. Spot workers are pinned to one core; the trainer has the
other, but for processes that start. A row per job is kept in --out, so that a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.conservation import account
from benchmarks.job import ROOT
from benchmarks.output import deviation, print_figures, say, spread
from src.core.events import JsonLines, read_jsonl
from src.core.stats import mean

NODES = 4
COMMIT_EVERY = 1
TRACE = "bamboo_aws_p3.csv"
QUICK = (
    "data.prompts_per_iteration=2",
    "data.eval_prompts=8",
    "algo.group_size=4",
    "planner.seeds_per_prompt=8",
)

COMMON = (
    "experiment=tiny_text",
    "logger=none",
    "callbacks.evaluate.every=6",
    "callbacks.evaluate.images=0",
    "cluster.cpus=[1]",
    "cluster.nice=1",
    f"cluster.commit_every={COMMIT_EVERY}",
)
MARKET = (
    "market=replay",
    f"market.trace={ROOT}/data/traces/{TRACE}",
    f"market.nodes={NODES}",
    "market.grace_s=1.5",
    "cluster.spares=2",
)
ARMS: Mapping[str, Sequence[str]] = {
    "undisturbed": (f"cluster.spot_workers={NODES}",),
    "market": MARKET,
    "market_pairs": (*MARKET, "cluster.sp_degree=2"),
    "market_random": (*MARKET, "planner=none"),
}
LOSSES = ("leases_lost", "leases_resumed", "kept_steps", "repeated_steps", "requests_lost", "requests_twice")
REGROUPS = ("regroups", "regroups_resumed")


def run(arm: str, seed: int, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Trains a job and returns its row.

    Raises:
        RuntimeError: the job did not come to its end.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of a study that was stopped
    command = [sys.executable, str(ROOT / "train.py"), f"paths.output_dir={folder}", f"seed={seed}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{arm}, seed {seed}: exit code {done.returncode}: {done.stderr}")
    return {"arm": arm, "seed": seed, "overrides": list(overrides), **outcome(folder)}


def outcome(folder: Path) -> dict[str, Any]:
    """What a run folder tells."""
    log = list(read_jsonl(folder / "events.jsonl"))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "reward": summary["eval_reward_end"],
        "judge": summary["eval_judge_end"],
        "nodes_taken": sum(event["kind"] == "node_went" for event in log),
        "workers_preempted": summary["preemptions"],
        "seeds_explored": summary["seeds_explored"],
        "wall_s": summary["wall_s"],
        **asdict(account(log, commit_every=COMMIT_EVERY)),
    }


def rows(seeds: int, iterations: int, sync: str, time_scale: float, quick: bool, out: Path) -> list[dict[str, Any]]:
    """The rows of all jobs; those that are not in `out` yet are made and added to it."""
    file = out / "results.jsonl"
    before = [row for row in read_jsonl(file) if row.keys() >= {*REGROUPS, *LOSSES}] if file.exists() else []
    known = {(row["arm"], row["seed"], tuple(row["overrides"])): row for row in before}
    kept, found = JsonLines(file), []
    for seed in range(seeds):  # seed by seed, so that a study that was stopped compares all arms
        for arm, its_own in ARMS.items():
            small = [text for text in QUICK if quick and not (arm == "market_random" and "planner" in text)]
            pace = (f"market.time_scale={time_scale}",) if "market=replay" in its_own else ()
            overrides = (*COMMON, *its_own, *pace, *small, f"explore.sync={sync}", f"trainer.max_steps={iterations}")
            row = known.get((arm, seed, overrides))
            if row is None:
                row = run(arm, seed, overrides, out.resolve() / f"{arm}_{seed}")
                kept.append(row)
                taken = f"{row['nodes_taken']} nodes taken"
                say(f"{arm}, seed {seed}: {row['reward']:.3f} in {row['wall_s']:.0f} s, {taken}")
            found.append(row)
    kept.close()
    return found


def figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and sd over seeds by arm; paired differences of rewards with their standard errors."""
    arms = {arm: [row for row in found if row["arm"] == arm] for arm in ARMS}
    rewards = {arm: [row["reward"] for row in of_arm] for arm, of_arm in arms.items()}
    return {
        "seeds": len(rewards["market"]),
        "arms": {arm: arm_figures(of_arm) for arm, of_arm in arms.items()},
        "market_minus_undisturbed": paired(rewards["market"], rewards["undisturbed"]),
        "pairs_minus_undisturbed": paired(rewards["market_pairs"], rewards["undisturbed"]),
        "market_minus_random": paired(rewards["market"], rewards["market_random"]),
        "undisturbed_minus_random": paired(rewards["undisturbed"], rewards["market_random"]),
        "market_undisturbed_ratio": mean(rewards["market"]) / mean(rewards["undisturbed"]),
        "problems": [problem for row in found for problem in row["problems"]],
    }


def arm_figures(of_arm: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = ("reward", "judge", "seeds_explored", "wall_s")
    counted = ("nodes_taken", "workers_preempted", *REGROUPS, *LOSSES)
    return {
        **{name: spread([row[name] for row in of_arm]) for name in measured},
        **{name: [row[name] for row in of_arm] for name in counted},
    }


def paired(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Mean difference over seeds, and its standard error."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return {"mean": mean(differences), "standard_error": deviation(differences) / len(differences) ** 0.5}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="jobs per arm")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--sync", choices=("await", "race"), default="await", help="explore.sync")
    parser.add_argument("--time-scale", type=float, default=250, help="seconds of the trace per second of the job")
    parser.add_argument("--out", type=Path, default=Path("outputs/market"), help="where rows and run folders are kept")
    parser.add_argument("--quick", action="store_true", help="one seed, two tiny iterations: a test")
    options = parser.parse_args(arguments)
    seeds, iterations = (1, 2) if options.quick else (options.seeds, options.iterations)
    found = figures(rows(seeds, iterations, options.sync, options.time_scale, options.quick, options.out))
    print_figures(
        "market",
        {"iterations": iterations, "sync": options.sync, "trace": TRACE, "time_scale": options.time_scale, **found},
    )
    if found["problems"]:
        say("requests were lost, counted twice or not resumed")
        sys.exit(1)


if __name__ == "__main__":
    main()
