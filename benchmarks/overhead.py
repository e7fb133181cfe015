"""What exploration costs the trainer: seconds of an iteration with a spot worker that explores, and with an idle one.

python -m benchmarks.overhead

Whole jobs of experiment=tiny_text (rank, coordinator, Ray and spot worker as `train.py` starts them), in turn with
planner=fixed (exploring) and planner=none (idle). The rank has core 0 for itself; the spot worker, Ray and coordinator
share core 1. The spot worker gets no rollouts here, in either arm: the trainer makes all of them alone, so that an
iteration's time is that of its critical path, and not what exploring workers fail to help with.

In a third arm (neighbour) a process that has nothing to do with the job samples on core 1 (benchmarks/neighbour.py):
what exploring costs beyond that is the system's own doing.

An iteration lasts from one rollout's start to the next one's: rollout, updates, publication and callbacks. Evaluation
and checkpoints, which both arms have alike, are left out; so are the first iterations of each job.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import yaml

from benchmarks.job import resolved
from benchmarks.neighbour import neighbour
from benchmarks.output import print_figures, say
from src.app.config import Config, RunPlan, build
from src.app.job import Ranks, make_engine
from src.core.clock import sleep_s
from src.core.events import read_jsonl
from src.core.types import RequestKind
from src.spot.client import call
from src.spot.coordinator import Coordinator
from src.spot.fleet import Fleet
from src.spot.members import Introduction, Joined
from src.spot.process import WorkerSettings
from src.spot.scheduler import Scheduler

RANK_CORES, SPOT_CORES = (0,), (1,)
WARM_UP = 4
"""First iterations of a job that are left out: nothing is explored before the first, and batches and caches warm up."""
ARMS = {"exploring": "planner=fixed", "idle": "planner=none", "neighbour": "planner=none"}


class ExploringOnly(Coordinator):
    """Lets the spot worker explore and audit, and nothing else."""

    def join(self, joined: Joined) -> Introduction:
        if joined.member.role == "spot":
            joined = replace(joined, kinds=frozenset({RequestKind.EXPLORE, RequestKind.AUDIT}))
        return super().join(joined)


def make_coordinator(config: Config, folder: Path) -> Coordinator:
    """In its own process."""
    scheduler = Scheduler(lease_target_s=config["cluster"]["lease_target_s"])
    planner = build(config["planner"], "planner")
    return ExploringOnly(run=folder.name, folder=folder, scheduler=scheduler, planner=planner)


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What is started meanwhile stays on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def train(plan: RunPlan) -> None:
    """Runs a job to its end. Raises what its rank fails with."""
    cluster = plan.config["cluster"]
    fleet = Fleet(
        coordinator=partial(make_coordinator, plan.config, plan.folder),
        engine=partial(make_engine, plan.config),
        settings=WorkerSettings(
            niceness=cluster["nice"], cpus=SPOT_CORES, threads=cluster["threads"], commit_every=cluster["commit_every"]
        ),
        spot_workers=cluster["spot_workers"],
    )
    with fleet, ExitStack() as stack:
        with on_cores(RANK_CORES):
            ranks = stack.enter_context(Ranks(plan))
        stack.enter_context(on_cores(SPOT_CORES))
        address = fleet.start()
        while call(fleet.host.workers) < cluster["spot_workers"]:  # they take longer than the rank to start
            fleet.check()
            sleep_s(0.2)
        ranks.send_start(address)
        while ranks.running():
            fleet.check()
            sleep_s(0.2)
        if failure := ranks.failure():
            raise failure


def measure(arm: str, iterations: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds of each iteration but for the first ones, and how busy the spot workers were meanwhile."""
    last = WARM_UP + iterations + 1
    with tempfile.TemporaryDirectory() as folder:
        config = resolved(
            [
                "experiment=tiny_text",
                "cluster.spot_workers=1",
                f"trainer.max_steps={last}",
                f"callbacks.evaluate.every={last}",
                f"callbacks.checkpoint.every={last}",
                ARMS[arm],
                *overrides,
            ]
        )
        (Path(folder) / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        with neighbour(config, SPOT_CORES) if arm == "neighbour" else nullcontext():
            train(RunPlan(config, Path(folder)))
        log = list(read_jsonl(Path(folder) / "events.jsonl"))
    phases = [event for event in log if event["kind"] == "phase"]
    starts = [event["start_s"] for event in phases if event["name"] == "rollout"][WARM_UP:]
    seconds = {
        name: [e["end_s"] - e["start_s"] for e in phases if e["name"] == name][WARM_UP:-1]
        for name in ("rollout", "train")
    }
    return {
        "iteration": [later - earlier for earlier, later in pairwise(starts)],
        **seconds,
        "idle_share": 1 - busy_s(log, starts[0], starts[-1]) / (starts[-1] - starts[0]),
        "explored": sum(len(event["results"]) for event in log if event["kind"] == "explored"),
    }


def busy_s(log: Sequence[dict[str, Any]], start_s: float, end_s: float) -> float:
    """Seconds between two moments in which the spot worker made samples."""
    busy = 0.0
    for event in log:
        if event["kind"] == "lease_done" and event["worker"].startswith("spot"):
            took_s = event["denoise_s"] + event["decode_s"] + event["score_s"]
            busy += max(0.0, min(event["time_s"], end_s) - max(event["time_s"] - took_s, start_s))
    return busy


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of experiment=tiny_text")
    parser.add_argument("--iterations", type=int, default=20, help="that count, per job")
    parser.add_argument("--rounds", type=int, default=3, help="jobs per arm")
    parser.add_argument("--quick", action="store_true", help="a few iterations: a test")
    options = parser.parse_args(arguments)
    iterations, rounds = (3, 1) if options.quick else (options.iterations, options.rounds)
    jobs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(rounds):
        for arm in ARMS if number % 2 == 0 else reversed(ARMS):
            job = measure(arm, iterations, options.overrides)
            jobs[arm].append(job)
            say(f"{arm}: {median(job['iteration']):.3f} s, spot worker idle {job['idle_share']:.0%}")
    print_figures("overhead", figures(jobs))


def figures(jobs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    exploring, idle, busy = (_median(jobs[arm]) for arm in ("exploring", "idle", "neighbour"))
    return {
        **{arm: arm_figures(of_arm) for arm, of_arm in jobs.items()},
        "exploration_overhead_ratio": exploring / idle,
        "neighbour_overhead_ratio": busy / idle,
        "exploration_over_neighbour_ratio": exploring / busy,
    }


def arm_figures(of_arm: Sequence[dict[str, Any]]) -> dict[str, Any]:
    every = [seconds for job in of_arm for seconds in job["iteration"]]
    low, _, high = quantiles(every, n=4, method="inclusive")
    return {
        "iterations": len(every),
        "median_by_job_s": [median(job["iteration"]) for job in of_arm],
        "iteration_s": {"median": _median(of_arm), "low": low, "high": high},
        "rollout_s": _median(of_arm, "rollout"),
        "train_s": _median(of_arm, "train"),
        "spot_idle_share": median(job["idle_share"] for job in of_arm),
        "seeds_explored": sum(job["explored"] for job in of_arm),
    }


def _median(of_arm: Sequence[dict[str, Any]], name: str = "iteration") -> float:
    return float(median(seconds for job in of_arm for seconds in job[name]))


if __name__ == "__main__":
    main()
