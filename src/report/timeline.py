"""Who did what, when: the event log folded into one row per worker. Pure; `svg` draws it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from src.core.events import Event


@dataclass(frozen=True)
class Span:
    """Work from `start_s` to `end_s`: a lease of a request kind, or a phase of the trainer."""

    start_s: float
    end_s: float
    kind: str
    """rollout, eval, audit, explore; for the trainer also train and other phase names."""
    label: str
    lost: bool = False
    """The worker died, or the lease was taken or given back, before the work was done."""


_KIND_OF_PHASE = {"evaluate": "eval"}
"""Phases of the trainer that are the same work as a request kind."""


@dataclass(frozen=True)
class Mark:
    """What happened to a worker: `joined`, `returned`, `notice`, `resumed` (it went on with what another one had
    begun), or why it was lost: `preempted`, `killed`, `frozen`, `failed` or `left`."""

    time_s: float
    kind: str
    detail: str = ""


@dataclass
class Row:
    """One line of the timeline. A worker that returns after a loss continues its row."""

    name: str
    role: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    alive: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which the process lived."""
    paid: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which its spot node was there, and paid for; empty where the log names no nodes."""

    def busy_s(self, kind: str | None = None) -> float:
        """Seconds of work that was finished, of one kind or of all."""
        return sum(s.end_s - s.start_s for s in self.spans if not s.lost and kind in (None, s.kind))

    @property
    def alive_s(self) -> float:
        return sum(end_s - start_s for start_s, end_s in self.alive)


@dataclass(frozen=True)
class Timeline:
    """Rows: the trainer's phases first, then the workers by role and place."""

    rows: tuple[Row, ...]
    end_s: float


def timeline(events: Iterable[Event]) -> Timeline:
    """Folds an event log. Leases and lives that are open at its end last until then."""
    fold = _Fold()
    for event in events:
        fold.end_s = max(fold.end_s, float(event["time_s"]))
        handle = getattr(fold, f"on_{event['kind']}", None)
        if handle is not None:
            handle(event)
    fold.close(fold.end_s, crashed=False)
    fold.place_nodes()
    workers = sorted(fold.workers.values(), key=lambda row: (row.role, _natural(row.name)))
    trainer = [fold.trainer] if fold.trainer.spans else []
    return Timeline(rows=(*trainer, *workers), end_s=fold.end_s)


def _natural(name: str) -> list[tuple[str, int]]:
    """An order in which node 2 comes before node 10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


class _Fold:
    """State while reading the log; one method per event kind that matters here."""

    def __init__(self) -> None:
        self.trainer = Row("trainer", "trainer")
        self.workers: dict[tuple[str, str, str], Row] = {}
        self.end_s = 0.0
        self._row_of: dict[str, Row] = {}
        self._born_s: dict[str, float] = {}
        self._open: dict[int, Event] = {}
        self._came_s: dict[str, float] = {}
        self._paid: dict[str, list[tuple[float, float]]] = {}

    def on_run_started(self, event: Event) -> None:
        """After a crash nobody said good-bye: what was still open ended with the previous life of the run."""
        self.close(float(event["time_s"]), crashed=True)

    def on_node_came(self, event: Event) -> None:
        self._came_s[str(event["node"])] = float(event["time_s"])

    def on_node_went(self, event: Event) -> None:
        self._end_node(str(event["node"]), float(event["time_s"]))

    def on_worker_joined(self, event: Event) -> None:
        role, node, slot = str(event["role"]), str(event["node"]), str(event["slot"])
        name = f"{node}/{slot}" if node == role else f"{role} {node}/{slot}"
        row = self.workers.setdefault((role, node, slot), Row(name, role))
        row.marks.append(Mark(float(event["time_s"]), "returned" if row.marks else "joined"))
        self._row_of[event["worker"]] = row
        self._born_s[event["worker"]] = float(event["time_s"])

    def on_notice(self, event: Event) -> None:
        if event["worker"] in self._born_s:
            self._row_of[event["worker"]].marks.append(Mark(float(event["time_s"]), "notice"))

    def on_worker_lost(self, event: Event) -> None:
        if event["worker"] in self._born_s:
            self._end_life(event["worker"], float(event["time_s"]), str(event["reason"]))

    def on_lease_granted(self, event: Event) -> None:
        self._open[event["lease"]] = event

    def on_lease_resumed(self, event: Event) -> None:
        if event["worker"] in self._born_s:
            detail = f"before step {event['step']}"
            self._row_of[event["worker"]].marks.append(Mark(float(event["time_s"]), "resumed", detail))

    def on_lease_done(self, event: Event) -> None:
        self._end_lease(event["lease"], float(event["time_s"]))

    def on_lease_lost(self, event: Event) -> None:
        lost = f", lost: {event.get('committed_steps', 0)} steps committed, {event.get('lost_steps', 0)} to make again"
        if event.get("reason") == "dropped":
            lost = ", cut off: nobody waited for them any more"
        self._end_lease(event["lease"], float(event["time_s"]), lost=lost)

    def on_phase(self, event: Event) -> None:
        name = str(event["name"])
        kind = _KIND_OF_PHASE.get(name, name)
        label = f"{name}, iteration {event['iteration']}"
        self.trainer.spans.append(Span(float(event["start_s"]), float(event["end_s"]), kind, label))
        self.end_s = max(self.end_s, float(event["end_s"]))

    def on_spot_trained(self, event: Event) -> None:
        lost = bool(event["lost"])
        label = f"train, iteration {event['iteration']}{', lost' if lost else ''}"
        for (role, node, _), row in self.workers.items():
            if role == "spot" and node in event["nodes"]:
                row.spans.append(Span(float(event["start_s"]), float(event["end_s"]), "train", label, lost))

    def close(self, end_s: float, *, crashed: bool) -> None:
        """Ends all that is open, at the end of the log or at a restart."""
        for lease in list(self._open):
            self._end_lease(lease, end_s, lost=", lost" if crashed else "")
        for worker in list(self._born_s):
            self._end_life(worker, end_s, "left" if crashed else None)
        for node in list(self._came_s):
            self._end_node(node, end_s)

    def place_nodes(self) -> None:
        """Gives each spot row the times of its node; a node that no worker ever joined from gets a row of its own."""
        for node, paid in self._paid.items():
            rows = [row for (role, place, _), row in self.workers.items() if (role, place) == ("spot", node)]
            for row in rows or [self.workers.setdefault(("spot", node, ""), Row(f"spot {node}", "spot"))]:
                row.paid.extend(paid)

    def _end_node(self, node: str, end_s: float) -> None:
        if node in self._came_s:
            self._paid.setdefault(node, []).append((self._came_s.pop(node), end_s))

    def _end_life(self, worker: str, end_s: float, reason: str | None) -> None:
        row = self._row_of[worker]
        row.alive.append((self._born_s.pop(worker), end_s))
        if reason is not None:
            row.marks.append(Mark(end_s, reason))

    def _end_lease(self, lease: int, end_s: float, *, lost: str = "") -> None:
        """`lost`: what to say of work that was."""
        granted = self._open.pop(lease, None)
        row = None if granted is None else self._row_of.get(granted["worker"])
        if granted is None or row is None:
            return
        kind = str(granted["request_kind"])
        label = f"{kind}, iteration {granted['iteration']}, {granted['count']} samples{lost}"
        row.spans.append(Span(float(granted["time_s"]), end_s, kind, label, bool(lost)))


def coalesce(spans: Sequence[Span], resolution_s: float) -> list[Span]:
    """Merges neighbours of one kind whose gap is below `resolution_s`: pages of long runs stay small."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        last = merged[-1] if merged else None
        same = last is not None and (last.kind, last.lost) == (span.kind, span.lost)
        if last is not None and same and not span.lost and span.start_s - last.end_s < resolution_s:
            end_s = max(last.end_s, span.end_s)
            merged[-1] = Span(last.start_s, end_s, span.kind, f"{span.kind}, {last.start_s:.1f}-{end_s:.1f} s")
        else:
            merged.append(span)
    return merged
