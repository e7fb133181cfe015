"""Drives the spot workers around each training iteration.

    batch start   publish theta_i; audit some explored seeds of batch i; explore the seeds of batch i+1 with theta_i
    (training)    the trainer rolls out batch i (workers help: rollouts go first) and updates to theta_{i+1}
    batch end     close the exploration: what has come decides which seeds of batch i+1 are trained on

So the choice of seeds is stale by one version, and nothing else: kept seeds are generated again with theta_{i+1}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import pytorch_lightning as pl

from src.core import seeds
from src.core.protocols import Explorable
from src.core.types import (
    Batch,
    Explored,
    ExploredByInstance,
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
)
from src.spot.planner import Outlook, Planner


class Exploration(Protocol):
    """Where the explored rewards of the next batch come from, and when they count."""

    wait_s: float
    """How long to wait for results when training is over."""

    def explorers(self, live: int) -> int:
        """Workers to plan for, when `live` are there now."""

    def start(self, module: Explorable, requests: Sequence[SampleRequest]) -> None:
        """Training begins: explore meanwhile."""

    def finish(self, module: Explorable, requests: Sequence[SampleRequest]) -> ExploredByInstance:
        """Training is over: what counts."""


class Race:
    """What has come when training ends counts; the rest is dropped."""

    wait_s = 0.0

    def explorers(self, live: int) -> int:
        return live

    def start(self, module: Explorable, requests: Sequence[SampleRequest]) -> None:
        module.cluster.submit(requests)

    def finish(self, module: Explorable, requests: Sequence[SampleRequest]) -> ExploredByInstance:
        return explored_by_instance(module.cluster.close(requests, wait_s=self.wait_s))


class Await(Race):
    """All requests count: waits for them, up to a limit (then as `Race`). Makes runs reproducible.

    Args:
        timeout_s: the limit, for each iteration.
        workers: how many the cluster keeps; those that are just being replaced or starting count too.
    """

    def __init__(self, *, timeout_s: float, workers: int) -> None:
        if timeout_s <= 0:
            raise ValueError(f"explore.await_timeout_s must be positive, got {timeout_s}")
        self.wait_s = timeout_s
        self._workers = workers

    def explorers(self, live: int) -> int:
        return self._workers


class Replay:
    """The explored rewards that an earlier run accepted, whatever was fast or slow then. Nothing is explored.

    Args:
        source: (iteration, policy that explores) -> what was accepted for the iteration's batch.
    """

    wait_s = 0.0

    def __init__(self, *, source: Callable[[int, PolicyVersion], ExploredByInstance]) -> None:
        self._source = source

    def explorers(self, live: int) -> int:
        return 0

    def start(self, module: Explorable, requests: Sequence[SampleRequest]) -> None:
        """Nothing to do."""

    def finish(self, module: Explorable, requests: Sequence[SampleRequest]) -> ExploredByInstance:
        coming = module.policy  # the updates are done: this is the policy that the seeds are chosen for
        return self._source(coming.iteration, replace(coming, iteration=coming.iteration - 1))


class SpotExploration(pl.Callback):
    """The callback described at the top of this file."""

    def __init__(self, *, planner: Planner, exploration: Exploration) -> None:
        self._planner = planner
        self._exploration = exploration
        self._audits: list[SampleRequest] = []
        self._explores: list[SampleRequest] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module, batch = cast(Explorable, pl_module), cast(Batch, batch)
        module.publish()
        workers = self._exploration.explorers(module.cluster.workers())
        self._audits = audit_requests(module, batch) if workers else []
        module.cluster.submit(self._audits)
        plan = self._planner.plan(Outlook(batch.iteration + 1, len(batch.next_prompts), workers))
        self._explores = explore_requests(module, batch, plan)
        self._exploration.start(module, self._explores)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module, batch = cast(Explorable, pl_module), cast(Batch, batch)
        metrics: dict[str, float] = {}
        if batch.next_prompts:
            explored = self._exploration.finish(module, self._explores)
            module.offer(batch.iteration + 1, explored)
            metrics["explore/requested"] = len(self._explores)
            metrics["explore/explored"] = sum(map(len, explored.values()))
        audited = module.cluster.close(self._audits, wait_s=self._exploration.wait_s)
        fresh = {(r.key.instance, r.key.seed): r.reward for r in audited if r.error is None}
        metrics |= module.audit(batch.iteration, fresh)
        module.cluster.log_metrics(batch.iteration + 1, metrics)


def explore_requests(module: Explorable, batch: Batch, plan: Sequence[int]) -> list[SampleRequest]:
    """EXPLORE requests for the next batch, the first candidate of every prompt first: fair wherever it is cut off."""
    return [
        _request(module, RequestKind.EXPLORE, batch.iteration + 1, instance, batch.next_prompts[instance], index)
        for index in range(max(plan, default=0))
        for instance in range(len(batch.next_prompts))
        if index < plan[instance]
    ]


def audit_requests(module: Explorable, batch: Batch) -> list[SampleRequest]:
    """AUDIT requests for uniformly drawn explored seeds of this batch, under this iteration's weights."""
    return [
        _sample_request(module, RequestKind.AUDIT, batch.iteration, instance, batch.prompts[instance], seed)
        for instance, seed in module.audited_seeds(batch.iteration)
    ]


def explored_by_instance(results: Sequence[SampleResult]) -> ExploredByInstance:
    """Explored seeds grouped by prompt; samples that failed are left out."""
    explored: dict[int, list[Explored]] = {}
    for result in results:
        if result.error is None:
            found = Explored(result.key.seed, result.reward, result.digest)
            explored.setdefault(result.key.instance, []).append(found)
    return explored


def _request(
    module: Explorable, kind: RequestKind, iteration: int, instance: int, prompt: Prompt, index: int
) -> SampleRequest:
    seed = seeds.sample_seed(module.seed, iteration, instance, index)
    return _sample_request(module, kind, iteration, instance, prompt, seed)


def _sample_request(
    module: Explorable, kind: RequestKind, iteration: int, instance: int, prompt: Prompt, seed: int
) -> SampleRequest:
    spec = module.spec(iteration)
    key = RequestKey(module.run, iteration, kind, instance, seed, module.policy, spec.steps)
    return SampleRequest(key, prompt, spec)
