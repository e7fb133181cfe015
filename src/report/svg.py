"""Line charts as SVG text. Colours are style classes (`c1`..): the page decides what they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from src.report.read import Curve

LEFT, RIGHT, TOP, BOTTOM = 44, 14, 12, 34
"""Margins of a line chart around its plot, in SVG units (= CSS pixels at full size)."""

TAG_PX = 13
"""Height of a line's tag."""

TAG_PLACES = ((10, 0), (0, -13), (0, 14), (-10, -11), (-10, 12), (10, 13), (10, -13), (10, 26), (10, -26), (0, 27))
"""Middles of a tag from the end of its line, the best first."""

FLAT = 0.01
"""A range below this share of its values is drawn as flat: nobody reads an axis of many digits."""


@dataclass(frozen=True)
class Axis:
    """What runs to the right. Axes of whole numbers begin at the first value, others at 0."""

    name: str
    unit: str = ""
    whole: bool = False

    def said(self, x: float) -> str:
        return f"{self.name} {x:g}" if self.whole else f"{x:.3g} {self.unit or self.name}"


ITERATIONS = Axis("iteration", whole=True)


@dataclass(frozen=True)
class Series:
    """One line of a chart. `colour` is a style class; `faint` draws it thin, for context."""

    label: str
    curve: Curve
    colour: str
    faint: bool = False
    low: Curve = ()
    high: Curve = ()
    """Edges of a band around the line, at its places; empty: none."""
    tag: str = ""
    """A letter beside the line's end, so that it is known without its colour."""


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


def amount(value: float) -> str:
    """Hours and usd: cents while they matter.

    >>> amount(11.9), amount(1234.5), amount(0.03121), amount(0.0)
    ('11.90', '1,234', '0.031', '0')
    """
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


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

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)

    def axes(self, axis: Axis) -> str:
        right = self.width - RIGHT
        levels = "".join(
            f'<path class="grid" d="M{LEFT} {self.y(value)}H{right}"/>'
            + _text(number(value), LEFT - 8, self.y(value) + 4, anchor="end")
            for value in self.y_ticks
        )
        steps = "".join(
            _text(number(step), self.x(step), self.height - 17)
            for step in ticks(self.x_low, self.x_high, 6)
            if self.x_low <= step <= self.x_high and (step == int(step) or not axis.whole)
        )
        return levels + steps + _text(axis.name, (LEFT + right) / 2, self.height - 2)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    axis: Axis = ITERATIONS,
    from_zero: bool = False,
    width: int = 320,
    height: int = 220,
) -> str:
    """Lines over `axis`. Each point carries its value as a tooltip; the last one is marked.

    The description for screen readers names every line with its first and last value. `series` and every
    curve in it must hold at least one point.
    """
    steps = [step for line in series for step, _ in line.curve] + ([] if axis.whole else [0.0])
    values = [value for line in series for curve in (line.curve, line.low, line.high) for _, value in curve]
    values += [0.0] if from_zero else []
    plot = _Plot(width, height, min(steps), max(steps), ticks(min(values), max(values), 5))
    spoken = "; ".join(_spoken(line, axis) for line in series)
    bands = (_band(line, plot) for line in series if line.low)
    lines = (_line(line, plot, axis) for line in series)
    parts = (plot.axes(axis), *bands, *lines, _tags(series, plot))
    return head(title, spoken, f'viewBox="0 0 {width} {height}"') + "".join(parts) + "</svg>"


def _band(line: Series, plot: _Plot) -> str:
    return f'<path class="band {line.colour}" d="M{plot.path((*line.high, *reversed(line.low)))}Z"/>'


def _line(line: Series, plot: _Plot, axis: Axis) -> str:
    dots = []
    for position, (step, value) in enumerate(line.curve, start=1):
        last = position == len(line.curve) and not line.faint
        style = f"dot {line.colour}{' last' if last else ''}"
        place = f"{step:g}" if axis.whole else axis.said(step)
        dots.append(
            f'<circle class="{style}" cx="{plot.x(step)}" cy="{plot.y(value)}" r="{3.5 if last else 2}">'
            f"<title>{escape(line.label)}: {value:.4g} at {place}</title></circle>"
        )
    faint = " faint" if line.faint else ""
    return f'<path class="line {line.colour}{faint}" d="M{plot.path(line.curve)}"/>{"".join(dots)}'


def _tags(series: Sequence[Series], plot: _Plot) -> str:
    """Letters at the lines' ends: to the right, or where they cover neither an end nor one another."""
    ends = [(plot.x(line.curve[-1][0]), plot.y(line.curve[-1][1]), line) for line in series if line.tag]
    taken = [(x, y) for x, y, _ in ends]
    parts: list[str] = []
    for x, y, line in ends:
        places = [(x + dx, y + dy) for dx, dy in TAG_PLACES]
        free = (place for place in places if not any(_near(place, other) for other in taken))
        at = next(free, places[0])
        taken.append(at)
        parts.append(f'<text class="tag {line.colour}" x="{at[0]:.1f}" y="{at[1] + 4:.1f}">{escape(line.tag)}</text>')
    return "".join(parts)


def _near(place: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(place[0] - other[0]) < TAG_PX - 3 and abs(place[1] - other[1]) < TAG_PX - 1


def _spoken(line: Series, axis: Axis) -> str:
    (first, start), (last, end) = line.curve[0], line.curve[-1]
    return f"{line.label}: {start:.3g} at {axis.said(first)}, {end:.3g} at {axis.said(last)}"


def head(title: str, description: str, size: str) -> str:
    """Opens a drawing; title and description are read aloud."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} '
        f'aria-label="{escape(title)}. {escape(description)}">'
    )


def _text(text: str, x: float, y: float, *, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
