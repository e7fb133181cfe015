"""Pieces that all pages are made of: one self-contained HTML file, style and pictures inside it, no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from src.report.charts import Chart
from src.report.choices import Choices
from src.report.lanes import HATCH, KINDS, ROW_PX, SMALL_ROW_PX, kind_class, symbol, timeline_chart
from src.report.read import Curve
from src.report.svg import ITERATIONS, Axis, Series, line_chart
from src.report.timeline import Row, Timeline


def document(title: str, body: str) -> str:
    """The whole file."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body>{HATCH}<main>{body}</main></body></html>\n"
    )


def section(title: str, body: str) -> str:
    """Nothing without a body."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def legend(series: Iterable[Series]) -> str:
    entries = "".join(f'<li><i class="swatch {line.colour}"></i>{escape(line.label)}</li>' for line in series)
    return f'<ul class="legend">{entries}</ul>'


def work_legend(rows: Iterable[Row]) -> str:
    """Colours and marks that the rows of a timeline have."""
    rows = tuple(rows)
    used = {kind_class(span.kind) for row in rows for span in row.spans}
    happened = {mark.kind for row in rows for mark in row.marks} - {"joined"}
    kinds = "".join(f'<li><i class="swatch {kind}"></i>{kind}</li>' for kind in (*KINDS, "other") if kind in used)
    marks = "".join(f"<li>{symbol(kind)}{kind}</li>" for kind in sorted(happened))
    return f'<ul class="legend">{kinds}{marks}</ul>'


def named_lanes(
    who: Timeline, *, title: str = "Timeline of who did what", end_s: float = 0.0, small: bool = False
) -> str:
    """A timeline with the names of its rows; a small one fits any page, others scroll sideways."""
    names = "".join(f"<li>{escape(row.name)}</li>" for row in who.rows)
    chart = timeline_chart(who, title=title, end_s=end_s, row_px=SMALL_ROW_PX if small else ROW_PX)
    scrolls = "" if small else ' tabindex="0" role="group" aria-label="Timeline, scrolls sideways"'
    return (
        f'<div class="timeline{" small" if small else ""}"><ul class="names">{names}</ul>'
        f'<div class="lanes"{scrolls}>{chart}</div></div>'
    )


def charts(figures: Iterable[str]) -> str:
    """Figures side by side where they fit; nothing without any."""
    body = "".join(figures)
    return f'<div class="charts">{body}</div>' if body else ""


def figure(chart: Chart, curves: Mapping[str, Curve]) -> str:
    """A chart of the metrics that there are; nothing without any."""
    return drawn(chart.title, chart.note, chart.series(curves), from_zero=chart.from_zero)


def drawn(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    axis: Axis = ITERATIONS,
    from_zero: bool = True,
    named: bool = True,
) -> str:
    """Lines with title, legend (if `named`) and note; nothing without lines."""
    if not series:
        return ""
    names = legend(series) if named else ""
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    drawing = line_chart(series, title=title, axis=axis, from_zero=from_zero)
    return f"<figure><h3>{escape(title)}</h3>{names}{drawing}{caption}</figure>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, style: str = "") -> str:
    """Texts in a table whose first column names the rows."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    return framed(f'<table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def framed(table: str) -> str:
    """A table that scrolls sideways, by keyboard too, where it is wider than the page."""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="Table, scrolls sideways">{table}</div>'


def reasons_table(columns: Sequence[tuple[str, Choices]]) -> str:
    """Why planners stopped asking, and how often; nothing if none did."""
    names = sorted({reason for _, made in columns for reason in made.reasons})
    if not names:
        return ""
    rows = [(name, *(f"{made.reasons[name]:,}" for _, made in columns)) for name in names]
    listed = table(("reason", *(name for name, _ in columns)), rows, style="reasons")
    return f"<figure><h3>Why it stopped asking</h3>{listed}</figure>"


def values(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values in as many columns as fit."""
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="values">{entries}</dl>' if entries else ""
