"""Runs that differ in their seeds alone form a group; what else differs names it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.core.stats import mean
from src.report.measure import Evaluation, Measured
from src.report.read import Curve

_FIRST = (
    "system",
    "name",
    "cluster.reserved_gpus",
    "cluster.spot_nodes",
    "market.trace",
    "planner._target_",
    "algo.group_size",
)
"""Keys that say most about a system, before all others."""

_OUTSIDE = ("paths", "logger", "ckpt_path")
"""Sections that decide where results go, not which they are."""


@dataclass(frozen=True)
class Group:
    """One line of the comparison."""

    key: str
    """A letter: the group's short name all over the page."""
    name: str
    runs: tuple[Measured, ...]

    @property
    def seeds(self) -> tuple[str, ...]:
        return tuple(run.settings.get("seed", "?") for run in self.runs)

    def numbers(self, value: Callable[[Measured], float]) -> list[float]:
        """A figure of each run, of those that have it."""
        return [number for run in self.runs if not math.isnan(number := value(run))]


@dataclass(frozen=True)
class Spread:
    """A group's curve: means of its runs at equal iterations, least and most; x is a mean as well."""

    mean: Curve
    low: Curve
    high: Curve


def grouped(runs: Sequence[Measured]) -> tuple[Group, ...]:
    """Groups in the order of their first runs."""
    members: dict[frozenset[tuple[str, str]], list[Measured]] = {}
    for run in runs:
        members.setdefault(frozenset(_decisive(run.settings).items()), []).append(run)
    names = _names([dict(settings) for settings in members])
    fallback = runs[0].settings.get("name", runs[0].name)
    return tuple(
        Group(_letters(index), name or fallback, tuple(same))
        for index, (name, same) in enumerate(zip(names, members.values(), strict=True))
    )


def spread(group: Group, x: Callable[[Evaluation], float], y: Callable[[Evaluation], float]) -> Spread:
    """Scores of a group's runs, at the iterations at which all of them have been evaluated."""
    by_iteration: dict[float, list[tuple[float, float]]] = {}
    for run in group.runs:
        for evaluation in run.evaluations:
            point = (x(evaluation), y(evaluation))
            if not any(map(math.isnan, point)):
                by_iteration.setdefault(evaluation.iteration, []).append(point)
    whole = [points for _, points in sorted(by_iteration.items()) if len(points) == len(group.runs)]
    places = [mean([place for place, _ in points]) for points in whole]
    heights = [[height for _, height in points] for points in whole]

    def curve(fold: Callable[[Sequence[float]], float]) -> Curve:
        return tuple(zip(places, map(fold, heights), strict=True))

    return Spread(mean=curve(mean), low=curve(min), high=curve(max))


def _decisive(settings: Mapping[str, str]) -> dict[str, str]:
    """All that decides what a run does, but its seeds. Paths are taken from the project's folder on."""
    root = settings.get("paths.root_dir", "") + "/"
    return {
        key: value.removeprefix(root)
        for key, value in settings.items()
        if key.split(".")[0] not in _OUTSIDE and key.rpartition(".")[2] != "seed" and value != "null"
    }


def _names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for each: the fewest settings that tell them apart, the most telling ones first."""
    keys = {key for one in settings for key in one if any(other.get(key) != one[key] for other in settings)}
    chosen: list[str] = []
    for key in sorted(keys, key=_rank):
        if len(_classes(settings, [*chosen, key])) > len(_classes(settings, chosen)):
            chosen.append(key)
    return [", ".join(_said(key, one.get(key)) for key in chosen) for one in settings]


def _classes(settings: Sequence[Mapping[str, str]], keys: Sequence[str]) -> set[tuple[str | None, ...]]:
    return {tuple(one.get(key) for key in keys) for one in settings}


def _rank(key: str) -> tuple[int, int, str]:
    """Well-known keys, then the shallow ones; how long a run is says least."""
    place = _FIRST.index(key) if key in _FIRST else len(_FIRST) + key.startswith("trainer.")
    return place, key.count("."), key


def _said(key: str, value: str | None) -> str:
    """A setting in words.

    >>> _said("cluster.reserved_gpus", "4"), _said("planner._target_", "src.spot.planning.simple.NoExploration")
    ('4 reserved GPUs', 'planner no exploration')
    >>> _said("market.trace", "data/traces/aws.csv"), _said("market.trace", None), _said("cluster.elastic", "true")
    ('trace aws', 'no trace', 'elastic')
    """
    *above, last = key.split(".")
    if last in ("_target_", "path") and above:
        last = above[-1]
    words = last.replace("_", " ").replace("gpus", "GPUs")
    if value is None or value == "false":
        return f"no {words}"
    if value == "true":
        return words
    if last in ("system", "name"):
        return value
    if re.fullmatch(r"\d+", value) and words.endswith("s"):
        return f"{value} {words}"
    return f"{words} {_short(value)}"


def _short(value: str) -> str:
    """The telling part of a path, or of a dotted name."""
    if "/" in value:
        return Path(value).stem
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", value):
        last = value.rpartition(".")[2]
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", last).lower().replace("_", " ")
    return value


def _letters(index: int) -> str:
    """A .. Z, AA, AB ..."""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters
