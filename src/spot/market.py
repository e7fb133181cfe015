"""The spot market of a job, played from a recorded trace: who is told that it goes, who goes, who comes.

`Market.handle(now_s, event) -> actions` reads no clock and touches no process, so a real fleet, a virtual one and a
test meet the very same market. Rules

- The trace's fleet has as many *places* as it had nodes at once (M). A node that joins takes the place that has been
  vacant for longest and keeps it until it leaves. In the public traces no node ever comes back under its name;
  places do get a node again. The job follows n of the M places, drawn by seed, with every change: its expected
  preemptions are n/M of the trace's. (Scaling the counts to n and rounding would leave hardly any.)
- When the node of a followed place leaves, the job's node gets a notice at that moment, and is killed `grace_s` later.
  When the place gets a node again, the job's node returns, at the earliest right after its kill; if the place has lost
  it again by then, it never was there.
- `time_scale` trace seconds pass in a second of the job; `grace_s` is in the job's seconds.
- A job that outlasts the trace sees it again from the start. At the seam, nodes that are there go on as those that
  were there at the start; only the difference of their numbers leaves (who came last) or joins.

`python -m src.spot.market` prints how often nodes of the traces are preempted.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Protocol

from src.core import seeds
from src.spot.traces import Trace, read_trace

SHIPPED = Path(__file__).parents[2] / "data" / "traces"


@dataclass(frozen=True)
class Start:
    """The job starts, or goes on after a restart, with no node yet."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Heard:
    """A worker has heard from its node itself that the node will be gone in `grace_s` seconds."""

    node: str
    grace_s: float


@dataclass(frozen=True)
class Missed:
    """A worker on the node is gone without a word: the node may be, too."""

    node: str


Event = Start | Tick | Heard | Missed


@dataclass(frozen=True)
class Notice:
    """The node will be gone in `grace_s` seconds; infinite: it only has become more likely that it will be."""

    node: str
    grace_s: float


@dataclass(frozen=True)
class Kill:
    """The node is gone now."""

    node: str


@dataclass(frozen=True)
class Return:
    """The node is there: for the first time, or again."""

    node: str
    machine: str = ""
    """Which machine it is, where it is a real one."""


Action = Notice | Kill | Return


class Nodes(Protocol):
    """Which spot nodes a job has: those of a `Market`, or of a Ray cluster (src/spot/ray_nodes.py)."""

    @property
    def nodes(self) -> Sequence[str]:
        """Those that are there or will be there again."""

    @property
    def next_s(self) -> float:
        """When to call `handle` next."""

    def handle(self, now_s: float, event: Event) -> list[Action]:
        """What happens up to `now_s`, seconds since the job's first start."""


class Market:
    """See the rules at the top of this module.

    Args:
        trace: what is played.
        nodes: how many nodes the job has when nobody takes any (n).
        seed: draws the followed places.
        time_scale: trace seconds per second of the job.
        grace_s: from notice to kill, in the job's seconds (AWS gives 120, GCP and Azure 30).
    """

    def __init__(
        self, *, trace: Trace, nodes: int, seed: int = 0, time_scale: float = 1.0, grace_s: float = 30.0
    ) -> None:
        if not 1 <= nodes <= trace.places:
            raise ValueError(f"nodes must be within 1..{trace.places}, the places of {trace.name}, got {nodes}")
        if not 0 < time_scale < math.inf:
            raise ValueError(f"time_scale must be positive and finite, got {time_scale}")
        if not 0 <= grace_s < math.inf:
            raise ValueError(f"grace_s must be finite and not negative, got {grace_s}")
        places = sorted(seeds.draw(range(trace.places), nodes, "market", seed))
        self._names = {place: f"node{place}" for place in places}
        self._seating = _Seating(trace)
        self._time_scale = time_scale
        self._grace_s = grace_s
        self._moves: deque[tuple[float, str, bool]] = deque()  # what is left of this lap: (time, node, joins)
        self._lap_end_s = 0.0
        self._offered: set[str] = set()  # nodes whose place has one in the trace now
        self._up: set[str] = set()  # nodes that returned and were not killed
        self._kills: deque[tuple[float, str]] = deque()  # under notice, in order of time
        self._noticed: set[str] = set()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the job's nodes: `node` and the number of the place that each follows."""
        return tuple(self._names.values())

    @property
    def next_s(self) -> float:
        """When to call `handle` next; nothing happens before."""
        return min(self._next_move_s, self._next_kill_s)

    def handle(self, now_s: float, event: Event) -> list[Action]:
        """What happens up to `now_s`, seconds since the job's first start.

        Who calls late delays a node's end, but never cuts its grace short.
        """
        match event:
            case Start():
                self._kills.clear()
                self._noticed.clear()
                self._up.clear()
                while self._next_move_s <= now_s:
                    self._next_move()
                return [action for node in self.nodes for action in self._offer(node)]
            case Heard() | Missed():
                return []  # the trace alone decides
            case Tick():
                actions: list[Action] = []
                while self.next_s <= now_s:
                    if self._next_kill_s < self._next_move_s:
                        actions += self._kill()
                    elif node := self._next_move():
                        actions += self._offer(node) if node in self._offered else self._notify(node, now_s)
                return actions

    @property
    def _next_move_s(self) -> float:
        return self._moves[0][0] if self._moves else self._lap_end_s

    @property
    def _next_kill_s(self) -> float:
        return self._kills[0][0] if self._kills else math.inf

    def _next_move(self) -> str | None:
        """Takes the next change of the trace and returns the node that it is about; None: only a lap ended."""
        if not self._moves:
            for time_s, place, joins in self._seating.lap():
                if place in self._names:
                    self._moves.append((time_s / self._time_scale, self._names[place], joins))
            self._lap_end_s = self._seating.end_s / self._time_scale
            return None
        _, node, joins = self._moves.popleft()
        (self._offered.add if joins else self._offered.discard)(node)
        return node

    def _offer(self, node: str) -> list[Action]:
        if node not in self._offered or node in self._up:
            return []
        self._up.add(node)
        return [Return(node)]

    def _notify(self, node: str, now_s: float) -> list[Action]:
        if node not in self._up or node in self._noticed:
            return []
        self._kills.append((now_s + self._grace_s, node))
        self._noticed.add(node)
        return [Notice(node, self._grace_s)]

    def _kill(self) -> list[Action]:
        _, node = self._kills.popleft()
        self._noticed.remove(node)
        self._up.remove(node)
        return [Kill(node), *self._offer(node)]


def replay(*, trace: str | Path, nodes: int, seed: int = 0, time_scale: float = 1.0, grace_s: float = 30.0) -> Market:
    """The market of a trace file; see `Market`.

    Raises:
        TraceError, ValueError, OSError: the file or a number is no good.
    """
    return Market(trace=read_trace(trace, seed=seed), nodes=nodes, seed=seed, time_scale=time_scale, grace_s=grace_s)


class _Seating:
    """Which place each node of a trace takes, lap after lap."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._vacant = deque(range(trace.places))  # longest vacant first
        self._seats: dict[str, int] = {}  # node -> place, in order of joining
        self.end_s = 0.0
        """Where the laps so far end."""

    def lap(self) -> list[tuple[float, int, bool]]:
        """(time, place, joins) of the next time through the trace."""
        start_s = self.end_s
        moves = []
        stay = self._trace.first_nodes
        places = list(self._seats.values())
        self._seats = dict(zip(stay, places, strict=False))
        for place in places[len(stay) :]:
            self._vacant.append(place)
            moves.append((start_s, place, False))
        for node in stay[len(places) :]:
            moves.append((start_s, self._take(node), True))
        for change in self._trace.changes:
            time_s = start_s + change.time_s
            if change.time_s == 0:
                continue  # whoever is there at first was dealt with above
            if change.joins:
                moves.append((time_s, self._take(change.node), True))
            else:
                place = self._seats.pop(change.node)
                self._vacant.append(place)
                moves.append((time_s, place, False))
        self.end_s = start_s + self._trace.duration_s
        return moves

    def _take(self, node: str) -> int:
        self._seats[node] = place = self._vacant.popleft()
        return place


def play(market: Market, until_s: float) -> Iterator[tuple[float, Action]]:
    """Everything that a fresh market does up to `until_s`, each with its exact time."""
    yield from ((0.0, action) for action in market.handle(0.0, Start()))
    while (now_s := market.next_s) <= until_s:
        yield from ((now_s, action) for action in market.handle(now_s, Tick()))


@dataclass(frozen=True)
class Statistics:
    """What a market did within `duration_s` of a job's seconds."""

    duration_s: float
    preemptions: int
    """Kills."""
    present_nodes: float
    """Mean number of nodes that were up (under notice included)."""

    @property
    def preemptions_per_hour(self) -> float:
        return self.preemptions_per(3600.0)

    def preemptions_per(self, seconds: float) -> float:
        """In so many seconds on average, as in five iterations of a job."""
        return self.preemptions * seconds / self.duration_s


def statistics(market: Market, duration_s: float) -> Statistics:
    """Plays a fresh market. At time scale 1 and without grace this is what the trace itself holds.

    Raises:
        ValueError: duration_s is not positive.
    """
    if not 0 < duration_s < math.inf:
        raise ValueError(f"duration_s must be positive and finite, got {duration_s}")
    kills, node_s = 0, 0.0
    for time_s, action in play(market, duration_s):
        match action:
            case Return():
                node_s += duration_s - time_s
            case Kill():
                kills += 1
                node_s -= duration_s - time_s
    return Statistics(duration_s, kills, node_s / duration_s)


def preemption_rate(
    trace: str | Path, *, nodes: int, seed: int, horizon_s: float, iteration_s: float, iterations: int = 5
) -> float:
    """Preemptions per `iterations` iterations of `iteration_s` seconds, in the first `horizon_s` of a job.

    The trace plays at its own pace and starts again where it ends, as for the job; there is no grace.
    """
    market = replay(trace=trace, nodes=nodes, seed=seed, grace_s=0.0)
    return statistics(market, horizon_s).preemptions_per(iterations * iteration_s)


def table(traces: Sequence[Path], nodes: Sequence[int], seed_count: int) -> list[str]:
    """One line per trace: preemptions in one play of it (per hour; mean nodes up), averaged over seeds."""
    header = f"{'trace':32}{'hours':>7}{'places':>8}{'drops':>7}"
    lines = [header + "".join(f"{f'n={n}: drops (/h; up)':>26}" for n in nodes)]
    for path in traces:
        trace = read_trace(path)
        drops = sum(not change.joins for change in trace.changes)
        line = f"{trace.name:32}{trace.duration_s / 3600:7.2f}{trace.places:8}{drops:7}"
        for n in nodes:
            if n > trace.places:
                line += f"{'-':>26}"
                continue
            runs = [
                statistics(replay(trace=path, nodes=n, seed=seed, grace_s=0.0), trace.duration_s)
                for seed in range(seed_count)
            ]
            preemptions = mean(run.preemptions for run in runs)
            rate = mean(run.preemptions_per_hour for run in runs)
            present = mean(run.present_nodes for run in runs)
            line += f"{f'{preemptions:.2f} ({rate:.2f}; {present:.2f})':>26}"
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m src.spot.market", description=table.__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files; those in data/traces by default")
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=20, help="markets per number of nodes")
    options = parser.parse_args(arguments)
    traces = options.traces or sorted([*SHIPPED.glob("*.csv"), *SHIPPED.glob("*.txt")])
    print("\n".join(table(traces, options.nodes, options.seeds)))


if __name__ == "__main__":
    main()
