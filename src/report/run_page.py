"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import cycle

from src.core.clock import duration
from src.report.charts import EXPLORATION, LEARNING, OPTIMISATION, SECONDS, Chart
from src.report.choices import Choices, choices
from src.report.html import (
    charts,
    document,
    drawn,
    figure,
    legend,
    named_lanes,
    reasons_table,
    section,
    table,
    values,
    work_legend,
)
from src.report.images import images
from src.report.lanes import KINDS
from src.report.read import Curve, Run
from src.report.svg import Series, line_chart
from src.report.timeline import Row, Timeline, timeline

EXCERPT = ("seed", "model", "data", "reward", "algo", "explore", "planner", "trainer", "cluster")
"""Config sections whose scalars are listed, but for Hydra's `_target_`s; the whole file follows folded."""


def page(run: Run) -> str:
    """The whole page for one run."""
    explores = any(event["kind"] == "explored" and event["results"] for event in run.events)
    body = (
        _headline(run),
        _learning(run),
        images(run.pictures),
        _charts("Exploration", run, EXPLORATION) if explores else "",
        _planner(choices(run.events)),
        _who(timeline(run.events), run),
        _charts("Optimisation", run, OPTIMISATION),
        _numbers(run),
        _config(run),
    )
    return document(f"Spotlight: {run.name}", "".join(body))


def _headline(run: Run) -> str:
    """What was reached, in one sentence, and the run's figures."""
    reward, judge = run.curves.get("eval/reward", ()), run.curves.get("eval/judge", ())
    facts = [
        ("Judge, held out", _change(judge)),
        ("Iterations", f"{_last_step(run):g}"),
        ("Wall time", duration(float(run.summary.get("wall_s", run.wall_s)))),
        ("Cost", f"{float(run.summary['usd']):.4f} usd" if "usd" in run.summary else ""),
        ("Seeds explored", _count(run.summary.get("seeds_explored"))),
        ("Preemptions", _count(run.summary.get("preemptions"))),
    ]
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts if value)
    state = "" if run.status == "done" else f'<p class="state">{escape(run.status)}</p>'
    claim = f'<p class="claim">Held-out reward <b>{_change(reward)}</b></p>' if reward else ""
    return (
        f'<header><p class="brand">Spotlight</p><h1>{escape(run.name)}</h1>{state}{claim}'
        f'<dl class="facts">{tiles}</dl></header>'
    )


def _change(curve: Curve) -> str:
    if not curve:
        return ""
    start, end = curve[0][1], curve[-1][1]
    return f"{start:.3f} → {end:.3f}" if len(curve) > 1 else f"{start:.3f}"


def _last_step(run: Run) -> float:
    return max((curve[-1][0] for curve in run.curves.values()), default=0.0)


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else ""


def _learning(run: Run) -> str:
    series = LEARNING.series(run.curves)
    if not series:
        return ""
    drawings = (
        f'<div class="wide">{line_chart(series, title=LEARNING.title, width=1000, height=340)}</div>'
        f'<div class="narrow">{line_chart(series, title=LEARNING.title)}</div>'
    )
    hero = f'<figure class="hero">{legend(reversed(series))}{drawings}<figcaption>{LEARNING.note}</figcaption></figure>'
    return section("Learning", hero)


def _charts(title: str, run: Run, group: Iterable[Chart]) -> str:
    return section(title, charts(figure(chart, run.curves) for chart in group))


def _planner(made: Choices) -> str:
    """What the planner asked for, batch by batch, and why it stopped."""
    if not made.seeds:
        return ""
    spread = Series("mean, least and most of a prompt", made.seeds, "c1", low=made.least, high=made.most)
    if len(made.by_steps) > 1:
        note = "Candidates asked for; the band reaches from the least to the most."
    else:
        note = (
            f"Candidates asked for, all with {next(iter(made.by_steps))} denoising steps; the band spans the prompts."
        )
    steps = [
        Series(f"{count} denoising steps", curve, colour)
        for (count, curve), colour in zip(made.by_steps.items(), cycle(("c1", "c2", "c4", "c5", "c3")), strict=False)
    ]
    figures = (
        drawn("Seeds per prompt", note, [spread]),
        drawn("Seeds by effort", "Candidates asked for in the batch.", steps) if len(steps) > 1 else "",
        reasons_table([("times", made)]),
    )
    return section("Planner's choices", charts(figures))


def _who(who: Timeline, run: Run) -> str:
    if not who.rows:
        return ""
    note = (
        "One row per worker; a pale band is a live process, hatching is work that was lost with its worker or cut off."
        + (" A spot row is tinted while its node is paid for." if any(row.paid for row in who.rows) else "")
    )
    lanes = f"<figure>{work_legend(who.rows)}{named_lanes(who)}<figcaption>{note}</figcaption></figure>"
    beside = f'<div class="beside">{_work_table(who)}{figure(SECONDS, run.curves)}</div>'
    return section("Who did what", lanes + beside)


def _work_table(who: Timeline) -> str:
    present = {span.kind for row in who.rows for span in row.spans}
    kinds = [*(kind for kind in KINDS if kind in present), *sorted(present - set(KINDS))]
    columns = ["seconds", *kinds, "busy", "lost"]
    return table(columns, [_work_cells(row, kinds, who.end_s) for row in who.rows])


def _work_cells(row: Row, kinds: Sequence[str], end_s: float) -> list[str]:
    """Finished seconds by kind, their share of the process's life, and the number of lost leases."""
    lived_s = row.alive_s or end_s
    busy = f"{row.busy_s() / lived_s:.0%}" if lived_s else ""
    seconds = (f"{row.busy_s(kind):.1f}" for kind in kinds)
    return [row.name, *seconds, busy, str(sum(span.lost for span in row.spans))]


def _numbers(run: Run) -> str:
    """The summary, and every metric's first, last and extreme values."""
    body = values((name, text) for key, value in run.summary.items() for name, text in _named(key, value))
    if run.curves:
        rows = [_metric_cells(name, run.curves[name]) for name in sorted(run.curves)]
        listed = table(("metric", "points", "first", "last", "min", "max"), rows)
        body += f"<details><summary>All metrics</summary>{listed}</details>"
    return section("Numbers", body)


def _metric_cells(name: str, curve: Curve) -> list[str]:
    heights = [value for _, value in curve]
    ends = (heights[0], heights[-1], min(heights), max(heights))
    return [name, str(len(heights)), *(f"{value:.4g}" for value in ends)]


def _named(name: str, value: object) -> Iterator[tuple[str, str]]:
    """A figure with its name; figures by account each with theirs."""
    if isinstance(value, dict):
        for account, amount in value.items():
            yield from _named(f"{name}, {account}", amount)
    else:
        yield name, "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _config(run: Run) -> str:
    if not run.config:
        return ""
    chosen = [pair for pair in run.settings.items() if pair[0].split(".")[0] in EXCERPT and not pair[0].endswith("_")]
    whole = f"<details><summary>config.yaml</summary><pre>{escape(run.config)}</pre></details>"
    return section("Configuration", values(chosen) + whole)
