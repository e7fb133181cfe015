"""Recorded spot markets: which nodes somebody had, and when each came and went.

`read_trace` reads the public formats, told apart by their first line (times in milliseconds from the start unless
it says otherwise):

    60000,add,node19                                    which node came or went
    [60000, "add", {"nodes": ["node-4", "node-7"]}]     the same as JSON lines; also "remove" and "no-op"
    60000,19                                            how many nodes were there from then on
    2021-12-11, 11:13:10, 55                            the same, with date and time of day
    {"metadata": {"gap_seconds": 600}, "data": [3, 2]}  the same, at equal intervals

Rules
- Count-only formats name no nodes. Nodes that come are new ones; those that go are drawn from those present,
  uniformly and by seed.
- `data` that never exceeds 1 follows a single node, and there the public files mark with 1 that it is *gone*.
- In the format with dates, rows are samples that were written in blocks, and a block may run up to two minutes into
  the next one's time. The later line knows better: earlier lines with the same or a later stamp are taken back.
- Everything else that cannot be is an error: times that run backwards, negative counts, a node that comes twice or
  goes without having come, a torn line, an empty file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from src.core import seeds

_BLOCK_OVERLAP_S = 120.0
_MAX_NODES = 100_000
"""More are taken for a mistake in the file."""


class TraceError(ValueError):
    """A trace that cannot be read. The message begins with file and line."""


@dataclass(frozen=True, slots=True)
class Change:
    """A node comes (`joins`) or goes."""

    time_s: float
    """Since the start of the trace."""
    node: str
    joins: bool


@dataclass(frozen=True)
class Trace:
    """What happened to the nodes of a spot fleet. A node joins first, and then leaves and joins in turn."""

    name: str
    duration_s: float
    changes: tuple[Change, ...]
    """In order of time."""

    @cached_property
    def places(self) -> int:
        """The most nodes that were there at once: the size of the fleet that was asked for, as far as is known."""
        most = present = 0
        for change in self.changes:
            present += 1 if change.joins else -1
            most = max(most, present)
        return most

    @cached_property
    def first_nodes(self) -> tuple[str, ...]:
        """Nodes that were there from the start."""
        present: dict[str, None] = {}
        for change in self.changes:
            if change.time_s > 0:
                break
            if change.joins:
                present[change.node] = None
            else:
                del present[change.node]
        return tuple(present)


def read_trace(path: str | Path, *, seed: int = 0) -> Trace:
    """Reads a trace of any known format. `seed` draws who goes where the file has only counts.

    Raises:
        TraceError: the file is not a trace, or a damaged one.
        OSError: it cannot be opened.
    """
    path = Path(path)
    data = path.read_bytes()
    recording = _Recording(seed)
    if data.lstrip().startswith(b"{"):
        duration_s, last_line = _read_gaps(path, data, recording), 1
    else:
        duration_s, last_line = _read_lines(path, data, recording)
    trace = Trace(path.name, duration_s, tuple(recording.changes))
    if not 0 < duration_s < math.inf or trace.places == 0:
        raise TraceError(
            f"{path}:{last_line}: a trace must last longer than no time, not for ever, and have at least one node"
        )
    return trace


class _Recording:
    """Collects changes and refuses impossible ones by ValueError."""

    def __init__(self, seed: int) -> None:
        self.changes: list[Change] = []
        self._present: dict[str, None] = {}  # in order of joining
        self._now_s = 0.0
        self._came = 0
        self._random = seeds.generator("trace", seed)

    def pass_time(self, time_s: float) -> None:
        if not time_s >= self._now_s:
            raise ValueError(f"time runs backwards, from {self._now_s:g} s to {time_s:g} s")
        self._now_s = time_s

    def join(self, node: str) -> None:
        if node in self._present:
            raise ValueError(f"{node} is added but is there already")
        self._present[node] = None
        self.changes.append(Change(self._now_s, node, joins=True))

    def leave(self, node: str) -> None:
        if node not in self._present:
            raise ValueError(f"{node} is removed but is not there")
        del self._present[node]
        self.changes.append(Change(self._now_s, node, joins=False))

    def count(self, nodes: int) -> None:
        """From now on there are so many."""
        for _ in range(_checked_count(nodes) - len(self._present)):
            self._came += 1
            self.join(f"node{self._came}")
        surplus = len(self._present) - nodes
        for node in self._random.sample(list(self._present), surplus) if surplus > 0 else ():
            self.leave(node)


class _Format(Protocol):
    """Reads a file line by line; a line that it cannot take is a ValueError."""

    def row(self, text: str) -> None: ...

    def finish(self) -> float:
        """To be called after the last row. Returns how long the trace lasts, in seconds."""


class _NodeRows:
    """`ms,add|remove,node`."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._last_s = 0.0

    def row(self, text: str) -> None:
        time, action, node = _fields(text, 3)
        self._last_s = int(time) / 1000
        self._recording.pass_time(self._last_s)
        _apply(self._recording, action, [node])

    def finish(self) -> float:
        return self._last_s


class _NodeLists:
    """`[ms, "add"|"remove"|"no-op", {"nodes": [...], "duration": ms, ...}]`."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._end_s = 0.0

    def row(self, text: str) -> None:
        match json.loads(text):
            case [int(time_ms), str(action), {"nodes": [*nodes], **rest}]:
                self._recording.pass_time(time_ms / 1000)
                _apply(self._recording, action, [str(node) for node in nodes])
                self._end_s = (time_ms + _number(rest.get("duration", 0), "duration")) / 1000
            case _:
                raise ValueError('expected [milliseconds, "add"|"remove"|"no-op", {"nodes": [...]}]')

    def finish(self) -> float:
        return self._end_s


class _CountRows:
    """`ms,count`."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._last_s = 0.0

    def row(self, text: str) -> None:
        time, count = _fields(text, 2)
        self._last_s = int(time) / 1000
        self._recording.pass_time(self._last_s)
        self._recording.count(int(count))

    def finish(self) -> float:
        return self._last_s


class _DatedCounts:
    """`date, time, count`; overlapping blocks are put right as the top of this module says."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._rows: list[tuple[datetime, int]] = []

    def row(self, text: str) -> None:
        date, time, count = _fields(text, 3)
        stamp = datetime.strptime(f"{date} {time}", "%Y-%m-%d %H:%M:%S")  # as it is written there: no zones
        back_s = (self._rows[-1][0] - stamp).total_seconds() if self._rows else 0.0
        if back_s > _BLOCK_OVERLAP_S:
            raise ValueError(f"time runs backwards by {back_s:g} s; up to {_BLOCK_OVERLAP_S:g} s are put right")
        while self._rows and self._rows[-1][0] >= stamp:
            self._rows.pop()
        self._rows.append((stamp, _checked_count(int(count))))

    def finish(self) -> float:
        start = self._rows[0][0]
        for stamp, count in self._rows:
            self._recording.pass_time((stamp - start).total_seconds())
            self._recording.count(count)
        return (self._rows[-1][0] - start).total_seconds()


_FORMATS: tuple[tuple[re.Pattern[str], Callable[[_Recording], _Format]], ...] = (
    (re.compile(r"-?\d+\s*,\s*(add|remove)\s*,"), _NodeRows),
    (re.compile(r"\["), _NodeLists),
    (re.compile(r"-?\d+\s*,\s*-?\d+$"), _CountRows),
    (re.compile(r"\d{4}-\d\d-\d\d\s*,"), _DatedCounts),
)


def _read_lines(path: Path, data: bytes, recording: _Recording) -> tuple[float, int]:
    """Seconds that the trace lasts, and its last line."""
    rows: _Format | None = None
    number = 0
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            text = line.decode().strip()
            if not text:
                continue
            rows = rows or _format_of(text)(recording)
            rows.row(text)
        except (ValueError, OverflowError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    if rows is None:
        raise TraceError(f"{path}:{max(number, 1)}: the trace is empty")
    return rows.finish(), number


def _read_gaps(path: Path, data: bytes, recording: _Recording) -> float:
    """Seconds that the trace lasts."""
    try:
        match json.loads(data):
            case {"metadata": {"gap_seconds": gap}, "data": [*counts]}:
                gap_s = _number(gap, "gap_seconds")
            case _:
                raise ValueError('expected {"metadata": {"gap_seconds": ...}, "data": [...]}')
        if not gap_s > 0 or not counts:
            raise ValueError(f"gap_seconds={gap} must be positive, and data must not be empty")
        nodes = [_checked_count(count) for count in counts]
        if max(nodes) <= 1:
            nodes = [1 - gone for gone in nodes]
        for index, count in enumerate(nodes):
            recording.pass_time(index * gap_s)
            recording.count(count)
        return len(nodes) * gap_s
    except (ValueError, OverflowError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise TraceError(f"{path}:{line}: {error}") from error


def _format_of(first_line: str) -> Callable[[_Recording], _Format]:
    for pattern, rows in _FORMATS:
        if pattern.match(first_line):
            return rows
    raise ValueError(f"no known trace format begins with {first_line[:60]!r}")


def _fields(text: str, count: int) -> list[str]:
    fields = [field.strip() for field in text.split(",")]
    if len(fields) != count or not all(fields):
        raise ValueError(f"expected {count} fields, got {text[:60]!r}")
    return fields


def _apply(recording: _Recording, action: str, nodes: list[str]) -> None:
    match action:
        case "add":
            for node in nodes:
                recording.join(node)
        case "remove":
            for node in nodes:
                recording.leave(node)
        case "no-op":
            pass
        case _:
            raise ValueError(f"expected add, remove or no-op, got {action!r}")


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return value


def _checked_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_NODES:
        raise ValueError(f"a number of nodes must be within 0..{_MAX_NODES}, got {value!r}")
    return value
