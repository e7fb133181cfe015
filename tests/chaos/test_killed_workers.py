"""kill -9 of spot workers, spread over every phase of twenty debug runs.

    make test-slow ARGS="tests/chaos -s"      # -s shows the figures

The run's number decides when a worker is killed: after a spot worker gets a lease of the phase's kind. Phases: rollout,
evaluation, audit, exploration, and no work at all (a worker has joined). All requests are waited for, so what a run
comes to must be what it comes to when nobody is killed, to the last bit.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conservation import account
from src.core.clock import monotonic_s, sleep_s
from tests.app.processes import EAGER, assert_gone, events, kill, scratch_of, started
from tests.app.runs import Run, assert_same_run, run_inline
from tests.chaos.follower import Follower

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

RUNS = 20
RUN_TIMEOUT_S = 300.0
COMMIT_EVERY = 5
PHASES = ("rollout", "eval", "audit", "explore", "idle")
LATEST_S = 0.1
"""An exploring or idle worker is killed at most so long after its event was logged; others, whose leases are few and
short, at once."""
SHOTS = 3
"""Attempts to kill a worker before it is done with a lease of the phase."""


@dataclass(frozen=True)
class Trigger:
    """Kill the worker that event number `nth` (from 0) of `phase` names, `delay_s` later; if it was faster, one that a
    later event names."""

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
        Trigger(
            phase,
            nth=draw.randrange(3) if phase == "explore" else 0,
            delay_s=draw.uniform(0, LATEST_S) if phase in ("explore", "idle") else 0.0,
        )
        for phase in phases
    ]


class Killer:
    """Follows the event log of a run and kills as the triggers say."""

    def __init__(self, folder: Path, planned: Sequence[Trigger]) -> None:
        self._log = Follower(folder)
        self._planned = [(trigger, trigger.nth, SHOTS) for trigger in planned]
        self._hit: set[str] = {"idle"}  # phases in which no further shot is needed
        self._due: list[tuple[float, str]] = []
        self._pids: dict[str, int] = {}
        self.kills = 0

    def step(self) -> None:
        for event in self._log.fresh():
            if event["kind"] == "worker_joined":
                self._pids[event["worker"]] = event["pid"]
            if event["kind"] == "lease_lost" and event["reason"] == "killed":
                self._hit.add(event["request_kind"])
            for index, (trigger, left, shots) in enumerate(self._planned):
                if trigger.matches(event):
                    fires = left <= 0 and (shots == SHOTS or (shots > 0 and trigger.phase not in self._hit))
                    self._planned[index] = (trigger, left - 1, shots - fires)
                    if fires:
                        self._due.append((monotonic_s() + trigger.delay_s, event["worker"]))
        now_s = monotonic_s()
        for _, worker in [due for due in self._due if due[0] <= now_s]:
            try:
                kill(self._pids[worker])
            except ProcessLookupError:
                continue  # the other trigger was faster
            self.kills += 1
        self._due = [due for due in self._due if due[0] > now_s]


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    returncode: int
    stderr: str
    kills: int
    hits: Counter[str]
    """Leases that were lost by a kill, by the kind of their requests."""
    steps: int


def chaos_run(folder: Path, number: int) -> Outcome:
    killer = Killer(folder, triggers(number))
    with started(folder, "debug=fast", EAGER, f"cluster.commit_every={COMMIT_EVERY}", f"seed={number}") as parent:
        scratch = scratch_of(parent.pid)
        deadline_s = monotonic_s() + RUN_TIMEOUT_S
        while parent.poll() is None and monotonic_s() < deadline_s:
            killer.step()
            sleep_s(0.005)
        returncode = -1 if parent.poll() is None else parent.returncode
        parent.kill()
        _, stderr = parent.communicate()
    assert_gone(scratch)
    lost = [e for e in events(folder) if e["kind"] == "lease_lost" and e["reason"] == "killed"]
    summary = folder / "summary.json"
    steps = json.loads(summary.read_text())["steps"] if summary.is_file() else 0
    hits = Counter(event["request_kind"] for event in lost)
    return Outcome(returncode, stderr, killer.kills, hits, steps)


def assert_each_counts_once(log: list[dict[str, Any]]) -> None:
    """Whatever was submitted was accepted, and all that was explored is there to choose from."""
    found = account(log, commit_every=COMMIT_EVERY)
    assert found.problems == ()
    assert all(event["dropped"] == 0 for event in log if event["kind"] == "closed")
    asked: Counter[tuple[str, int]] = Counter()
    for event in (event for event in log if event["kind"] == "submitted"):
        asked[event["request_kind"], event["iteration"]] += event["count"]
    for event in (event for event in log if event["kind"] == "explored"):
        assert len({(row["instance"], row["seed"]) for row in event["results"]}) == len(event["results"])
        assert len(event["results"]) == asked["explore", event["iteration"]]
    assert {kind for kind, _ in asked} == set(PHASES) - {"idle"}


def assert_same_as_unharmed(killed: Run, unharmed: Run) -> None:
    """Rewards, kept seeds, weights: lost work was made again or went on, and counts as if nothing had happened."""
    for kind, field in (("explored", "results"), ("kept", "seeds"), ("audited", "pairs")):
        assert [e[field] for e in killed.events(kind)] == [e[field] for e in unharmed.events(kind)]
    assert_same_run(killed, unharmed)


def test_twenty_runs_survive_the_loss_of_their_workers(tmp_path: Path) -> None:
    outcomes = []
    for number in range(RUNS):
        folder = tmp_path / f"run{number}"
        outcomes.append(chaos_run(folder, number))
        print(f"run {number}: {outcomes[-1]}")
        assert (outcomes[-1].returncode, outcomes[-1].steps) == (0, 2), outcomes[-1].stderr
        assert_each_counts_once(events(folder))
        unharmed = run_inline(tmp_path / f"unharmed{number}", "debug=fast", f"seed={number}")
        assert_same_as_unharmed(Run(folder), unharmed)
    hits = sum((outcome.hits for outcome in outcomes), Counter())
    figures = {
        "runs": RUNS,
        "kills": sum(outcome.kills for outcome in outcomes),
        "leases_hit": hits.total(),
        "leases_hit_by_kind": dict(hits),
    }
    print(json.dumps(figures))
    assert hits.total() >= 15
    assert set(hits) == set(PHASES) - {"idle"}
