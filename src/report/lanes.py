"""Timelines and bars as SVG text. Places are percentages: a drawing stretches with the page, its text does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from src.core.clock import duration
from src.report.svg import head, number, ticks
from src.report.timeline import Mark, Row, Span, Timeline, coalesce

ROW_PX, AXIS_PX = 26, 26
"""Height of a timeline row and of its axis."""

SMALL_ROW_PX = 13
"""Height of a row where several timelines are compared."""

KINDS = ("rollout", "train", "explore", "audit", "eval", "sync")
"""Kinds of work with a colour of their own; everything else is drawn as `other`."""

UNUSED = ("idle", "lost")
"""What is paid for and brings nothing."""

MARKS = {
    "killed": "M-5-5L5 5M-5 5L5-5",
    "preempted": "M-5-5L5 5M-5 5L5-5M-5-5H5",
    "notice": "M0-6V2M0 5V6",
    "frozen": "M-3-5V5M3-5V5",
    "left": "M-5 0H5",
    "returned": "M0-6L5.5 4H-5.5Z",
    "resumed": "M-4-4L0 0L-4 4M1-4L5 0L1 4",
}
"""What happened to a worker, as paths around the origin."""

HATCH = (
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs><pattern id="lost" width="5" height="5" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path class="hatch" d="M0 0V5"/></pattern></defs>'
    "</svg>"
)
"""Once in a page: the pattern of lost work."""


def kind_class(kind: str) -> str:
    """The style class of a kind of work."""
    return kind if kind in (*KINDS, *UNUSED) else "other"


def timeline_chart(
    timeline: Timeline, *, title: str = "Timeline of who did what", end_s: float = 0.0, row_px: int = ROW_PX
) -> str:
    """The rows' lanes without their names, up to `end_s` if that is later than the timeline's end."""
    end_s = max(end_s, timeline.end_s) or 1.0
    height = row_px * len(timeline.rows) + AXIS_PX
    work = ", ".join(f"{row.name} {duration(row.busy_s())} of work" for row in timeline.rows)
    lanes = (
        f'<svg y="{index * row_px}" height="{row_px}" overflow="visible">{_lane(row, end_s, row_px)}</svg>'
        for index, row in enumerate(timeline.rows)
    )
    axis = _axis(end_s, height, count=9 if row_px == ROW_PX else 6)
    return head(title, work, f'width="100%" height="{height}"') + axis + "".join(lanes) + "</svg>"


def _percent(time_s: float, end_s: float) -> str:
    return f"{100 * time_s / end_s:.3f}%"


def _axis(end_s: float, height: int, *, count: int) -> str:
    unit_s, unit = next((s, name) for s, name in ((3600, "h"), (60, "min"), (1, "s")) if end_s >= 10 * s or s == 1)
    parts = []
    for time in (t for t in ticks(0, end_s / unit_s, count) if t * unit_s <= end_s):
        share = time * unit_s / end_s
        label = number(time) if time else f"0 {unit}"
        anchor = "start" if time == 0 else "end" if share > 0.97 else "middle"
        parts.append(
            f'<svg x="{100 * share:.3f}%" overflow="visible"><path class="grid" d="M0 0V{height - AXIS_PX}"/>'
            f'<text class="tick" y="{height - 8}" text-anchor="{anchor}">{label}</text></svg>'
        )
    return "".join(parts)


def _lane(row: Row, end_s: float, row_px: int) -> str:
    margin, inset = row_px // 8, row_px // 5
    parts = [_band("paid", since_s, until_s, end_s, 0, row_px) for since_s, until_s in row.paid]
    parts += [
        _band("alive", since_s, until_s, end_s, margin, row_px - 2 * margin)
        for since_s, until_s in coalesce_times(row.alive, end_s / 2000)
    ]
    parts += [_span(span, end_s, inset, row_px - 2 * inset) for span in coalesce(row.spans, end_s / 2000)]
    parts += [_mark(mark, end_s, row_px) for mark in _sparse(row.marks, end_s / 200)]
    return "".join(parts)


def coalesce_times(times: Iterable[tuple[float, float]], resolution_s: float) -> list[tuple[float, float]]:
    """Joins intervals whose gap is too short to be seen."""
    joined: list[tuple[float, float]] = []
    for since_s, until_s in sorted(times):
        if joined and since_s - joined[-1][1] < resolution_s:
            joined[-1] = (joined[-1][0], max(joined[-1][1], until_s))
        else:
            joined.append((since_s, until_s))
    return joined


def _sparse(marks: Sequence[Mark], distance_s: float) -> list[Mark]:
    """Of marks of one kind that would lie on one another only the first. A coming-in needs no mark."""
    kept: list[Mark] = []
    last_s: dict[str, float] = {}
    for mark in marks:
        if mark.kind != "joined" and mark.time_s - last_s.get(mark.kind, -distance_s) >= distance_s:
            kept.append(mark)
            last_s[mark.kind] = mark.time_s
    return kept


def _band(style: str, since_s: float, until_s: float, end_s: float, y: int, height: int) -> str:
    x, width = _percent(since_s, end_s), _percent(until_s - since_s, end_s)
    return f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def _span(span: Span, end_s: float, y: int, height: int) -> str:
    x, width = _percent(span.start_s, end_s), _percent(span.end_s - span.start_s, end_s)
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    lost = f'<rect fill="url(#lost)" {place}/>' if span.lost else ""
    title = f"<title>{escape(span.label)}</title>"
    return f'<g>{title}<rect class="{kind_class(span.kind)}" {place}/>{lost}</g>'


def _mark(mark: Mark, end_s: float, row_px: int) -> str:
    label = f"{mark.kind} {mark.detail} at {mark.time_s:.1f} s".replace("  ", " ")
    size = f' transform="scale({row_px / ROW_PX:.2g})"' if row_px < ROW_PX else ""
    return (
        f'<svg x="{_percent(mark.time_s, end_s)}" y="{row_px / 2:g}" overflow="visible"><title>{escape(label)}</title>'
        f'<g{size}><circle class="halo" r="7"/>{_glyph(mark.kind)}</g></svg>'
    )


def _glyph(kind: str) -> str:
    return f'<path class="mark {kind}" d="{MARKS.get(kind, MARKS["left"])}"/>'


def symbol(kind: str) -> str:
    """A mark of the timeline on its own, for the legend."""
    return f'<svg class="symbol" viewBox="-8 -8 16 16" aria-hidden="true">{_glyph(kind)}</svg>'


def bar(parts: Sequence[tuple[str, float]], *, title: str, whole: float, unit: str) -> str:
    """Amounts by kind, one after the other, as shares of `whole`."""
    spoken = ", ".join(f"{kind} {amount:.3g} {unit}" for kind, amount in parts)
    drawn, start = [], 0.0
    for kind, amount in parts:
        place = f'x="{100 * start / whole:.3f}%" width="{100 * amount / whole:.3f}%" height="100%"'
        lost = f'<rect fill="url(#lost)" {place}/>' if kind == "lost" else ""
        title_of = f"<title>{escape(kind)}: {amount:.3g} {unit}</title>"
        drawn.append(f'<g>{title_of}<rect class="{kind_class(kind)}" {place}/>{lost}</g>')
        start += amount
    return head(title, spoken, 'width="100%" height="18"') + "".join(drawn) + "</svg>"
