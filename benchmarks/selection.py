"""Does training on the seeds of most contrast help, and is stale exploration good enough to find them?

python -m benchmarks.selection                       # the whole study (about 40 minutes of one core)
python -m benchmarks.selection --table               # docs/selection.md's tables, from the results that are there
python -m benchmarks.selection --arms random --lr 6e-4 --seeds 2 --iterations 12 --out outputs/tuning

Every arm is the product's own training (benchmarks/job.py) on the same prompts; benchmarks/arms.py lists what differs.
Results are kept in OUT, one JSON line per run, and runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arms import ARMS
from benchmarks.job import build_job, quiet, resolved
from benchmarks.output import print_figures, say
from benchmarks.ranking import RankingStudy, ranking_figures
from benchmarks.selection_figures import figures, rates_table, tables
from src.core.clock import monotonic_s
from src.core.events import JsonLines, read_jsonl

QUICK = ("data.prompts_per_iteration=3", "data.eval_prompts=16", "algo.group_size=4", "callbacks.evaluate.every=1")
EQUAL_WORK = [name for name, arm in ARMS.items() if arm.trained == 1]
STUDIED_ARM = "stale_4g"
STUDIED_ITERATIONS = (4, 8, 16)


@dataclass(frozen=True)
class Run:
    """One training run of the study; equal runs have equal results."""

    arm: str
    seed: int
    iterations: int
    learning_rate: float
    overrides: tuple[str, ...]

    @property
    def key(self) -> str:
        return json.dumps(vars(self))


def train(run: Run) -> dict[str, Any]:
    """Trains, and returns the run's row: curve of (iteration, held-out reward, judge), ranking figures, seconds."""
    quiet()
    arm, started_s = ARMS[run.arm], monotonic_s()
    overrides = [
        "experiment=tiny_text",
        "explore.sync=await",
        "callbacks.evaluate.images=0",
        f"seed={run.seed}",
        f"trainer.max_steps={run.iterations}",
        f"algo.optimizer.lr={run.learning_rate}",
        *run.overrides,
    ]
    keep: int = resolved(overrides)["algo"]["group_size"]
    explored = f"planner.seeds_per_prompt={arm.candidates * keep}" if arm.candidates else "planner=none"
    config = resolved([*overrides, explored, f"algo.group_size={arm.trained * keep}"])
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(
            config,
            Path(folder),
            spot_engine=arm.spot_engine if arm.candidates else None,
            cluster_of=arm.cluster_of,
        )
        studied = [k for k in STUDIED_ITERATIONS if k < run.iterations] or [1]
        study = RankingStudy(job=job, iterations=studied if run.arm == STUDIED_ARM else ())
        job.run([study, arm.explore(job), job.evaluation])
        evaluated = [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if "eval/reward" in row]
    return {
        "key": run.key,
        "arm": run.arm,
        "seed": run.seed,
        "learning_rate": run.learning_rate,
        "curve": [[row["step"], row["eval/reward"], row["eval/judge"]] for row in evaluated],
        "ranking": [
            {"iteration": iteration, **ranking_figures(prompts, keep, run.seed, iteration)}
            for iteration, prompts in study.found.items()
        ],
        "seconds": monotonic_s() - started_s,
    }


def results(runs: Sequence[Run], out: Path, jobs: int) -> list[dict[str, Any]]:
    """The rows of the runs, in order; those that are not in `out` yet are made and added to it."""
    file = out / "results.jsonl"
    rows = {row["key"]: row for row in read_jsonl(file)} if file.exists() else {}
    missing = [run for run in runs if run.key not in rows]
    kept = JsonLines(file)
    for number, row in enumerate(_trained(missing, jobs), start=1):
        rows[row["key"]] = row
        kept.append(row)
        final = row["curve"][-1][1]
        say(f"{number}/{len(missing)} {row['arm']} seed {row['seed']}: {final:.3f} in {row['seconds']:.0f} s")
    kept.close()
    return [rows[run.key] for run in runs if run.key in rows]


def _trained(runs: Sequence[Run], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        yield from map(train, runs)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(train, run) for run in runs]):
            yield done.result()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=EQUAL_WORK)
    parser.add_argument("--seeds", type=int, default=5, help="runs per arm")
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--lr", type=float, help="learning rate, instead of the experiment's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("outputs/selection"), help="where results are kept")
    parser.add_argument("--quick", action="store_true", help="two iterations of everything: a test")
    parser.add_argument("--table", action="store_true", help="print markdown instead of the JSON line")
    options = parser.parse_args(arguments)
    iterations, count = (2, 2) if options.quick else (options.iterations, options.seeds)
    learning_rate = options.lr or resolved(["experiment=tiny_text"])["algo"]["optimizer"]["lr"]
    runs = [
        Run(
            arm=name,
            seed=seed,
            iterations=iterations,
            learning_rate=learning_rate,
            overrides=QUICK if options.quick else (),
        )
        for seed in range(count)  # seed by seed, so that a study that was stopped compares all arms
        for name in options.arms
    ]
    rows = results(runs, options.out, options.jobs)
    if options.table:
        known = read_jsonl(options.out / "results.jsonl")
        same_length = [row for row in known if row["curve"][-1][0] == iterations]
        print("\n\n".join(filter(None, [tables(rows), rates_table(same_length)])))
    else:
        print_figures("selection", figures(rows))


if __name__ == "__main__":
    main()
