"""One job whose workers, training rank and coordinator are killed, frozen and sent away, until it is done all the same.

    make test-slow ARGS="tests/chaos/test_everything.py -s"      # -s shows the figures

A seed decides what happens in which iteration, and how long after it begins. The death of the rank or of the
coordinator ends the job; it is then resumed in the same folder. All explorations are waited for, so the policy must be
that of a run that nobody disturbed, to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from benchmarks.conservation import account
from src.core.clock import monotonic_s, sleep_s
from tests.app.processes import JOB, assert_gone, coordinator_of, events, kill, scratch_of, started
from tests.app.runs import Run, assert_same_run, run_inline
from tests.chaos.follower import Follower

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = 3
ITERATIONS = 48
COMMIT_EVERY = 2
LIFE_TIMEOUT_S = 1200.0
HEARTBEAT_TIMEOUT_S = 3.0
LATEST_S = 0.8
"""An event comes at most so long after its iteration has begun."""
LONGEST_PAUSE_S = 2.0
"""A worker that stands still for less than the timeout of its heartbeats is slow, not frozen."""

JOB_ENDS = Counter(rank=3, coordinator=3)
PLAN = Counter(kill=14, notice=10, freeze=8, pause=16) + JOB_ENDS
"""kill, freeze, notice: SIGKILL, SIGSTOP, SIGTERM to a spot worker; pause: SIGSTOP, and SIGCONT a moment later."""

RUN = (
    *JOB,
    "planner.seeds_per_prompt=64",
    "algo.steps=6",
    "algo.eval_steps=6",
    f"trainer.max_steps={ITERATIONS}",
    "callbacks.evaluate.every=8",
    "callbacks.checkpoint.every=2",
)
CLUSTER = (
    "cluster.spot_workers=2",
    "cluster.spares=3",
    f"cluster.commit_every={COMMIT_EVERY}",
    f"cluster.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}",
    "market.grace_s=3",
)


@dataclass(frozen=True)
class Blow:
    """What happens `delay_s` after the beginning of an iteration."""

    iteration: int
    delay_s: float
    what: str


def plan(seed: int) -> deque[Blow]:
    """All blows in order. The first iterations are spared, until there is a checkpoint to go on from."""
    draw = random.Random(seed)
    kinds = list(PLAN.elements())
    draw.shuffle(kinds)
    iterations = sorted(draw.choices(range(2, ITERATIONS - 2), k=len(kinds)))
    return deque(Blow(at, draw.uniform(0, LATEST_S), what) for at, what in zip(iterations, kinds, strict=True))


class Chaos:
    """Follows a job through its lives and deals the blows, each when its iteration is reached and its victim there."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._log = Follower(folder)
        self._planned = plan(seed)
        self._draw = random.Random(f"victims {seed}")
        self.dealt: Counter[str] = Counter()
        self.woken = 0

    def begin(self) -> None:
        """A life begins; whatever is known of the one before is forgotten."""
        self._log.fresh()
        self._pids: dict[str, int] = {}
        self._workers: set[str] = set()  # spot workers that are alive, awake and have had work
        self._stopped: set[str] = set()
        self._paused: list[tuple[float, str]] = []  # when to wake whom
        self._iteration = -1
        self._since_s = 0.0

    def step(self, scratch: Path) -> str | None:
        """Deals what is due; returns `rank` or `coordinator` if that was killed."""
        self._look()
        now_s = monotonic_s()
        for due_s, worker in list(self._paused):
            if due_s <= now_s:
                self._paused.remove((due_s, worker))
                self._stopped.discard(worker)
                self.woken += send(self._pids[worker], signal.SIGCONT)
        while self._planned and self._is_due(blow := self._planned[0], now_s):
            if blow.what not in JOB_ENDS and not self._workers:
                return None  # somebody will come
            self._planned.popleft()
            hit = self._deal(blow.what, scratch, now_s)
            self.dealt[blow.what] += hit
            if hit and blow.what in JOB_ENDS:
                return blow.what
        return None

    def _look(self) -> None:
        for event in self._log.fresh():
            match event["kind"]:
                case "worker_joined":
                    self._pids[event["worker"]] = event["pid"]
                case "lease_granted" if event["worker"].startswith("spot") and event["worker"] not in self._stopped:
                    self._workers.add(event["worker"])
                case "worker_lost":
                    self._workers.discard(event["worker"])
                case "phase_started" if event["iteration"] > self._iteration:
                    self._iteration, self._since_s = event["iteration"], monotonic_s()

    def _is_due(self, blow: Blow, now_s: float) -> bool:
        late = self._iteration > blow.iteration
        return late or (self._iteration == blow.iteration and now_s >= self._since_s + blow.delay_s)

    def _deal(self, what: str, scratch: Path, now_s: float) -> bool:
        """Returns whether the victim was still there."""
        if what == "rank":
            (pid,) = (pid for worker, pid in self._pids.items() if worker.startswith("reserved"))
            return send(pid, signal.SIGKILL)
        if what == "coordinator":
            kill(coordinator_of(scratch, self._folder))
            return True
        worker = self._draw.choice(sorted(self._workers))
        self._workers.remove(worker)
        if what in ("freeze", "pause"):
            self._stopped.add(worker)
        if what == "pause":
            self._paused.append((now_s + self._draw.uniform(0.1, LONGEST_PAUSE_S), worker))
        signals = {"kill": signal.SIGKILL, "notice": signal.SIGTERM}
        return send(self._pids[worker], signals.get(what, signal.SIGSTOP))


def send(pid: int, number: signal.Signals) -> bool:
    """Returns whether there was somebody to get it."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def live(folder: Path, chaos: Chaos, *overrides: str) -> bool:
    """One life of the job. Returns whether it came to its end, and not to that of its rank or coordinator."""
    killed: str | None = None
    chaos.begin()
    deadline_s = monotonic_s() + LIFE_TIMEOUT_S
    with started(folder, *RUN, *CLUSTER, *overrides) as parent:
        scratch = scratch_of(parent.pid)
        while parent.poll() is None:
            assert monotonic_s() < deadline_s, f"after {LIFE_TIMEOUT_S} s the job is stuck"
            killed = killed or chaos.step(scratch)
            sleep_s(0.01)
        _, stderr = parent.communicate()
    assert_gone(scratch)
    assert parent.returncode == (1 if killed else 0), stderr
    if killed:
        assert "ckpt_path=last" in stderr
    return killed is None


def test_a_job_survives_whatever_happens_to_it(tmp_path: Path) -> None:
    folder, chaos = tmp_path / "run", Chaos(tmp_path / "run", SEED)
    done = live(folder, chaos)
    while not done:
        done = live(folder, chaos, "ckpt_path=last")

    log, run = events(folder), Run(folder)
    found = account(log, commit_every=COMMIT_EVERY)
    summary = json.loads((folder / "summary.json").read_text())
    figures = {
        "blows": chaos.dealt.total(),
        **chaos.dealt,
        "woken": chaos.woken,
        "workers_lost": Counter(event["reason"] for event in log if event["kind"] == "worker_lost"),
        "leases_lost_by_kind": Counter(e["request_kind"] for e in log if e["kind"] == "lease_lost" and e["count"]),
        **asdict(found),
        "wall_s": summary["wall_s"],
    }
    print(json.dumps(figures))

    assert chaos.dealt.total() >= 50
    assert found.problems == ()
    assert found.lives == 1 + JOB_ENDS.total()
    assert min(found.leases_lost, found.leases_resumed, found.repeated_steps) > 0
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("done", ITERATIONS, JOB_ENDS.total())
    assert summary["repeated_iterations"] == found.repeated_iterations
    assert summary["failed_samples"] == 0
    assert [row["step"] for row in run.metrics if "train/reward" in row] == list(range(1, ITERATIONS + 1))
    assert all(event["dropped"] == 0 for event in run.events("closed"))
    assert_same_run(run, run_inline(tmp_path / "undisturbed", *RUN))
