"""Charts as SVG text. Colours are style classes (`c1`.., kinds of work): the page decides what they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from src.core.clock import duration
from src.report.read import Curve
from src.report.timeline import Span, Timeline, coalesce

LEFT, RIGHT, TOP, BOTTOM = 44, 14, 12, 34
"""Margins of a line chart around its plot, in SVG units (= CSS pixels at full size)."""

FLAT = 0.01
"""A range below this share of its values is drawn as flat: nobody reads an axis of many digits."""

ROW_PX, AXIS_PX = 26, 26
"""Height of a timeline row and of its axis."""


@dataclass(frozen=True)
class Series:
    """One line of a chart. `colour` is a style class; `faint` draws it thin, for context."""

    label: str
    curve: Curve
    colour: str
    faint: bool = False


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that cover [low, high]: steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0.12, 0.58, 4)
    [0.0, 0.2, 0.4, 0.6]
    """
    least = FLAT * max(abs(low), abs(high))
    if least == 0:
        high = 1.0
    elif high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    rough = (high - low) / max(count - 1, 1)
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, -exponent) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Short for an axis: no trailing zeros, thousands as k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Plot:
    """Where values lie on the drawing."""

    width: int
    height: int
    x_low: float
    x_high: float
    y_ticks: Sequence[float]

    def x(self, step: float) -> float:
        share = (step - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return round(LEFT + share * (self.width - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (self.y_ticks[-1] - value) / (self.y_ticks[-1] - self.y_ticks[0])
        return round(TOP + share * (self.height - TOP - BOTTOM), 1)

    def axes(self) -> str:
        right = self.width - RIGHT
        levels = "".join(
            f'<path class="grid" d="M{LEFT} {self.y(value)}H{right}"/>'
            + _text(number(value), LEFT - 8, self.y(value) + 4, anchor="end")
            for value in self.y_ticks
        )
        steps = "".join(
            _text(f"{step:g}", self.x(step), self.height - 17)
            for step in ticks(self.x_low, self.x_high, 6)
            if step == int(step) and self.x_low <= step <= self.x_high
        )
        return levels + steps + _text("iteration", (LEFT + right) / 2, self.height - 2)


def line_chart(
    series: Sequence[Series], *, title: str, from_zero: bool = False, width: int = 320, height: int = 220
) -> str:
    """Lines over the iteration. Each point carries its value as a tooltip; the last one is marked.

    The description for screen readers names every line with its first and last value. `series` and every
    curve in it must hold at least one point.
    """
    steps = [step for line in series for step, _ in line.curve]
    values = [value for line in series for _, value in line.curve] + ([0.0] if from_zero else [])
    y_ticks = ticks(min(values), max(values), 5)
    plot = _Plot(width, height, min(steps), max(steps), y_ticks)
    spoken = "; ".join(_spoken(line) for line in series)
    lines = (_line(line, [(plot.x(step), plot.y(value)) for step, value in line.curve]) for line in series)
    return _head(title, spoken, f'viewBox="0 0 {width} {height}"') + plot.axes() + "".join(lines) + "</svg>"


def _line(line: Series, places: Sequence[tuple[float, float]]) -> str:
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    dots = []
    for position, ((x, y), (step, value)) in enumerate(zip(places, line.curve, strict=True), start=1):
        last = position == len(places) and not line.faint
        style = f"dot {line.colour}{' last' if last else ''}"
        dots.append(
            f'<circle class="{style}" cx="{x}" cy="{y}" r="{3.5 if last else 2}">'
            f"<title>{escape(line.label)}: {value:.4g} at {step:g}</title></circle>"
        )
    faint = " faint" if line.faint else ""
    return f'<path class="line {line.colour}{faint}" d="{path}"/>{"".join(dots)}'


def _spoken(line: Series) -> str:
    (first, start), (last, end) = line.curve[0], line.curve[-1]
    return f"{line.label}: {start:.3g} at iteration {first:g}, {end:.3g} at iteration {last:g}"


def _head(title: str, description: str, size: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} '
        f'aria-label="{escape(title)}. {escape(description)}">'
    )


def timeline_chart(timeline: Timeline) -> str:
    """The rows' lanes without their names. Places are percentages: the drawing stretches, text does not."""
    end_s = timeline.end_s or 1.0
    height = ROW_PX * len(timeline.rows) + AXIS_PX

    def percent(time_s: float) -> str:
        return f"{100 * time_s / end_s:.3f}%"

    work = ", ".join(f"{row.name} {duration(row.busy_s())} of work" for row in timeline.rows)
    parts = [_head("Timeline of who did what", work, f'width="100%" height="{height}"')]
    parts.append(
        '<defs><pattern id="lost" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0 0V5"/></pattern></defs>'
    )
    for time_s in (t for t in ticks(0, end_s, 9) if t <= end_s):
        parts.append(f'<svg x="{percent(time_s)}" overflow="visible"><path class="grid" d="M0 0V{height - AXIS_PX}"/>')
        anchor = "start" if time_s == 0 else "end" if time_s > 0.97 * end_s else "middle"
        label = f"{number(time_s)} s" if end_s < 600 else f"{time_s / 60:.3g} min"
        parts.append(f'<text class="tick" y="{height - 8}" text-anchor="{anchor}">{label}</text></svg>')
    for index, row in enumerate(timeline.rows):
        top = index * ROW_PX
        for start_s, stop_s in row.alive:
            parts.append(
                f'<rect class="alive" x="{percent(start_s)}" y="{top + 3}" '
                f'width="{percent(stop_s - start_s)}" height="{ROW_PX - 6}"/>'
            )
        parts += [_span(span, top, percent) for span in coalesce(row.spans, end_s / 2000)]
        for mark in row.marks:
            if mark.kind != "joined":
                parts.append(_mark(mark.kind, f"{mark.kind} at {mark.time_s:.1f} s", percent(mark.time_s), top))
    return "".join(parts) + "</svg>"


KINDS = ("rollout", "train", "explore", "audit", "eval")
"""Kinds of work with a colour of their own; everything else is drawn as `other`."""

MARKS = {
    "killed": "M-5-5L5 5M-5 5L5-5",
    "preempted": "M-5-5L5 5M-5 5L5-5M-5-5H5",
    "notice": "M0-6V2M0 5V6",
    "frozen": "M-3-5V5M3-5V5",
    "left": "M-5 0H5",
    "returned": "M0-6L5.5 4H-5.5Z",
}
"""What happened to a worker, as paths around the origin."""


def kind_class(kind: str) -> str:
    """The style class of a kind of work."""
    return kind if kind in KINDS else "other"


def _span(span: Span, top: int, percent: Callable[[float], str]) -> str:
    place = (
        f'x="{percent(span.start_s)}" y="{top + 5}" width="{percent(span.end_s - span.start_s)}" height="{ROW_PX - 10}"'
    )
    lost = f'<rect fill="url(#lost)" {place}/>' if span.lost else ""
    title = f"<title>{escape(span.label)}</title>"
    return f'<g>{title}<rect class="{kind_class(span.kind)}" {place}/>{lost}</g>'


def _text(text: str, x: float, y: float, *, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _mark(kind: str, label: str, x: str, top: int) -> str:
    path = MARKS.get(kind, MARKS["left"])
    halo = '<circle class="halo" r="8"/>'
    return (
        f'<svg x="{x}" y="{top + ROW_PX // 2}" overflow="visible"><title>{escape(label)}</title>'
        f'{halo}<path class="mark {kind}" d="{path}"/></svg>'
    )


def symbol(kind: str) -> str:
    """A mark of the timeline on its own, for the legend."""
    path = f'<path class="mark {kind}" d="{MARKS.get(kind, MARKS["left"])}"/>'
    return f'<svg class="symbol" viewBox="-8 -8 16 16" aria-hidden="true">{path}</svg>'
