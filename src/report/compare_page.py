"""The page that compares runs: scores against iterations, hours and money, and where hours and money went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape

from src.core.stats import mean
from src.report.groups import Group, grouped, spread
from src.report.html import charts, document, drawn, framed, named_lanes, reasons_table, section, table, work_legend
from src.report.lanes import bar, kind_class
from src.report.measure import Evaluation, Measured
from src.report.svg import ITERATIONS, Axis, Series, amount

SHOWN_ROWS = 32
"""Rows of one timeline: more would not be told apart."""

COLOURS = ("c1", "c2", "c4", "c5", "c7", "c8", "c6", "c9")
"""Of the groups, in turn; their letters are unique anyway."""

_AXES: tuple[tuple[Axis, Callable[[Evaluation], float]], ...] = (
    (ITERATIONS, lambda evaluation: evaluation.iteration),
    (Axis("hours", "h"), lambda evaluation: evaluation.hours),
    (Axis("usd"), lambda evaluation: evaluation.usd),
)

_SCORES: tuple[tuple[str, Callable[[Evaluation], float], str], ...] = (
    ("Held-out reward", lambda evaluation: evaluation.reward, ""),
    (
        "Independent judge",
        lambda evaluation: evaluation.judge,
        "On the same held-out images; trained apart from the reward and never optimised. A reward that rises alone is "
        "reward hacking.",
    ),
)

_PHASES = ("rollout", "train", "explore", "audit", "eval", "sync", "idle", "lost")
"""In the order of the bars: work first."""


def compare(runs: Sequence[Measured]) -> str:
    """The whole page; there must be at least one run."""
    groups = grouped(runs)
    body = (
        _headline(groups, runs),
        *(_scores(groups, *score) for score in _SCORES),
        section("Figures", _figures(groups)),
        section("Where the money went", _costs(groups)),
        section("Who worked when", _timelines(groups)),
        section("Planner's choices", _planner(groups)),
        section("Runs", _runs(groups)),
    )
    return document(f"Spotlight: comparison of {len(runs)} runs", "".join(body))


def _colour(groups: Sequence[Group], group: Group) -> str:
    return COLOURS[groups.index(group) % len(COLOURS)]


def _badge(groups: Sequence[Group], group: Group) -> str:
    return f'<b class="key {_colour(groups, group)}"><span>{group.key}</span></b>'


def _headline(groups: Sequence[Group], runs: Sequence[Measured]) -> str:
    """The best score, the key to the page, and what to mind."""
    names = "".join(f"<li>{_badge(groups, group)}{escape(group.name)}</li>" for group in groups)
    ends = [(mean(rewards), group) for group in groups if (rewards := group.numbers(lambda run: _last(run, _reward)))]
    claim = ""
    if ends:
        best, winner = max(ends, key=lambda end: end[0])
        claim = f'<p class="claim">Highest held-out reward <b>{best:.3f}</b> {_badge(groups, winner)}</p>'
    warnings = []
    if len({run.iterations for run in runs}) > 1:
        warnings.append("Runs are of unequal length: compare curves where they share a place, not their ends.")
    if any(len(group.runs) > 1 for group in groups):
        warnings.append("Lines are means over seeds, as far as all of a system's runs have come; bands span its runs.")
    if reasons := sorted({run.unpriced for run in runs if run.unpriced}):
        warnings.append(f"Some costs are missing: {'; '.join(reasons)}.")
    notes = "".join(f'<p class="note">{escape(text)}</p>' for text in warnings)
    title = f"Comparison of {len(runs)} run{'s' if len(runs) > 1 else ''}"
    return f'<header><p class="brand">Spotlight</p><h1>{title}</h1>{claim}<ul class="keys">{names}</ul>{notes}</header>'


def _reward(evaluation: Evaluation) -> float:
    return evaluation.reward


def _judge(evaluation: Evaluation) -> float:
    return evaluation.judge


def _first(run: Measured, score: Callable[[Evaluation], float]) -> float:
    return score(run.evaluations[0]) if run.evaluations else math.nan


def _last(run: Measured, score: Callable[[Evaluation], float]) -> float:
    return score(run.evaluations[-1]) if run.evaluations else math.nan


def _scores(groups: Sequence[Group], title: str, score: Callable[[Evaluation], float], note: str) -> str:
    """One score against all axes."""
    figures = (
        drawn(f"Against {axis.name}", "", _lines(groups, x, score), axis=axis, from_zero=False, named=False)
        for axis, x in _AXES
    )
    body = charts(figures)
    return section(title, body + (f'<p class="note">{escape(note)}</p>' if note else "")) if body else ""


def _lines(groups: Sequence[Group], x: Callable[[Evaluation], float], y: Callable[[Evaluation], float]) -> list[Series]:
    lines = []
    for group in groups:
        curve = spread(group, x, y)
        if curve.mean:
            line = Series(f"{group.key}, {group.name}", curve.mean, _colour(groups, group), tag=group.key)
            lines.append(replace(line, low=curve.low, high=curve.high) if len(group.runs) > 1 else line)
    return lines


_COLUMNS: tuple[tuple[str, Callable[[Measured], float], Callable[[float], str]], ...] = (
    ("iterations", lambda run: run.iterations, "{:,.0f}".format),
    ("hours", lambda run: run.hours, amount),
    ("usd", lambda run: run.usd, amount),
    ("reward start", lambda run: _first(run, _reward), "{:.3f}".format),
    ("reward end", lambda run: _last(run, _reward), "{:.3f}".format),
    ("judge end", lambda run: _last(run, _judge), "{:.3f}".format),
    ("preemptions", lambda run: run.preemptions, "{:,.0f}".format),
    ("seeds explored", lambda run: run.seeds_explored, "{:,.0f}".format),
    ("reserved in use", lambda run: run.utilisation("reserved"), "{:.0%}".format),
    ("spot in use", lambda run: run.utilisation("spot"), "{:.0%}".format),
)


def _figures(groups: Sequence[Group]) -> str:
    """A row per group: means, with least and most below them where there are several runs."""
    columns = ("", "seeds", *(name for name, _, _ in _COLUMNS))
    head = "".join(f'<th scope="col">{column or "system"}</th>' for column in columns)
    rows = []
    for group in groups:
        cells = [_seeds(group), *(_cell(group.numbers(value), form) for _, value, form in _COLUMNS)]
        name = f'<th scope="row">{_badge(groups, group)}<span>{escape(group.name)}</span></th>'
        rows.append(f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return framed(f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>')


def _seeds(group: Group) -> str:
    return escape(", ".join(sorted(group.seeds, key=lambda seed: (len(seed), seed))))


def _cell(numbers: Sequence[float], form: Callable[[float], str]) -> str:
    if not numbers:
        return "–"
    low, centre, high = (form(fold(numbers)) for fold in (min, mean, max))
    return centre if low == high else f"{centre}<small>{low}–{high}</small>"


def _costs(groups: Sequence[Group]) -> str:
    """Bars of the mean cost of a run by role and phase, all on one scale, and the same as a table."""
    usd = {group.key: _usd(group) for group in groups}
    priced = [group for group in groups if usd[group.key]]
    if not priced:
        return ""
    whole = max(sum(usd[group.key].get(role, {}).values()) for group in priced for role in ("reserved", "spot"))
    bars = "".join(_cost_bars(groups, group, usd[group.key], whole or 1.0) for group in priced)
    phases = [phase for phase in _PHASES if any(phase in usd[g.key][role] for g in priced for role in usd[g.key])]
    named = "".join(f'<li><i class="swatch {kind_class(phase)}"></i>{phase}</li>' for phase in phases)
    rows = [
        (f"{group.key} {role}", *(amount(usd[group.key][role].get(phase, 0.0)) for phase in phases))
        for group in priced
        for role in usd[group.key]
    ]
    listed = f"<details><summary>usd by role and phase</summary>{table(('usd', *phases), rows)}</details>"
    return f'<figure><ul class="legend">{named}</ul><ul class="bars">{bars}</ul></figure>{listed}'


def _usd(group: Group) -> dict[str, dict[str, float]]:
    """Mean usd of the group's priced runs: role -> phase -> usd, phases in the order of the bars."""
    costs = [run.cost for run in group.runs if run.cost is not None]
    amounts: dict[str, dict[str, float]] = {}
    for account in sorted({account for cost in costs for account in cost.usd_of}, key=_order):
        usd = mean([cost.usd_of.get(account, 0.0) for cost in costs])
        if usd > 0:
            amounts.setdefault(account.role, {})[account.phase] = usd
    return amounts


def _order(account: tuple[str, str]) -> tuple[str, int, str]:
    role, phase = account
    return role, _PHASES.index(phase) if phase in _PHASES else _PHASES.index("idle") - 1, phase


def _cost_bars(groups: Sequence[Group], group: Group, usd: dict[str, dict[str, float]], whole: float) -> str:
    total = sum(sum(phases.values()) for phases in usd.values())
    lines = "".join(
        f'<div class="bar"><span>{role}</span>'
        f"{bar(list(phases.items()), title=f'{group.key} {role}', whole=whole, unit='usd')}"
        f"<span>{amount(sum(phases.values()))}</span></div>"
        for role, phases in usd.items()
    )
    title = f"{_badge(groups, group)}{escape(group.name)} <b>{amount(total)} usd</b>"
    return f"<li><h3>{title}</h3>{lines}</li>"


def _timelines(groups: Sequence[Group]) -> str:
    """The first run of each group, all on one scale."""
    shown = [(group, group.runs[0].timeline) for group in groups if group.runs[0].timeline.rows]
    if not shown:
        return ""
    end_s = max(who.end_s for _, who in shown)
    figures = []
    for group, who in shown:
        first = replace(who, rows=who.rows[:SHOWN_ROWS])
        rest = len(who.rows) - len(first.rows)
        more = f"<figcaption>and {rest:,} more rows</figcaption>" if rest else ""
        lanes = named_lanes(first, title=f"Timeline of {group.key}", end_s=end_s, small=True)
        figures.append(f"<figure><h3>{_badge(groups, group)}{escape(group.name)}</h3>{lanes}{more}</figure>")
    rows = [row for _, who in shown for row in who.rows]
    note = "The first run of each system, all on one scale. A spot row is tinted while its node is paid for."
    return f'{work_legend(rows)}<div class="multiples">{"".join(figures)}</div><p class="note">{note}</p>'


def _planner(groups: Sequence[Group]) -> str:
    """Seeds asked for in the first run of each group; the band reaches from the least to the most of a prompt."""
    asking = [(group, group.runs[0].choices) for group in groups if group.runs[0].choices.seeds]
    seeds, steps = [], []
    for group, made in asking:
        line = Series(f"{group.key}, {group.name}", made.seeds, _colour(groups, group), tag=group.key)
        if made.least != made.most:
            line = replace(line, low=made.least, high=made.most)
        seeds.append(line)
        steps.append(replace(line, curve=made.mean_steps, low=(), high=()))
    note = "Candidates asked for in the first run of each system; bands reach from the least to the most of a prompt."
    varied = len({height for line in steps for _, height in line.curve}) > 1
    figures = (
        drawn("Seeds per prompt", note, seeds, named=False),
        drawn("Denoising steps per seed", "Mean over a batch.", steps, named=False) if varied else "",
        reasons_table([(group.key, group.runs[0].choices) for group in groups if group.runs[0].choices.reasons]),
    )
    return charts(figures)


def _runs(groups: Iterable[Group]) -> str:
    rows = [
        (group.key, run.name, run.settings.get("seed", "?"), run.status, f"{run.iterations:,.0f}")
        for group in groups
        for run in group.runs
    ]
    return table(("", "run", "seed", "status", "iterations"), rows, style="texts")
