"""How fast the scheduler decides, how much memory it takes, and what commits cost.

python -m benchmarks.scheduler            # 1,000,000 requests for each number of workers; a few minutes
python -m benchmarks.scheduler --quick

events_per_s      calls of `Scheduler.handle` (pull, commits, results, heartbeats, submit, close) per second of CPU;
                  leases of one request, each committed once; every hundredth worker is lost and comes back
bytes_per_request of the scheduler's own state, for requests that are all queued or leased; the requests themselves
                  are made before
commit_overhead   seconds per denoising step at k=1 above k=0, in alternate leases of one worker that talks to a real
                  coordinator over Ray: the tiny model, and an engine of 100 ms per step with latents of 1 MiB, which
                  is what a 1024 x 1024 picture of Qwen-Image has
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.output import print_figures, say
from src.core.clock import cpu_s, monotonic_s, sleep_s
from src.core.events import read_jsonl
from src.core.protocols import Engine, OnStep, never, unwatched
from src.core.types import (
    Blob,
    Commit,
    Lease,
    Member,
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
    SampleSpec,
    Trajectory,
    WorkReport,
)
from src.spot import messages as m
from src.spot.coordinator import Coordinator
from src.spot.scheduler import Scheduler

POLICY = PolicyVersion(0, 0)
SPEC = SampleSpec(steps=10, stochastic_steps=(1, 2))
BATCH = 1
"""Requests per lease: with more, an event does more."""
NOTHING = Blob("float32", (0,), b"")
NO_PATH = Trajectory(NOTHING, NOTHING, NOTHING, "fake")
PROMPT = Prompt(0, "a red circle")


def requests(first: int, count: int, kind: RequestKind = RequestKind.EXPLORE) -> list[SampleRequest]:
    keys = [RequestKey("run", 0, kind, 0, seed, POLICY, SPEC.steps) for seed in range(first, first + count)]
    return [SampleRequest(key, PROMPT, SPEC) for key in keys]


# The pure scheduler


class Load:
    """Workers that pull, commit and push, each in turn, until all requests are done.

    `in_flight` requests are open at a time. Only the CPU time inside `handle` counts.
    """

    def __init__(self, workers: int, total: int) -> None:
        self.scheduler = Scheduler(heartbeat_timeout_s=1e9, lease_s=1e9, lease_target_s=0.0)
        self.total = total
        self.in_flight = min(total, max(10_000, 2 * BATCH * workers))
        self.events = 0
        self.busy_s = 0.0
        self.accepted = 0
        self.lives = 0
        self.tell(m.Publish(POLICY, "w"))
        self.names = [self.join() for _ in range(workers)]

    def tell(self, event: m.Event) -> list[m.Action]:
        started_s = cpu_s()
        actions = self.scheduler.handle(float(self.events), event)
        self.busy_s += cpu_s() - started_s
        self.events += 1
        return actions

    def join(self) -> str:
        member = Member("n", self.lives)
        self.lives += 1
        self.tell(m.Join(member, BATCH))
        return member.name

    def run(self) -> float:
        """Events per second."""
        for first in range(0, self.total, self.in_flight):
            batch = requests(first, min(self.in_flight, self.total - first))
            self.tell(m.Submit(batch))
            while self.scheduler.unfinished:
                for place in range(len(self.names)):
                    self.turn(place)
            self.tell(m.Close([request.key for request in batch]))
        assert self.accepted == self.total
        return self.events / self.busy_s

    def turn(self, place: int) -> None:
        """One lease of one worker; every hundredth is lost half-way."""
        worker = self.names[place]
        grants = [action for action in self.tell(m.Pull(worker)) if isinstance(action, m.Grant)]
        self.tell(m.Heartbeat(worker))
        if not grants:
            self.tell(m.Withdraw(worker))
        for grant in grants:
            lease = grant.lease
            self.tell(m.Commits(worker, lease.id, 5, [Commit(r.key, 5, NOTHING, NO_PATH, "w") for r in lease.requests]))
            if lease.id % 100 == 99 and not lease.resume:
                self.tell(m.Leave(worker, "killed"))
                self.names[place] = self.join()
            else:
                made = [SampleResult(request.key, worker, "w", reward=1.0) for request in lease.requests]
                self.accepted += len(
                    [a for a in self.tell(m.Results(worker, lease.id, made)) if isinstance(a, m.Accept)]
                )


def bytes_per_request(in_flight: int, workers: int) -> float:
    """Memory of a scheduler with so many open requests, a lease at every worker."""
    batch = requests(0, in_flight)
    gc.collect()
    tracemalloc.start()
    scheduler = Scheduler(lease_target_s=0.0)
    scheduler.handle(0.0, m.Publish(POLICY, "w"))
    scheduler.handle(0.0, m.Submit(batch))
    for slot in range(workers):
        scheduler.handle(0.0, m.Join(Member("n", slot), BATCH))
        scheduler.handle(0.0, m.Pull(Member("n", slot).name))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / in_flight


# Commits on the real driver


class SteppingEngine:
    """Sleeps `step_s` for every step; its latents have `latent_bytes`."""

    fingerprint = "stepping"
    batch_size = 1

    def __init__(self, *, step_s: float, latent_bytes: int) -> None:
        self._step_s = step_s
        self._latent_bytes = latent_bytes

    def load_weights(self, folder: Path) -> str:
        return "w"

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
        started_s = monotonic_s()
        steps = requests[0].spec.steps
        for step in range(1, steps + 1):
            sleep_s(self._step_s)
            commits = []
            if commit_every and step % commit_every == 0:
                latents = os.urandom(16) * (self._latent_bytes // 16)  # a copy from the device, each time
                blob = Blob("float32", (len(latents) // 4,), latents)
                commits = [Commit(request.key, step, blob, NO_PATH, "w") for request in requests]
            on_step(step, commits)
        report = WorkReport(monotonic_s() - started_s, 0.0, 0.0, len(requests) * steps)
        return [SampleResult(request.key, worker, "w", reward=1.0) for request in requests], report


def stepping() -> tuple[Engine, list[SampleRequest], str]:
    return SteppingEngine(step_s=0.1, latent_bytes=2**20), requests(0, 1), "w"


def tiny() -> tuple[Engine, list[SampleRequest], str]:
    """The default experiment's model, with rollouts of a full batch."""
    from benchmarks.job import resolved
    from src.app.config import task
    from src.app.sampling import build_worker_engine

    config = resolved(["experiment=tiny_text", "logger=none"])
    engine = build_worker_engine(config)
    spec = SampleSpec(config["algo"]["steps"], (0, 1, 2, 3))
    prompt = task(config).train_prompts[0]
    keys = [RequestKey("run", 0, RequestKind.ROLLOUT, 0, s, POLICY, spec.steps) for s in range(engine.batch_size)]
    return engine, [SampleRequest(key, prompt, spec) for key in keys], engine.weights_changed()


def make_coordinator(folder: Path) -> Coordinator:
    return Coordinator(run="run", folder=folder, scheduler=Scheduler(heartbeat_timeout_s=1e9))


def commit_overhead(build: Callable[[], tuple[Engine, list[SampleRequest], str]], leases: int) -> dict[str, float]:
    """Medians of seconds per pass and step, with and without commits."""
    from src.spot.client import RayTransport, call
    from src.spot.fleet import Fleet
    from src.spot.worker import Worker

    engine, made, checksum = build()
    folder = Path(tempfile.mkdtemp())
    with Fleet(coordinator=partial(make_coordinator, folder), engine=lambda: engine, spot_workers=0) as fleet:
        fleet.start()
        host, transport = fleet.host, RayTransport(fleet.host)
        call(host.publish, POLICY, checksum, 0, 0.0)
        workers = []
        for k in (0, 1):
            workers.append(Worker(member=Member("n", k), engine=engine, transport=transport, commit_every=k))
            workers[k].join()
            workers[k]._held = POLICY  # nothing is published: the engine has its weights
        for _ in range(leases):
            for worker in workers:
                call(host.submit, made)
                lease: Lease | None = transport.pull(worker.name)
                assert lease is not None
                worker.serve(lease)
                call(host.close, [request.key for request in made], 0.0)
    return per_step(read_jsonl(folder / "events.jsonl"), len(made))


def per_step(events: Iterator[dict[str, Any]], rows: int) -> dict[str, float]:
    done: dict[str, list[float]] = {}
    for event in events:
        if event["kind"] == "lease_done":
            done.setdefault(event["worker"], []).append(event["denoise_s"] * rows / event["steps"])
    without, with_commits = (median(done[Member("n", k).name][1:]) for k in (0, 1))  # the first of each warms up
    extra = [b - a for a, b in zip(done[Member("n", 0).name][1:], done[Member("n", 1).name][1:], strict=True)]
    return {"step_s": without, "committing_step_s": with_commits, "share": median(extra) / without}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10,000 requests, few leases")
    parser.add_argument("--requests", type=int, default=1_000_000, help="for each number of workers")
    options = parser.parse_args()
    quick = options.quick
    total = 10_000 if quick else options.requests
    figures: dict[str, Any] = {"requests": total, "workers": {}}
    for workers in (10, 1_000, 10_000):
        load = Load(workers, total)
        rate = load.run()
        figures["workers"][workers] = {"events_per_s": rate, "events": load.events}
        say(f"{workers} workers: {rate:,.0f} events/s ({load.events:,} events)")
    sizes = (1_000, 10_000) if quick else (10_000, 100_000, 400_000)
    figures["bytes_per_request"] = {size: bytes_per_request(size, min(size // BATCH, 10_000)) for size in sizes}
    say(f"bytes per request in flight: {figures['bytes_per_request']}")
    for name, build, leases in (("tiny", tiny, 5 if quick else 60), ("100ms", stepping, 3 if quick else 15)):
        figures[f"commit_overhead_{name}"] = commit_overhead(build, leases)
        say(f"commits, {name}: {figures[f'commit_overhead_{name}']}")
    print_figures("scheduler", figures)


if __name__ == "__main__":
    main()
