"""The picture of docs/evidence.md: held-out score against hours and against usd, a line per system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.evidence.tables import Row
from src.core.stats import mean
from src.report.svg import Axis, Series, line_chart

COLOURS = ("#1f4e9c", "#7aa2d6", "#6b7280", "#2e8b57", "#9b2d86", "#d9730d", "#0f766e", "#be123c", "#111827")
AXES = (("seconds", 3600.0, Axis("hours")), ("usd", 1.0, Axis("usd")))
WIDTH, HEIGHT, LINE = 460, 300, 18
STYLE = """
svg { background: #fff; font-family: system-ui, sans-serif; }
.grid { stroke: #e5e4de; fill: none; } .tick { font-size: 12px; fill: #5f636b; }
.line { fill: none; stroke: currentColor; stroke-width: 2; } .dot { fill: currentColor; }
.band { fill: currentColor; opacity: .12; } .name { font-size: 12px; fill: #1d1e22; }
"""


def picture(systems: Mapping[str, Sequence[Row]]) -> str:
    """An SVG file: means over runs, with bands from the least to the most of a system's runs."""
    panels = []
    for number, (name, unit, axis) in enumerate(AXES):
        lines = [series(system, rows, name, unit, f"c{place}") for place, (system, rows) in enumerate(systems.items())]
        drawing = line_chart(lines, title=f"Held-out score against {axis.name}", axis=axis, width=WIDTH, height=HEIGHT)
        panels.append(drawing.replace("<svg ", f'<svg x="{number * WIDTH}" width="{WIDTH}" height="{HEIGHT}" ', 1))
    names = "".join(_name(place, system) for place, system in enumerate(systems))
    colours = "".join(f".c{place} {{ color: {colour}; }}" for place, colour in enumerate(COLOURS))
    height = HEIGHT + LINE * (len(systems) // 3 + 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(AXES)} {height}">'
        f"<style>{STYLE}{colours}</style>{''.join(panels)}{names}</svg>\n"
    )


def series(system: str, rows: Sequence[Row], name: str, unit: float, colour: str) -> Series:
    """The mean curve of a system's runs: the k-th evaluations of all runs are a point."""
    points: list[tuple[float, list[float]]] = [
        (mean([point[name] for point in at]) / unit, [point["reward"] for point in at])
        for at in zip(*(row["curve"] for row in rows), strict=True)
    ]
    edges: list[Any] = [[(x, edge(values)) for x, values in points] for edge in (min, max)]
    return Series(system, [(x, mean(values)) for x, values in points], colour, low=edges[0], high=edges[1])


def _name(place: int, system: str) -> str:
    x, y = 50 + place % 3 * 280, HEIGHT + LINE * (place // 3 + 1)
    text = f'<text class="name" x="{x + 32}" y="{y}">{escape(system)}</text>'
    return f'<path class="line c{place}" d="M{x} {y - 4}h24"/>{text}'
