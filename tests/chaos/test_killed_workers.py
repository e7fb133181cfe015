"""kill -9 of spot workers, spread over every phase of twenty debug runs.

    make test-slow ARGS="tests/chaos -s"      # -s shows the figures

The run's number decides when a worker is killed: a random moment after a spot worker gets a lease of the phase's kind
(of all kinds other than exploration there are but one or two in a debug run). Phases: rollout, evaluation, audit,
exploration, and no work at all (a worker has joined).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from src.core.clock import monotonic_s, sleep_s
from tests.app.processes import EAGER, assert_gone, events, kill, scratch_of, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

RUNS = 20
RUN_TIMEOUT_S = 300.0
PHASES = ("rollout", "eval", "audit", "explore", "idle")
LATEST_S = 0.1
"""A worker is killed at most so long after its lease was logged."""


@dataclass(frozen=True)
class Trigger:
    """Kill the worker that event number `nth` (from 0) of `phase` names, `delay_s` later."""

    phase: str
    nth: int
    delay_s: float

    def matches(self, event: dict[str, Any]) -> bool:
        if self.phase == "idle":
            return event["kind"] == "worker_joined" and event["role"] == "spot"
        return (
            event["kind"] == "lease_granted"
            and event["request_kind"] == self.phase
            and event["worker"].startswith("spot")
        )


def triggers(run: int) -> list[Trigger]:
    """Two phases of the five, in turn, so that each is aimed at in eight of twenty runs."""
    draw = random.Random(run)
    phases = (PHASES[run % 5], PHASES[(run + 1 + run // 5 % 4) % 5])
    return [
        Trigger(phase, draw.randrange(3) if phase == "explore" else 0, draw.uniform(0, LATEST_S)) for phase in phases
    ]


class Killer:
    """Follows the event log of a run and kills as the triggers say."""

    def __init__(self, folder: Path, planned: Sequence[Trigger]) -> None:
        self._folder = folder
        self._planned = [(trigger, trigger.nth) for trigger in planned]
        self._due: list[tuple[float, str]] = []
        self._pids: dict[str, int] = {}
        self._seen = 0
        self.kills = 0

    def step(self) -> None:
        for event in self._fresh():
            if event["kind"] == "worker_joined":
                self._pids[event["worker"]] = event["pid"]
            for index, (trigger, left) in enumerate(self._planned):
                if trigger.matches(event):
                    self._planned[index] = (trigger, left - 1)
                    if left == 0:
                        self._due.append((monotonic_s() + trigger.delay_s, event["worker"]))
        now_s = monotonic_s()
        for _, worker in [due for due in self._due if due[0] <= now_s]:
            try:
                kill(self._pids[worker])
            except ProcessLookupError:
                continue  # the other trigger was faster
            self.kills += 1
        self._due = [due for due in self._due if due[0] > now_s]

    def _fresh(self) -> Iterator[dict[str, Any]]:
        log = events(self._folder)
        fresh, self._seen = log[self._seen :], len(log)
        yield from fresh


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    returncode: int
    stderr: str
    kills: int
    hits: Counter[str]
    """Leases that were lost by a kill, by the kind of their requests."""
    twice: int
    """Explored seeds that count more than once."""
    steps: int


def chaos_run(folder: Path, number: int) -> Outcome:
    killer = Killer(folder, triggers(number))
    with started(folder, "debug=fast", EAGER, f"seed={number}") as parent:
        scratch = scratch_of(parent.pid)
        deadline_s = monotonic_s() + RUN_TIMEOUT_S
        while parent.poll() is None and monotonic_s() < deadline_s:
            killer.step()
            sleep_s(0.005)
        returncode = -1 if parent.poll() is None else parent.returncode
        parent.kill()
        _, stderr = parent.communicate()
    assert_gone(scratch)
    log = events(folder)
    lost = [e for e in log if e["kind"] == "lease_lost" and e["reason"] == "killed"]
    twice = 0
    for event in log:
        if event["kind"] == "explored":
            twice += sum(n - 1 for n in Counter((r["instance"], r["seed"]) for r in event["results"]).values())
    summary = folder / "summary.json"
    steps = json.loads(summary.read_text())["steps"] if summary.is_file() else 0
    hits = Counter(event["request_kind"] for event in lost)
    return Outcome(returncode, stderr, killer.kills, hits, twice, steps)


def test_twenty_runs_survive_the_loss_of_their_workers(tmp_path: Path) -> None:
    outcomes = []
    for number in range(RUNS):
        outcomes.append(chaos_run(tmp_path / f"run{number}", number))
        print(f"run {number}: {outcomes[-1]}")
    hits = sum((outcome.hits for outcome in outcomes), Counter())
    figures = {
        "runs": RUNS,
        "finished": sum(outcome.returncode == 0 and outcome.steps == 2 for outcome in outcomes),
        "kills": sum(outcome.kills for outcome in outcomes),
        "leases_hit": hits.total(),
        "leases_hit_by_kind": dict(hits),
        "seeds_counted_twice": sum(outcome.twice for outcome in outcomes),
    }
    print(json.dumps(figures))
    assert figures["finished"] == RUNS, [o.stderr for o in outcomes if o.returncode]
    assert figures["seeds_counted_twice"] == 0
    assert hits.total() >= 15
    assert len(hits) >= 3  # not in one phase alone
