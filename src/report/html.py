"""The report page: one self-contained HTML file. Style and pictures are inside it, there is no script."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from src.core.clock import duration
from src.report.charts import EXPLORATION, LEARNING, OPTIMISATION, SECONDS, Chart
from src.report.read import Curve, Picture, Run, flatten
from src.report.svg import KINDS, Series, kind_class, line_chart, symbol, timeline_chart
from src.report.timeline import Row, Timeline, timeline

SHOWN_PAIRS = 24
"""Pairs of pictures on the page; the run folder has them all."""

STORED_PX = 384
"""Larger pictures are scaled down to this edge before they are put into the page."""

EXCERPT = ("seed", "model", "data", "reward", "algo", "explore", "trainer", "cluster")
"""Config sections whose scalars are listed, but for Hydra's `_target_`s; the whole file follows folded."""


def page(run: Run) -> str:
    """The whole page for one run."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    who = timeline(run.events)
    body = "".join(
        (
            _headline(run),
            _learning(run),
            _images(run.pictures),
            _charts("Exploration", run, EXPLORATION),
            _who(who, run),
            _charts("Optimisation", run, OPTIMISATION),
            _numbers(run),
            _config(run.config),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Spotlight: {escape(run.name)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


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
    legend = _legend(reversed(series))
    figure = f'<figure class="hero">{legend}{drawings}<figcaption>{LEARNING.note}</figcaption></figure>'
    return _section("Learning", figure)


def _legend(series: Iterable[Series]) -> str:
    entries = "".join(f'<li><i class="swatch {line.colour}"></i>{escape(line.label)}</li>' for line in series)
    return f'<ul class="legend">{entries}</ul>'


def _charts(title: str, run: Run, charts: Iterable[Chart]) -> str:
    body = "".join(_figure(run, chart) for chart in charts)
    return _section(title, f'<div class="charts">{body}</div>' if body else "")


def _figure(run: Run, chart: Chart) -> str:
    series = chart.series(run.curves)
    if not series:
        return ""
    drawing = line_chart(series, title=chart.title, from_zero=chart.from_zero)
    return (
        f"<figure><h3>{escape(chart.title)}</h3>{_legend(series)}{drawing}"
        f"<figcaption>{escape(chart.note)}</figcaption></figure>"
    )


def _images(pictures: Sequence[Picture]) -> str:
    """Pairs of equal prompt and seed, before and after training, in the order of the evaluation set."""
    if not pictures:
        return ""
    first, last = pictures[0].iteration, pictures[-1].iteration
    before = {picture.index: picture for picture in pictures if picture.iteration == first}
    after = {picture.index: picture for picture in pictures if picture.iteration == last}
    shown = sorted(before.keys() & after.keys())[:SHOWN_PAIRS]
    cards = "".join(_pair(before[index], after[index]) for index in shown)
    note = (
        f"Each pair: before training, then after {last} iterations, with equal prompt and seed; "
        f"the first {len(shown)} of {len(before)} held-out images, not chosen. Numbers are rewards."
    )
    return _section("Before and after", f'<p class="note">{note}</p><ul class="pairs">{cards}</ul>')


def _pair(before: Picture, after: Picture) -> str:
    better = "up" if after.reward > before.reward else ""
    sides = (
        f"<div>{_image(before, 'before')}<span>{before.reward:.2f}</span></div>"
        f'<div>{_image(after, "after")}<span class="{better}">{after.reward:.2f}</span></div>'
    )
    shape = "pair stacked" if _is_wide(before.path) else "pair"
    return f'<li><div class="{shape}">{sides}</div><p>{escape(before.prompt)}</p></li>'


def _is_wide(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return image.width > 1.5 * image.height
    except (OSError, UnidentifiedImageError):
        return False


def _image(picture: Picture, when: str) -> str:
    alt = escape(f"{when} training: {picture.prompt}, reward {picture.reward:.2f}")
    try:
        return f'<img alt="{alt}" src="{data_uri(picture.path)}">'
    except (OSError, UnidentifiedImageError):
        return f'<div class="missing" role="img" aria-label="{alt}">no image</div>'


def data_uri(path: Path) -> str:
    """The image file as a PNG data URI, scaled down if it is larger than the page needs.

    Raises:
        OSError: it cannot be read, or is no image.
    """
    with Image.open(path) as image:
        image.thumbnail((STORED_PX, STORED_PX))
        stored = io.BytesIO()
        image.save(stored, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode("ascii")


def _who(who: Timeline, run: Run) -> str:
    if not who.rows:
        return ""
    names = "".join(f"<li>{escape(row.name)}</li>" for row in who.rows)
    used = {kind_class(span.kind) for row in who.rows for span in row.spans}
    happened = {mark.kind for row in who.rows for mark in row.marks} - {"joined"}
    kinds = "".join(f'<li><i class="swatch {kind}"></i>{kind}</li>' for kind in (*KINDS, "other") if kind in used)
    marks = "".join(f"<li>{symbol(kind)}{kind}</li>" for kind in sorted(happened))
    drawing = (
        f'<div class="timeline"><ul class="names">{names}</ul>'
        '<div class="lanes" tabindex="0" role="group" aria-label="Timeline, scrolls sideways">'
        f"{timeline_chart(who)}</div></div>"
    )
    note = "One row per worker; a pale band is a live process, hatching is work that was lost with its worker."
    figure = f'<figure><ul class="legend">{kinds}{marks}</ul>{drawing}<figcaption>{note}</figcaption></figure>'
    beside = f'<div class="beside">{_work_table(who)}{_figure(run, SECONDS)}</div>'
    return _section("Who did what", figure + beside)


def _work_table(who: Timeline) -> str:
    present = {span.kind for row in who.rows for span in row.spans}
    kinds = [*(kind for kind in KINDS if kind in present), *sorted(present - set(KINDS))]
    columns = ["seconds", *kinds, "busy", "lost"]
    return _table(columns, [_work_cells(row, kinds, who.end_s) for row in who.rows])


def _work_cells(row: Row, kinds: Sequence[str], end_s: float) -> list[str]:
    """Finished seconds by kind, their share of the process's life, and the number of lost leases."""
    lived_s = row.alive_s or end_s
    busy = f"{row.busy_s() / lived_s:.0%}" if lived_s else ""
    seconds = (f"{row.busy_s(kind):.1f}" for kind in kinds)
    return [row.name, *seconds, busy, str(sum(span.lost for span in row.spans))]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _values(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values in as many columns as fit."""
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="values">{entries}</dl>' if entries else ""


def _numbers(run: Run) -> str:
    """The summary, and every metric's first, last and extreme values."""
    body = _values((name, _value(value)) for name, value in run.summary.items())
    if run.curves:
        rows = [_metric_cells(name, run.curves[name]) for name in sorted(run.curves)]
        table = _table(("metric", "points", "first", "last", "min", "max"), rows)
        body += f"<details><summary>All metrics</summary>{table}</details>"
    return _section("Numbers", body)


def _metric_cells(name: str, curve: Curve) -> list[str]:
    values = [value for _, value in curve]
    ends = (values[0], values[-1], min(values), max(values))
    return [name, str(len(values)), *(f"{value:.4g}" for value in ends)]


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _config(config: str) -> str:
    if not config:
        return ""
    chosen = [
        pair for pair in flatten(config).items() if pair[0].split(".")[0] in EXCERPT and not pair[0].endswith("_")
    ]
    whole = f"<details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>"
    return _section("Configuration", _values(chosen) + whole)
