"""How far virtual clusters scale: wall seconds and memory of a synthetic job, by number of workers.

python -m benchmarks.scaling            # 10 to 10,000 workers, 100 iterations each (minutes)
python -m benchmarks.scaling --quick

Every worker makes one lease of rollouts and about one of exploration per iteration, each of four samples in six steps
with a commit, under the scheduler, planner, log and ledger of a real job. One worker in twenty is taken away and
returned about every ten iterations.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.output import print_figures, say
from src.core.clock import cpu_s, monotonic_s
from src.sim.cluster import VirtualCluster
from src.sim.fleet import VirtualFleet
from src.sim.shape import ClusterShape
from src.sim.synthetic import RewardModel, SyntheticJob
from src.sim.timeline import Timeline
from src.spot.coordinator import Coordinator
from src.spot.cost import Ledger
from src.spot.market import Market
from src.spot.planning.simple import Fixed
from src.spot.prices import FixedPrices
from src.spot.scheduler import Scheduler
from src.spot.traces import Change, Trace

BATCH = 4
GROUP = 8
STEPS = 6
ITERATION_S = 17.0


@dataclass(frozen=True)
class Seconds:
    """A worker's pass takes 8 s, and training as long."""

    publish_s: float = 0.5
    load_s: float = 0.5
    regroup_s: float = 1.5
    commit_s: float = 0.0
    start_s: float = 10.0

    def denoise_s(self, samples: int, steps: int, degree: int) -> float:
        return 1.25 * steps

    def finish_s(self, samples: int, degree: int) -> float:
        return 0.5

    @property
    def updates(self) -> int:
        return 1

    def update_s(self, gpus: int) -> float:
        return 8.0


def market(workers: int, iterations: int) -> Market:
    """One node in twenty goes and returns, about every ten iterations, each at its own time."""
    changes = [Change(0.0, f"n{number}", True) for number in range(workers)]
    for number in range(0, workers, 20):
        start_s = ITERATION_S * (1 + 9 * number / workers)
        for life in range(iterations // 10):
            gone_s = start_s + 10 * ITERATION_S * life
            name = f"n{number}" if life == 0 else f"n{number}.{life}"
            changes += [Change(gone_s, name, False), Change(gone_s + ITERATION_S, f"n{number}.{life + 1}", True)]
    ordered = tuple(sorted(changes, key=lambda change: change.time_s))
    trace = Trace(name="scaling", duration_s=2 * iterations * ITERATION_S, changes=ordered)
    return Market(trace=trace, nodes=workers, grace_s=5.0)


def measure(workers: int, iterations: int) -> dict[str, Any]:
    """Runs a job whose size grows with its workers."""
    timeline, durations, samples = Timeline(), Seconds(), RewardModel()
    prices = FixedPrices(reserved_usd_per_gpu_hour=10.0, spot_usd_per_gpu_hour=2.5)
    prompts = max(1, workers * BATCH // GROUP)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        coordinator = Coordinator(
            run="scaling",
            folder=folder,
            scheduler=Scheduler(lease_s=float("inf")),
            planner=Fixed(seeds_per_prompt=GROUP),
            ledger=Ledger(prices=prices),
            now=timeline,
            start_wall_s=0.0,
        )
        start_s, start_cpu_s = monotonic_s(), cpu_s()
        fleet = VirtualFleet(
            timeline=timeline,
            coordinator=coordinator,
            durations=durations,
            samples=samples,
            shape=ClusterShape(reserved_gpus=1, gpus_per_node=1, batch_size=BATCH, commit_every=3),
            nodes=0,
            market=market(workers, iterations),
        )
        cluster = VirtualCluster(
            timeline=timeline, coordinator=coordinator, fleet=fleet, durations=durations, samples=samples
        )
        SyntheticJob(
            seed=0, prompts=prompts, rollouts_per_prompt=GROUP, steps=STEPS, iterations=iterations, explores=True
        ).run(cluster)
        coordinator.shutdown()
        lines = sum(1 for _ in (folder / "events.jsonl").open())
    row = {
        "workers": workers,
        "iterations": iterations,
        "wall_s": monotonic_s() - start_s,
        "cpu_s": cpu_s() - start_cpu_s,
        "virtual_s": timeline(),
        "events": lines,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    say(f"{workers} workers: {row['wall_s']:.1f} s for {row['virtual_s'] / 3600:.2f} virtual hours, {lines} events")
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 100 workers, 10 iterations")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args(arguments)
    gc.set_threshold(100_000)  # it finds nothing: requests, leases and results are in no cycles
    workers, iterations = ([10, 100], 10) if options.quick else (options.workers, options.iterations)
    rows = [measure(count, iterations) for count in workers]
    last = rows[-1]
    print_figures(
        "scaling",
        {"rows": rows, "virtual_over_wall_ratio": last["virtual_s"] / last["wall_s"]},
    )


if __name__ == "__main__":
    main()
