"""What a run writes down: its event log, its metrics, and the same as news for whoever follows it."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from src.core.clock import Clock, RunClock
from src.core.events import JsonLines, read_jsonl
from src.spot.cost import Ledger

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"
NEWS_KEPT = 20_000
"""Rows of news that a slow reader may lag behind before it misses some."""


@dataclass(frozen=True)
class News:
    """What was logged since a cursor; `cursor` is where to read on."""

    cursor: int
    events: list[dict[str, Any]]
    metrics: list[dict[str, Any]]


class RunLog:
    """The logs of a run that begins in `folder`, or goes on there: then under the next `incarnation`, on its time axis.

    Args:
        iteration: where the run goes on; metrics rows beyond it, of work that was lost, are cut off.
        ledger: adds up what the run costs, which is then logged with the metrics of each iteration.
        now: the clock of this process.
    """

    def __init__(self, folder: Path, *, iteration: int, ledger: Ledger | None, now: Clock) -> None:
        self.incarnation, elapsed_s = _earlier_life(folder / EVENTS_FILE, ledger)
        self.now = RunClock(elapsed_s=elapsed_s, now=now)
        """Seconds since the start of the run."""
        self._ledger = ledger
        self._priced = iteration
        self._news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=NEWS_KEPT)
        self._told = 0
        _cut(folder / METRICS_FILE, iteration)
        self._events = JsonLines(folder / EVENTS_FILE)
        self._metrics = JsonLines(folder / METRICS_FILE)

    def record(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        """Appends one event to the event log, and returns it."""
        row = {"time_s": round(self.now(), 6), "kind": kind, **fields}
        self._events.append(row)
        if self._ledger is not None:
            self._ledger.add(row)
        self._tell("event", row)
        return row

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one row to the metrics."""
        cost: Mapping[str, float] = {}
        if self._ledger is not None and step > self._priced:
            self._priced = step
            cost = self._ledger.cost.metrics()
        row = {"step": step, "time_s": round(self.now(), 6), **metrics, **cost}
        self._metrics.append(row)
        self._tell("metrics", row)

    def usd_per_hour(self, role: str) -> float:
        """The present price of all training GPUs together, or of one spot GPU; 0 if none is known."""
        return self._ledger.usd_per_hour(role) if self._ledger is not None else 0.0

    def has_news(self, cursor: int) -> bool:
        return self._told > cursor

    def news(self, cursor: int) -> News:
        """Events and metrics that were logged since `cursor` (0 at first)."""
        fresh = min(self._told - cursor, len(self._news))
        rows = list(islice(self._news, len(self._news) - fresh, None))
        return News(
            self._told,
            [row for feed, row in rows if feed == "event"],
            [row for feed, row in rows if feed == "metrics"],
        )

    def close(self) -> None:
        """Closes the files."""
        self._events.close()
        self._metrics.close()

    def _tell(self, feed: str, row: dict[str, Any]) -> None:
        self._news.append((feed, row))
        self._told += 1


def _cut(path: Path, iteration: int) -> None:
    """Cuts off the metrics beyond an iteration."""
    if not path.exists():
        return
    kept = [row for row in read_jsonl(path) if row["step"] <= iteration]
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in kept))
    os.replace(draft, path)


def _earlier_life(events: Path, ledger: Ledger | None) -> tuple[int, float]:
    """(incarnation, seconds so far) of the run that goes on, from the event log that is there; the ledger reads it."""
    if not events.exists():
        return 0, 0.0
    incarnation, elapsed_s = 0, 0.0
    for event in read_jsonl(events):
        incarnation += event["kind"] == "run_started"
        elapsed_s = max(elapsed_s, event["time_s"])
        if ledger is not None:
            ledger.add(event)
    return incarnation, elapsed_s
