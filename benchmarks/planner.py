"""How close planners come to one that knows the truth, on reward models that drift and clusters that change.

python -m benchmarks.planner              # all worlds (about 5 minutes of one core)
python -m benchmarks.planner --table      # the tables of docs/planner.md

Two aims are measured. `contrast`: variance of the kept seeds, in the time there is, whatever it costs (idle workers are
free, and learning never saturates). `learning`: progress per usd, with prices and diminishing returns.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.output import print_figures, say, spread
from benchmarks.planner_rivals import Informed, Oracle, RiverUcb
from benchmarks.planner_simulation import BATCH, Outcome, simulate
from benchmarks.planner_worlds import CANDIDATES, KEEP, STEPS, WORLDS, World
from src.core.clock import monotonic_s
from src.core.stats import mean
from src.spot.planning.attitudes import Thompson
from src.spot.planning.bandit import Bandit
from src.spot.planning.protocol import Explore, LeaseServed, Opened, Planner, SeedsExplored, TrainingEnded, Worker
from src.spot.planning.simple import Fixed, LargestFeasible, NoExploration
from src.spot.planning.value import LearningValue

SIZES = (16, 24, 32, 48, 64)
AIMS: Mapping[str, LearningValue] = {"contrast": LearningValue(saturation=1e9), "learning": LearningValue()}

Make = Callable[[World, LearningValue], Planner]

UNAWARE: Mapping[str, Make] = {
    "none": lambda world, learning: NoExploration(),
    **{f"fixed {n}": lambda world, learning, n=n: Fixed(seeds_per_prompt=n) for n in SIZES},
    "largest_feasible": lambda world, learning: LargestFeasible(),
}
"""Planners that do the same whatever the aim."""
AWARE: Mapping[str, Make] = {
    "river": lambda world, learning: RiverUcb(keep=KEEP, prompts=world.prompts, learning=learning, seed=world.seed),
    "ucb": lambda world, learning: Bandit(seed=world.seed, learning=learning),
    "thompson": lambda world, learning: Bandit(seed=world.seed, attitude=Thompson(), learning=learning),
    "ucb, 20 % missed": lambda world, learning: Bandit(seed=world.seed, learning=learning, miss_rate=0.2),
    "informed": lambda world, learning: Informed(world=world, learning=learning),
    "oracle": lambda world, learning: Oracle(world=world, learning=learning),
}


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    learning = AIMS["learning"]
    usd = math.fsum(outcome.reserved_usd + outcome.spot_usd for outcome in outcomes)
    return {
        "contrast": mean([outcome.contrast for outcome in outcomes]),
        "learning": math.fsum(learning.progress(outcome.contrast) for outcome in outcomes) / usd,
        "missed": mean([float(outcome.late > 0) for outcome in outcomes[1:]]),
        "late": math.fsum(o.late for o in outcomes[1:]) / max(1, sum(o.explored + o.late for o in outcomes[1:])),
        "explored": mean([float(outcome.explored) for outcome in outcomes]),
        "decision_s": max(outcome.decision_s for outcome in outcomes),
    }


def trial(world: World, iterations: int, names: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by aim and planner."""
    figures: dict[str, dict[str, dict[str, float]]] = {aim: {} for aim in AIMS}
    for name in names:
        if name in UNAWARE:
            same = figures_of(simulate(world, UNAWARE[name](world, AIMS["learning"]), iterations))
            for aim in AIMS:
                figures[aim][name] = same
        else:
            for aim, learning in AIMS.items():
                priced = replace(world, spot_usd_per_hour=0.0) if aim == "contrast" else world
                figures[aim][name] = figures_of(simulate(priced, AWARE[name](priced, learning), iterations))
    return figures


def shares(trials: Sequence[dict[str, dict[str, dict[str, float]]]], aim: str, name: str) -> dict[str, Any]:
    """A planner's figures in a world, over seeds; `share` is of the oracle's."""
    mine = [trial[aim][name] for trial in trials]
    best = [trial[aim]["oracle"] for trial in trials]
    share = [own[aim] / oracle[aim] for own, oracle in zip(mine, best, strict=True)]
    rest = {key: mean([own[key] for own in mine]) for key in ("contrast", "learning", "missed", "late", "explored")}
    return {"share": spread(share), **rest, "decision_s": max(own["decision_s"] for own in mine)}


def decision_times(planner: Planner, prompts: int = 64, keep: int = 16, workers: int = 32) -> dict[str, float]:
    """Seconds per decision, with 64 prompts that are all known: for an event that brings 8 rewards."""
    there = tuple(Worker(str(index), BATCH) for index in range(workers))
    opened = Opened(1, prompts, keep, STEPS, there)
    for iteration in (1, 2):  # the first one has no time limit
        planner.handle(0.0, replace(opened, iteration=iteration))
        for worker in there:
            planner.handle(1.0, LeaseServed(worker.name, STEPS, 10.0))
        planner.handle(200.0, TrainingEnded(200.0))
    began_s = monotonic_s()
    queue = [a.prompt for a in planner.handle(0.0, replace(opened, iteration=3)) for _ in range(getattr(a, "count", 0))]
    times = [monotonic_s() - began_s]
    opening_s, served = times.pop(), 0
    while queue:
        lease, queue = queue[:BATCH], queue[BATCH:]
        rewards = tuple((prompt, math.sin(served * 8 + k) * (1 + prompt)) for k, prompt in enumerate(lease))
        began_s = monotonic_s()
        actions = planner.handle(served * 0.3, SeedsExplored(3, rewards))
        times.append(monotonic_s() - began_s)
        queue += [a.prompt for a in actions if isinstance(a, Explore) for _ in range(a.count)]
        served += 1
    ordered = sorted(times)
    return {
        "opening_s": opening_s,
        "median_s": ordered[len(ordered) // 2],
        "p99_s": ordered[int(len(ordered) * 0.99)],
        "max_s": ordered[-1],
        "decisions": float(len(ordered)),
    }


def tables(figures: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = []
    for aim in AIMS:
        worlds = figures["worlds"]
        names = list(next(iter(worlds.values()))[aim])
        lines += [
            f"Share of the oracle's {aim}:",
            "",
            "| world | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        for world, planners in worlds.items():
            cells = [f"{planners[aim][name]['share']['mean']:.3f}" for name in names]
            lines.append(f"| {world} | " + " | ".join(cells) + " |")
        means = [mean([planners[aim][name]["share"]["mean"] for planners in worlds.values()]) for name in names]
        lines += ["| **mean** | " + " | ".join(f"{value:.3f}" for value in means) + " |"]
        missed = [mean([planners[aim][name]["missed"] for planners in worlds.values()]) for name in names]
        lines += ["| *missed* | " + " | ".join(f"{value:.2%}" for value in missed) + " |"]
        late = [mean([planners[aim][name]["late"] for planners in worlds.values()]) for name in names]
        lines += ["| *late* | " + " | ".join(f"{value:.3%}" for value in late) + " |", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=[world.name for world in WORLDS])
    parser.add_argument("--planners", nargs="+", choices=[*UNAWARE, *AWARE], default=[*UNAWARE, *AWARE])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed; settings were chosen on seed 0")
    parser.add_argument("--table", action="store_true", help="print markdown instead of the JSON line")
    options = parser.parse_args(arguments)
    names = [name for name in (*UNAWARE, *AWARE) if name in {*options.planners, "oracle"}]
    seeds = range(options.first, options.first + options.seeds)
    figures: dict[str, Any] = {"iterations": options.iterations, "seeds": list(seeds), "worlds": {}}
    for world in WORLDS:
        if options.worlds and world.name not in options.worlds:
            continue
        began_s = monotonic_s()
        trials = [trial(replace(world, seed=seed), options.iterations, names) for seed in seeds]
        figures["worlds"][world.name] = {aim: {name: shares(trials, aim, name) for name in names} for aim in AIMS}
        say(f"{world.name}: {monotonic_s() - began_s:.0f} s")
    figures["decisions"] = {
        "ucb": decision_times(Bandit(seed=0, max_seeds_per_prompt=128)),
        "thompson": decision_times(Bandit(seed=0, attitude=Thompson(), max_seeds_per_prompt=128)),
        "largest_feasible": decision_times(LargestFeasible(max_seeds_per_prompt=128)),
    }
    figures["candidates"], figures["keep"] = CANDIDATES, KEEP
    if options.table:
        print(tables(figures))
    else:
        print_figures("planner", figures)


if __name__ == "__main__":
    main()
