"""The figures and tables of the selection study, from the rows of its runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.output import spread
from src.core.stats import mean

Row = dict[str, Any]

BASE_ARM = "random"
RANKINGS = ("stale", "ode", "random")


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Curves (mean and sd over seeds), iterations to the random arm's final reward, and how well seeds were ranked."""
    by_arm = _by_arm(rows)
    curves = {arm: curve(runs) for arm, runs in by_arm.items()}
    found: dict[str, Any] = {
        "seeds": max(map(len, by_arm.values())),
        "learning_rate": rows[0]["learning_rate"],
        "curves": curves,
        "seconds": {arm: spread([run["seconds"] for run in runs]) for arm, runs in by_arm.items()},
    }
    if BASE_ARM in curves:
        found |= _speed(by_arm, curves)
    ranking = ranking_spread(rows)
    if ranking:
        found["ranking"] = ranking
        for name in ("stale", "ode"):
            share = ranking[f"variance_share_{name}"]["mean"]
            random_share = ranking["variance_share_random"]["mean"]
            found[f"variance_share_{name}_over_random_ratio"] = share / random_share
    return found


def _speed(by_arm: dict[str, list[Row]], curves: dict[str, list[Row]]) -> dict[str, Any]:
    level = curves[BASE_ARM][-1]["reward"]["mean"]
    start = curves[BASE_ARM][0]["reward"]["mean"]
    reached = {arm: iterations_to(_means(points), level) for arm, points in curves.items()}
    found: dict[str, Any] = {
        "random_final_reward": level,
        "iterations_to_random_final": reached,
        "iterations_to_random_final_by_seed": {
            arm: [iterations_to([point[:2] for point in run["curve"]], level) for run in runs]
            for arm, runs in by_arm.items()
        },
    }
    for arm, points in curves.items():
        if arm != BASE_ARM:
            found[f"iterations_random_over_{arm}_ratio"] = _ratio(reached[BASE_ARM], reached[arm])
            found[f"gain_{arm}_over_random_ratio"] = (points[-1]["reward"]["mean"] - start) / (level - start)
    return found


def curve(runs: Sequence[Row]) -> list[Row]:
    """Held-out reward and judge by iteration, mean and sd over runs."""
    return [
        {
            "iteration": points[0][0],
            "reward": spread([point[1] for point in points]),
            "judge": spread([point[2] for point in points]),
        }
        for points in zip(*(run["curve"] for run in runs), strict=True)
    ]


def iterations_to(points: Sequence[Sequence[float]], level: float) -> float | None:
    """The first iteration at which a curve of (iteration, reward) reaches `level`, between points by a line."""
    before: Sequence[float] | None = None
    for point in points:
        if point[1] >= level:
            if before is None:
                return point[0]
            return before[0] + (point[0] - before[0]) * (level - before[1]) / (point[1] - before[1])
        before = point
    return None


def ranking_spread(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Mean over the studied iterations of a run, then mean and sd over runs; empty without a studied run."""
    studied = [row["ranking"] for row in rows if row["ranking"]]
    if not studied:
        return {}
    names = [name for name in studied[0][0] if name != "iteration"]
    return {name: spread([mean([at[name] for at in run]) for run in studied]) for name in names}


def tables(rows: Sequence[Row]) -> str:
    """Markdown: held-out reward and judge by arm and iteration, iterations to the random arm's end, ranking."""
    by_arm = _by_arm(rows)
    curves = {arm: curve(runs) for arm, runs in by_arm.items()}
    level = curves[BASE_ARM][-1]["reward"]["mean"]
    random_needs = iterations_to(_means(curves[BASE_ARM]), level)
    shown = [point["iteration"] for point in curves[BASE_ARM]]
    lines = [
        f"Held-out reward after so many iterations, mean ± sd over {len(by_arm[BASE_ARM])} seeds, learning rate "
        f"{rows[0]['learning_rate']:g}:",
        "",
        _cells("arm", *shown, "judge at the end"),
        _cells(*["---"] * (len(shown) + 2)),
    ]
    for arm, points in curves.items():
        rewards = [_pm(point["reward"]) for point in points]
        lines.append(_cells(arm, *rewards, _pm(points[-1]["judge"])))
    lines += [
        "",
        f"Iterations to the random arm's final reward ({level:.3f}), by the mean curve and by seed:",
        "",
        _cells("arm", "mean curve", "random / arm", "by seed"),
        _cells(*["---"] * 4),
    ]
    for arm, points in curves.items():
        needs = iterations_to(_means(points), level)
        ratio = _ratio(random_needs, needs) if needs else _ratio(random_needs, shown[-1])
        each = [iterations_to([point[:2] for point in run["curve"]], level) for run in by_arm[arm]]
        lines.append(
            _cells(
                arm,
                _or_never(needs, shown[-1]),
                f"{'' if needs else '< '}{ratio:.2f}",
                ", ".join(_or_never(n, shown[-1]) for n in each),
            )
        )
    ranking = ranking_spread(rows)
    if ranking:
        lines += [
            "",
            "All N = 4G explored seeds generated again with fresh weights:",
            "",
            _cells("ranked by", "Spearman with fresh, within prompt", "share of the best variance kept"),
            _cells(*["---"] * 3),
        ]
        for name in RANKINGS:
            lines.append(_cells(name, _pm(ranking[f"spearman_{name}"]), _pm(ranking[f"variance_share_{name}"])))
    return "\n".join(lines)


def rates_table(rows: Sequence[Row]) -> str:
    """Markdown: final held-out reward of every arm that was run at more than one learning rate."""
    runs: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        runs.setdefault(row["arm"], {}).setdefault(row["learning_rate"], []).append(row)
    tried = {arm: by_rate for arm, by_rate in runs.items() if len(by_rate) > 1}
    lines = [_cells("arm", "lr", "seeds", "held-out reward at the end"), _cells(*["---"] * 4)]
    for arm, by_rate in tried.items():
        for rate in sorted(by_rate):
            final = spread([run["curve"][-1][1] for run in by_rate[rate]])
            lines.append(_cells(arm, f"{rate:g}", len(by_rate[rate]), _pm(final)))
    return "\n".join(["Learning rates that were tried:", "", *lines]) if tried else ""


def _by_arm(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_arm: dict[str, list[Row]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], []).append(row)
    return by_arm


def _means(points: Sequence[Row]) -> list[tuple[float, float]]:
    return [(point["iteration"], point["reward"]["mean"]) for point in points]


def _ratio(random_needs: float | None, arm_needs: float | None) -> float:
    """NaN for an arm that never gets there: it needs more than the iterations there were."""
    return random_needs / arm_needs if random_needs and arm_needs else math.nan


def _pm(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['sd']:.3f}"


def _or_never(iterations: float | None, last: int) -> str:
    return f"> {last}" if iterations is None else f"{iterations:.1f}"


def _cells(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
