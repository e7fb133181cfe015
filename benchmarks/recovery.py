"""How fast a team of spot workers recovers from the loss of a member, and how fast it grows.

python -m benchmarks.recovery [--sizes 20MB 1GB] [--events 50] [--restarts 50]      # over an hour in all

A real fleet: Ray, coordinator, and three workers of the tiny model that share sequences, and have work when something
happens. The weights (trained ones, published by the trainer, and frozen ones in the model's folder) are filled up with
ballast to 20 MB and to 1 GB each. Everything has the same two end points, by the clock of the machine: all members of
the new generation have done a collective, and its leader has made a denoising step (of the lease that was interrupted).

    killed, warned   SIGKILL, SIGTERM of a random member at a random moment, until the others go on
    frozen           SIGSTOP: bounded by `heartbeat_timeout_s`, here 2 s; its successor may come at once
    warm             from when a spare, with its libraries and weights in memory, is told to join, until all three go on
    behind           the same, while it does not hold the published weights yet: it then copies them from the files
                     that its siblings have read
    pause            how long those who are there make no step while somebody joins
    new              the same from when its process is started, frozen weights included
    cold             all three are killed: until all three go on, after new processes, imports, model build, weights
                     and group, as systems without elastic groups do it

Kills meet a team whose spare is warm, notices one whose spare is behind.

Weights alone (`copy`): files that a sibling has read (they are in the node's page cache, which all processes share),
against files that are not in memory and come no faster than a network of 10 and 25 Gbit/s; checked and copied alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.job import quiet, resolved
from benchmarks.output import print_figures, say
from src.app.config import Config, task
from src.app.job import LOOPBACK_ONLY, make_store
from src.app.sampling import build_team_engine, build_worker_engine
from src.core.clock import monotonic_s, sleep_s
from src.core.events import JsonLines
from src.core.protocols import OnStep, never, unwatched
from src.core.types import (
    Commit,
    Generation,
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
    SampleSpec,
    WorkReport,
)
from src.models.adapter import DiTAdapter, state_checksum
from src.parallel.team_engine import ElasticEngine
from src.spot.client import RayCluster
from src.spot.coordinator import Coordinator
from src.spot.fleet import Fleet
from src.spot.members import LOCAL
from src.spot.process import Process, WorkerSettings
from src.spot.scheduler import Scheduler
from src.spot.session import ray

TEAM = 3
HEARTBEAT_TIMEOUT_S = 2.0
BATCH_SIZE = 4
OVERRIDES = ["experiment=tiny_text", f"model.batch_size={BATCH_SIZE}", f"cluster.sp_degree={TEAM}"]
SPEC = SampleSpec(steps=100)
LEASES, MANY_LEASES = 3, 60
"""That a team is given for each event: nothing to do while a spare starts, enough to do until a new process has."""
SETTLED_STEPS = 5
"""Of them, after which the blow may fall."""
PATIENCE_S = 300.0
POLL_S = 0.002
BALLAST = "ballast.safetensors"
POLICY = PolicyVersion(0, 0)


class Traced(ElasticEngine):
    """Writes down when its group has done a collective, and when it has made a step as the leader of one."""

    def __init__(self, inner: ElasticEngine, folder: Path) -> None:
        self.__dict__.update(inner.__dict__)
        self._trace = JsonLines(folder / f"{os.getpid()}.jsonl")
        self._number = 0

    def form(self, team: str, generation: Generation, rank: int, **arguments: Any) -> None:
        super().form(team, generation, rank, **arguments)
        self._number = generation.number
        if self._group is not None:
            self._group.sum(torch.ones(1))
        self._note("collective")

    def serve(
        self,
        requests: Sequence[SampleRequest],
        worker: str,
        *,
        resume: Sequence[Commit] = (),
        commit_every: int = 0,
        on_step: OnStep = unwatched,
        should_yield: Callable[[], bool] = never,
    ) -> tuple[list[SampleResult], WorkReport]:
        def told(step: int, commits: Sequence[Commit]) -> None:
            self._note("step")
            on_step(step, commits)

        return super().serve(
            requests, worker, resume=resume, commit_every=commit_every, on_step=told, should_yield=should_yield
        )

    def _note(self, what: str) -> None:
        self._trace.append({"at_s": monotonic_s(), "what": what, "generation": self._number})


def make_engine(config: Config, folder: Path, ballast: int) -> ElasticEngine:
    """In a worker's process."""
    os.environ.update(LOOPBACK_ONLY)
    engine = build_team_engine(config)
    load_down(engine._engine._adapter, folder, ballast)  # type: ignore[attr-defined]
    return Traced(engine, folder)


def load_down(adapter: DiTAdapter, folder: Path, ballast: int) -> None:
    """Adds frozen weights from a file and as many trained ones."""
    frozen = load_file(folder / BALLAST)["ballast"].clone()
    adapter.transformer.register_buffer("frozen_ballast", frozen)
    adapter.transformer.register_parameter("ballast", nn.Parameter(torch.zeros(ballast // 4)))


def make_coordinator(folder: Path) -> Coordinator:
    scheduler = Scheduler(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    return Coordinator(run="run", folder=folder, scheduler=scheduler, store=make_store())


class NotedFleet(Fleet):
    """Remembers when processes were started, and when they were told whom to be."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.started_s: dict[Process, float] = {}
        self.told: dict[str, tuple[float, str]] = {}
        self.keeps_up = True
        """Whether spares load what is published."""

    def _update_spares(self) -> None:
        if self.keeps_up:
            super()._update_spares()

    def _process(self, node: str) -> Process:
        at_s = monotonic_s()
        process = super()._process(node)
        self.started_s[process] = at_s
        return process

    def _run(self, slot: Any) -> None:
        self.told[slot.member.name] = monotonic_s(), "warm" if slot.process.has_caught_up else "behind"
        super()._run(slot)

    def pid(self, member: str) -> int:
        (slot,) = (slot for slot in list(self._slots.values()) if slot.member.name == member)
        return int(ray.get(slot.process._pid))

    @property
    def has_spares(self) -> bool:
        return self._spares_wanted > 0

    def ready(self) -> bool:
        """Whether all spares that are wanted are there, and hold what they are to hold."""
        spares = list(self._spares)
        return len(spares) == self._spares_wanted and all(
            spare.is_ready and (spare.has_caught_up or not self.keeps_up) for spare in spares
        )


class Bench:
    """A team at work, and what is seen of it."""

    def __init__(self, fleet: NotedFleet, cluster: RayCluster, prompt: Prompt, folder: Path, seed: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(seed)
        self._cluster = cluster
        self._prompt = prompt
        self._seeds = itertools.count()
        self._folder = folder
        self._files: dict[Path, int] = {}
        self._generations: list[dict[str, Any]] = []
        self._traces: dict[tuple[str, int], list[float]] = {}

    def generations(self) -> list[dict[str, Any]]:
        self._generations += [event for event in self._fresh("events.jsonl") if event["kind"] == "regrouped"]
        return self._generations

    def traces(self, what: str, generation: int) -> list[float]:
        """Times of one kind in one generation, in order."""
        for row in self._fresh("[0-9]*.jsonl"):
            self._traces.setdefault((row["what"], row["generation"]), []).append(row["at_s"])
        return sorted(self._traces.get((what, generation), []))

    def _fresh(self, pattern: str) -> Iterator[dict[str, Any]]:
        """What was appended to these files since they were looked at."""
        for path in self._folder.glob(pattern):
            begin = self._files.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._files[path] = begin + whole
            yield from map(json.loads, data[:whole].splitlines())

    def settled(self) -> dict[str, Any]:
        """Waits for a whole team and the spares, and gives the team some leases; returns when it has made some steps
        of them."""

        def whole() -> dict[str, Any] | None:
            found = self.generations()
            return found[-1] if found and len(found[-1]["members"]) == TEAM and self.fleet.ready() else None

        generation: dict[str, Any] = wait_for(whole)
        made = len(self.traces("step", generation["generation"]))
        leases = LEASES if self.fleet.has_spares else MANY_LEASES
        seeds = itertools.islice(self._seeds, leases * BATCH_SIZE)
        keys = [RequestKey("run", 1, RequestKind.EXPLORE, 0, seed, POLICY, SPEC.steps) for seed in seeds]
        self._cluster.submit([SampleRequest(key, self._prompt, SPEC) for key in keys])
        wait_for(
            lambda: (
                len(self.traces("step", generation["generation"])) >= made + SETTLED_STEPS
                or self.generations()[-1] != generation
            )
        )
        if self.generations()[-1] != generation:  # somebody was taken for frozen
            return self.settled()
        sleep_s(self.rng.uniform(0.0, 0.3))
        return generation

    def next(self, after: int, size: int | None = None) -> tuple[dict[str, Any], float, float]:
        """The first generation later than `after` (with so many members) that works, and its two end points."""

        def look() -> tuple[dict[str, Any], float, float] | None:
            for found in self.generations():
                number, members = found["generation"], len(found["members"])
                if number > after and size in (None, members):
                    collectives, steps = self.traces("collective", number), self.traces("step", number)
                    if len(collectives) == members and steps:
                        return found, collectives[-1], steps[0]
            return None

        return wait_for(look)


def wait_for(look: Callable[[], Any]) -> Any:
    deadline_s = monotonic_s() + PATIENCE_S
    while not (found := look()):
        if monotonic_s() > deadline_s:
            raise TimeoutError(f"nothing happened for {PATIENCE_S} s")
        sleep_s(POLL_S)
    return found


Times = dict[str, list[tuple[float, float]]]
"""By kind of event, pairs: seconds to the first collective, and to the first step."""


def blow(bench: Bench, number: signal.Signals, name: str, times: Times) -> None:
    """One member is struck; the others go on; another process takes its place."""
    before = bench.settled()
    victim = bench.rng.choice(before["members"])
    pid, known = bench.fleet.pid(victim), set(bench.fleet.started_s)
    at_s = monotonic_s()
    os.kill(pid, number)
    _, collective_s, step_s = bench.next(before["generation"])
    times.setdefault(name, []).append((collective_s - at_s, step_s - at_s))
    whole, collective_s, step_s = bench.next(before["generation"], TEAM)
    paused_s = max(bench.traces("step", whole["generation"] - 1), default=None)
    if paused_s is not None:
        times.setdefault("pause", []).append((collective_s - paused_s, step_s - paused_s))
    (newcomer,) = set(whole["members"]) - set(before["members"])
    if bench.fleet.has_spares:
        at_s, joined = bench.fleet.told[newcomer]
    else:
        (process,) = set(bench.fleet.started_s) - known
        at_s, joined = bench.fleet.started_s[process], "new"
    times.setdefault(joined, []).append((collective_s - at_s, step_s - at_s))
    say(f"{name}: {times[name][-1]}, {joined}: {times[joined][-1]}")


def restart(bench: Bench, times: Times) -> None:
    """All members are killed and start anew."""
    before = bench.settled()
    pids = [bench.fleet.pid(member) for member in before["members"]]
    at_s = monotonic_s()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _, collective_s, step_s = bench.next(before["generation"], TEAM)
    times.setdefault("cold", []).append((collective_s - at_s, step_s - at_s))
    say(f"cold: {times['cold'][-1]}")


@contextmanager
def team(config: Config, ballast: int, *, spares: int, seed: int) -> Iterator[Bench]:
    """A fleet with one team."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file({"ballast": torch.zeros(ballast // 4)}, folder / BALLAST)
        own = build_worker_engine(config)
        load_down(own._adapter, folder, ballast)
        fleet = NotedFleet(
            coordinator=partial(make_coordinator, folder),
            engine=partial(make_engine, config, folder, ballast),
            spot_workers=TEAM,
            settings=WorkerSettings(niceness=0, commit_every=1),
            spares=spares,
            teams={(LOCAL, slot): "sp0" for slot in range(TEAM)},
        )
        with fleet:
            fleet.start()
            cluster = RayCluster(fleet.host, engine=own)
            cluster.publish(POLICY, own.save_weights)
            yield Bench(fleet, cluster, task(config).train_prompts[0], folder, seed)


def measure(ballast: int, *, kills: int, notices: int, freezes: int, restarts: int) -> Times:
    config, times = resolved(OVERRIDES), Times()
    with team(config, ballast, spares=1, seed=0) as bench:
        for number, name, count in (
            (signal.SIGKILL, "killed", kills),
            (signal.SIGTERM, "warned", notices),
            (signal.SIGSTOP, "frozen", freezes),
        ):
            bench.fleet.keeps_up = name != "warned"
            for _ in range(count):
                blow(bench, number, name, times)
    with team(config, ballast, spares=0, seed=1) as bench:
        for _ in range(restarts):
            blow(bench, signal.SIGKILL, "killed before new", times)
            restart(bench, times)
    return times


def summary(times: Times) -> dict[str, Any]:
    """Median and 95th percentile of both end points."""

    def figures(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
        ends = {"collective_s": [pair[0] for pair in pairs], "step_s": [pair[1] for pair in pairs]}
        return {"events": len(pairs), **{name: percentiles(values) for name, values in ends.items()}}

    return {name: figures(pairs) for name, pairs in times.items()}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
    return {"p50": cuts[9], "p95": cuts[18], "largest": max(values)}


# Weights alone

CHUNK = 8 * 2**20


def copies(size: int, repetitions: int) -> dict[str, Any]:
    """Seconds until weights of so many bytes are in a model, checked."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        path = Path(name) / "weights.safetensors"
        state = {"ballast": torch.rand(size // 4)}
        checksum = state_checksum(state)
        save_file(state, path)

        def load() -> None:
            for tensor, given in zip(state.values(), load_file(path).values(), strict=True):
                tensor.copy_(given)
            assert state_checksum(state) == checksum

        def over(gbit_per_s: float) -> Callable[[], None]:
            def load_over() -> None:
                evict(path)
                receive(path, gbit_per_s)
                load()

            return load_over

        ways = {"sibling": load, "network": over(float("inf")), "network_25": over(25.0), "network_10": over(10.0)}
        return {way: percentiles([seconds(run) for _ in range(repetitions)]) for way, run in ways.items()}


def evict(path: Path) -> None:
    """Has the system forget what it knows of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def receive(path: Path, gbit_per_s: float) -> None:
    """Reads a file no faster than a network would bring it."""
    begun_s, got = monotonic_s(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            got += len(chunk)
            sleep_s(max(0.0, begun_s + got / (gbit_per_s * 1e9 / 8) - monotonic_s()))


def seconds(run: Callable[[], None]) -> float:
    begun_s = monotonic_s()
    run()
    return monotonic_s() - begun_s


SIZES: Mapping[str, int] = {"20MB": 15 * 10**6, "1GB": 10**9}
"""Bytes of ballast: the tiny model has 5 MB of weights."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of the weights")
    parser.add_argument("--events", type=int, default=50, help="kills, and as many notices, at each size")
    parser.add_argument("--restarts", type=int, default=50, help="new processes and cold restarts, at each size")
    parser.add_argument("--quick", action="store_true", help="one event of each kind, at the first size: a test")
    options = parser.parse_args(arguments)
    quiet()
    torch.set_num_threads(1)
    events, restarts = (1, 1) if options.quick else (options.events, options.restarts)
    kinds = {"kills": events, "notices": events, "freezes": max(1, events // 10), "restarts": restarts}
    figures: dict[str, Any] = {}
    for name in options.sizes[: 1 if options.quick else None]:
        say(f"{name}, {SIZES[name]} bytes of ballast")
        recovery = summary(measure(SIZES[name], **kinds))
        figures[name] = {**recovery, "copy": copies(SIZES[name], 3 if options.quick else 10)}
    print_figures("recovery", {"team": TEAM, "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, **figures})


if __name__ == "__main__":
    main()
