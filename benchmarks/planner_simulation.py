"""Drives a planner through a world, as the coordinator would, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from benchmarks.planner_worlds import CANDIDATES, KEEP, STEPS, Draws, World
from src.core import seeds, stats
from src.core.clock import monotonic_s
from src.core.selection import max_variance
from src.spot.planning.protocol import (
    Action,
    Audited,
    Closed,
    Event,
    Explore,
    KeptRegenerated,
    LeaseServed,
    Opened,
    Pair,
    Planner,
    SeedsExplored,
    TrainingEnded,
    TrainingStarted,
    Worker,
    WorkersChanged,
)

BATCH = 8
RESERVED_USD_PER_HOUR = 41.9
ROLLOUT_S = 40.0
AUDITED = 4
"""Prompts, and seeds of each, that are audited."""


@dataclass(frozen=True)
class Outcome:
    """One iteration, in truth."""

    contrast: float
    """Variance of the kept, regenerated seeds over that of random seeds."""
    explored: int
    late: int
    """Seeds that were asked for and did not come in time."""
    reserved_usd: float
    spot_usd: float
    decision_s: float
    """The longest decision."""


Sample = tuple[int, int, int]
"""Prompt, candidate, steps."""


@dataclass
class Cluster:
    """One iteration's exploration: pull scheduling of passes on workers that come and go."""

    world: World
    draws: Draws
    planner: Planner
    epoch_s: float
    queue: deque[Sample] = field(default_factory=deque)
    asked: list[int] = field(default_factory=list)
    explored: list[dict[int, float]] = field(default_factory=list)
    busy: dict[int, tuple[int, float, list[Sample]]] = field(default_factory=dict)
    """Worker -> number of its pass, when it began, samples."""
    spot_s: float = 0.0
    decision_s: float = 0.0
    steps: int = STEPS

    def run(self, opened: Opened, before: list[Event]) -> None:
        """From batch start to the end of training."""
        self.asked = [0] * opened.prompts
        self.explored = [{} for _ in range(opened.prompts)]
        end_s = ROLLOUT_S + self.draws.training_s
        agenda = [(t, next(_order), "look") for t in np.arange(ROLLOUT_S + 5, end_s, 10.0)]
        agenda += [(ROLLOUT_S, next(_order), "start"), (end_s, next(_order), "end")]
        heapq.heapify(agenda)
        alive = {worker.name for worker in opened.workers}
        passes = count()
        for event in (opened, *before):
            self.tell(0.0, event)
        while True:
            now_s, _, what, *detail = heapq.heappop(agenda)
            if what == "end":
                break
            if what == "start":
                for name in sorted(alive):
                    self.tell(now_s, LeaseServed(name, STEPS, STEPS * self._step_s(name)))
                self.tell(now_s, TrainingStarted())
            elif what == "look":
                there = {str(w) for w in range(self.world.workers) if self.draws.alive(w, now_s)}
                if there != alive:
                    for name in sorted(alive - there):
                        self._lose(int(name), now_s)
                    alive = there
                    self.tell(now_s, WorkersChanged(workers_named(alive)))
            else:
                self._done(now_s, *detail)
            for name in sorted(alive, key=int):
                worker = int(name)
                if self.queue and worker not in self.busy:
                    number = next(passes)
                    lease = [self.queue.popleft() for _ in range(min(BATCH, len(self.queue)))]
                    self.busy[worker] = (number, now_s, lease)
                    seconds = max(s for _, _, s in lease) * self._step_s(name) * self.draws.jitter(worker, number)
                    heapq.heappush(agenda, (now_s + seconds, next(_order), "done", worker, number))
        self.spot_s += sum(end_s - begun_s for _, begun_s, _ in self.busy.values())
        self.tell(end_s, TrainingEnded(self.draws.training_s))

    def tell(self, now_s: float, event: Event) -> None:
        began_s = monotonic_s()
        actions: list[Action] = self.planner.handle(self.epoch_s + now_s, event)
        self.decision_s = max(self.decision_s, monotonic_s() - began_s)
        for action in actions:
            if isinstance(action, Explore):
                first = self.asked[action.prompt]
                self.asked[action.prompt] += action.count
                self.steps = action.steps
                self.queue.extend((action.prompt, first + k, action.steps) for k in range(action.count))

    @property
    def late(self) -> int:
        return sum(self.asked) - sum(map(len, self.explored))

    def _step_s(self, name: str) -> float:
        return self.draws.step_s(int(name))

    def _lose(self, worker: int, now_s: float) -> None:
        if worker in self.busy:
            _, begun_s, lease = self.busy.pop(worker)
            self.spot_s += now_s - begun_s
            self.queue.extendleft(reversed(lease))

    def _done(self, now_s: float, worker: int, number: int) -> None:
        if self.busy.get(worker, (-1,))[0] != number:
            return
        _, begun_s, lease = self.busy.pop(worker)
        self.spot_s += now_s - begun_s
        rewards = [(prompt, self.draws.stale(prompt, index, steps)) for prompt, index, steps in lease]
        for (prompt, index, _), (_, reward) in zip(lease, rewards, strict=True):
            self.explored[prompt][index] = reward
        self.tell(now_s, LeaseServed(str(worker), lease[0][2], now_s - begun_s))
        self.tell(now_s, SeedsExplored(self.draws.number, tuple(rewards)))


_order = count()


def workers_named(names: set[str]) -> tuple[Worker, ...]:
    return tuple(Worker(name, BATCH) for name in sorted(names, key=int))


def simulate(world: World, planner: Planner, iterations: int) -> list[Outcome]:
    """The outcomes of exploration for iterations 1..iterations."""
    outcomes, news, epoch_s = [], [], 0.0
    previews = () if world.preview_correlation is None else (STEPS // 2,)
    for number in range(1, iterations + 1):
        draws = world.iteration(number)
        alive = {str(worker) for worker in range(world.workers) if draws.alive(worker, 0.0)}
        opened = Opened(
            iteration=number,
            prompts=world.prompts,
            keep=KEEP,
            steps=STEPS,
            workers=workers_named(alive),
            previews=previews,
            reserved_usd_per_hour=RESERVED_USD_PER_HOUR,
            spot_usd_per_hour=world.spot_usd_per_hour,
        )
        cluster = Cluster(world, draws, planner, epoch_s)
        cluster.run(opened, news[:1])
        epoch_s += ROLLOUT_S + draws.training_s
        for audited in news[1:]:
            cluster.tell(0.0, audited)
        cluster.tell(0.0, Closed())
        fresh = [_kept(draws, cluster, prompt) for prompt in range(world.prompts)]
        news = [KeptRegenerated(number, tuple(fresh)), Audited(number, _audit(draws, cluster))]
        outcomes.append(
            Outcome(
                contrast=stats.mean([stats.variance(group) for group in fresh])
                / (draws.random_variance * (1 - 1 / KEEP)),
                explored=sum(map(len, cluster.explored)),
                late=cluster.late,
                reserved_usd=RESERVED_USD_PER_HOUR / 3600 * (ROLLOUT_S + draws.training_s),
                spot_usd=world.spot_usd_per_hour / 3600 * cluster.spot_s,
                decision_s=cluster.decision_s,
            )
        )
    return outcomes


def _kept(draws: Draws, cluster: Cluster, prompt: int) -> tuple[float, ...]:
    """Fresh rewards of the group that is trained on, chosen as the seed bank does."""
    known = sorted(cluster.explored[prompt].items())
    if len(known) < KEEP:
        kept = [index for index, _ in known]
        kept += [CANDIDATES + k for k in range(KEEP - len(known))]
    else:
        chosen = max_variance([reward for _, reward in known], KEEP, random.Random(prompt))
        kept = [known[position][0] for position in chosen]
    return tuple(draws.fresh(prompt, index) for index in kept)


def _audit(draws: Draws, cluster: Cluster) -> tuple[Pair, ...]:
    choosable = [prompt for prompt, known in enumerate(cluster.explored) if len(known) > 1]
    pairs = []
    for prompt in seeds.draw(choosable, AUDITED, "audit", draws.number):
        known = cluster.explored[prompt]
        for index in seeds.draw(sorted(known), AUDITED, "audit", draws.number, prompt):
            pairs.append(Pair(prompt, known[index], draws.fresh(prompt, index)))
    return tuple(pairs)
