"""The job on the terminal: a live bar, or, elsewhere, a plain line per iteration and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from src.core.clock import duration
from src.core.events import Event
from src.spot.cost import Ledger


@dataclass
class RunState:
    """What the terminal shows, folded from events and metrics. Reads no clock: time comes with the news."""

    total: int
    """Iterations of the whole run."""
    ledger: Ledger
    done: int = 0
    first: int = 0
    """Iterations that were done before this start (a resumed run)."""
    now_s: float = 0.0
    began_s: float | None = None
    """When the first iteration of this start began."""
    spot: set[str] = field(default_factory=set)
    explored: int = 0
    held_out: float | None = None
    judge: float | None = None
    train: float | None = None

    def on_event(self, event: Event) -> None:
        self.ledger.add(event)
        self.now_s = max(self.now_s, float(event["time_s"]))
        match event["kind"]:
            case "run_started":
                self.done = self.first = int(event["iteration"])
                self.spot.clear()
                self.began_s = None
            case "worker_joined" if event["role"] == "spot":
                self.spot.add(event["worker"])
            case "worker_lost":
                self.spot.discard(event["worker"])
            case "explored":
                self.explored += len(event["results"])
            case "phase" if self.began_s is None and event["name"] == "rollout":
                self.began_s = float(event["start_s"])

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        self.now_s = max(self.now_s, float(row["time_s"]))
        if "train/reward" in row:
            self.done, self.train = int(row["step"]), float(row["train/reward"])
        if "eval/reward" in row:
            self.held_out, self.judge = float(row["eval/reward"]), row.get("eval/judge")

    @property
    def left_s(self) -> float | None:
        """Seconds until the last iteration, at the pace of this start; None before there is a pace."""
        if self.began_s is None or self.done == self.first:
            return None
        return (self.now_s - self.began_s) / (self.done - self.first) * (self.total - self.done)

    @property
    def facts(self) -> str:
        """One line: rewards, workers, explored seeds, cost, time left."""
        cost = self.ledger.cost
        busy = cost.utilisation("spot")
        parts = [
            _figure("held-out", self.held_out),
            _figure("train", self.train),
            f"{len(self.spot)} spot" + (f" ({busy:.0%} busy)" if busy > 0 else ""),
            f"{self.explored:,} explored",
            f"{cost.usd:.4f} usd",
            "" if self.left_s is None or self.done == self.total else f"{duration(self.left_s)} left",
        ]
        return "  ".join(part for part in parts if part)


class Progress:
    """Shows the coordinator's news as it comes. Call from one thread.

    Args:
        total: iterations of the run.
        ledger: adds up the cost; it must not have seen an event yet.
        console: where to write; a console that is no terminal gets plain lines.
    """

    def __init__(self, *, total: int, ledger: Ledger, console: Console | None = None) -> None:
        self.console = console or Console()
        self._state = RunState(total=total, ledger=ledger)
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def start(self) -> None:
        """Draws the bar, if there is a terminal."""
        if not self.console.is_terminal:
            return
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
        )
        self._task = self._bar.add_task("Spotlight", total=self._state.total, facts="starting")
        self._bar.start()

    def on_event(self, event: Event) -> None:
        """Takes one event of the event log."""
        self._state.on_event(event)
        if event["kind"] == "worker_lost" and event["reason"] != "left":
            self._say(f"{event['worker']} was lost ({event['reason']}), {event['requests']} samples go back")
        self._draw()

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        """Takes one row of the metrics."""
        state = self._state
        state.on_metrics(row)
        if "eval/reward" in row:
            rewards = (_figure("held-out", state.held_out), _figure("judge", state.judge))
            self._say(f"evaluation after {int(row['step'])}: {'  '.join(filter(None, rewards))}")
        if "train/reward" in row and self._bar is None:
            self._say(f"iteration {state.done}/{state.total}  {state.facts}")
        self._draw()

    def stop(self) -> None:
        """Leaves the last state on the terminal."""
        if self._bar is not None:
            self._draw()
            self._bar.stop()
            self._bar = None

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._state.done, facts=self._state.facts)

    def _say(self, line: str) -> None:
        """A line that stays: above the bar, or on its own."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _figure(name: str, value: float | None) -> str:
    return "" if value is None or value != value else f"{name} {value:.3f}"
