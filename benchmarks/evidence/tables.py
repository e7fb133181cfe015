"""What the runs come to: effort to a score, ratios to every baseline, and docs/evidence.md's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from src.core.stats import mean
from src.sim.statistics import SHARES, Comparison, Effort, compare, effort, targets

Row = Mapping[str, Any]

PLATEAU = 3
"""Last evaluations of a run whose mean counts as what it has learnt."""


def scores(row: Row) -> list[float]:
    return [point["reward"] for point in row["curve"]]


def judged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The same runs with the independent judge's scores in place of the reward's."""
    return [{**row, "curve": [{**point, "reward": point["judge"]} for point in row["curve"]]} for row in rows]


def plateau(rows: Sequence[Row]) -> float:
    """The mean over runs of their last evaluations."""
    return mean([mean(scores(row)[-PLATEAU:]) for row in rows])


def goals(baselines: Mapping[str, Sequence[Row]]) -> tuple[float, ...]:
    """The targets: shares of the way from the start to the best baseline's plateau."""
    start = mean([scores(row)[0] for rows in baselines.values() for row in rows])
    return targets(start, max(plateau(rows) for rows in baselines.values()))


def effort_of(row: Row, target: float) -> Effort:
    """From the start on, which is below all targets: the first evaluation may be above one already."""
    points = row["curve"]
    return effort(
        seed=row["seed"],
        iterations=[point["iteration"] for point in points],
        seconds=[point["seconds"] for point in points],
        usd=[point["usd"] for point in points],
        scores=[point["reward"] for point in points],
        target=target,
    )


def comparison(baseline: Sequence[Row], system: Sequence[Row], target: float) -> Comparison:
    """Of runs with the same learning seed and, where the baseline has one, the same market."""
    on_markets = any(row["trace"] for row in baseline)
    return compare(
        [
            (effort_of(ours, target), effort_of(theirs, target))
            for theirs in system
            for ours in baseline
            if ours["seed"] == theirs["seed"] and (not on_markets or ours["trace"] == theirs["trace"])
        ]
    )


def figures(systems: Mapping[str, Sequence[Row]], baselines: Sequence[str], system: str) -> dict[str, Any]:
    """The JSON line: ratios of each baseline to `system` at each target."""
    wanted = goals({name: systems[name] for name in baselines})
    line: dict[str, Any] = {"targets": list(wanted), "runs": sum(map(len, systems.values()))}
    for name in baselines:
        for share, target in zip(SHARES, wanted, strict=True):
            found = comparison(systems[name], systems[system], target)
            for kind in ("time", "cost", "iterations", "seconds_per_iteration"):
                estimate = getattr(found, kind)
                line[f"{name}_{share * 100:.0f}_{kind}_ratio"] = estimate.value
                line[f"{name}_{share * 100:.0f}_{kind}"] = [estimate.low, estimate.high, estimate.bound]
    return line


def ratio_table(systems: Mapping[str, Sequence[Row]], baselines: Sequence[str], system: str) -> str:
    """How many times more each baseline needs than `system`."""
    wanted = goals({name: systems[name] for name in baselines})
    lines = [
        f"| baseline / {system} | target | time | = iterations | x seconds per iteration | usd |",
        "|---|---|---|---|---|---|",
    ]
    for name in baselines:
        for share, target in zip(SHARES, wanted, strict=True):
            found = comparison(systems[name], systems[system], target)
            cells = (found.time, found.iterations, found.seconds_per_iteration, found.cost)
            lines.append(f"| {name} | {share:.0%}: {target:.3f} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def effort_table(systems: Mapping[str, Sequence[Row]], wanted: Sequence[float]) -> str:
    """What each system needed to the targets `wanted` and was given, averaged over runs."""
    head = " | ".join(f"h and usd to {share:.0%}" for share in SHARES)
    lines = [
        f"| system | lr | runs | plateau | s per iteration | {head} | node preemptions | explored per iteration | "
        "spot busy | lost usd |",
        "|---|---|---|---|---|" + "---|" * len(SHARES) + "---|---|---|---|",
    ]
    for name, rows in systems.items():
        used = []
        for target in wanted:
            efforts = [effort_of(row, target) for row in rows]
            missed = sum(not each.reached for each in efforts)
            text = f"{mean([e.seconds for e in efforts]) / 3600:.2f}, {mean([e.usd for e in efforts]):.0f}"
            used.append(f"≥ {text} ({missed} never)" if missed else text)
        last = [row["curve"][-1] for row in rows]
        lines.append(
            f"| {name} | {rows[0]['learning_rate']:g} | {len(rows)} | {plateau(rows):.3f} | "
            f"{mean([point['seconds'] / point['iteration'] for point in last]):.0f} | {' | '.join(used)} | "
            f"{mean([row['preemptions'] for row in rows]):.1f} | "
            f"{mean([mean(row['explored']) if row['explored'] else 0.0 for row in rows]):.0f} | "
            f"{_share([row['spot_utilisation'] for row in rows])} | {mean([row['lost_usd'] for row in rows]):.2f} |"
        )
    return "\n".join(lines)


def _share(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):.0%}" if known else "-"
