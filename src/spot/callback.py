"""Drives the spot workers around each training iteration.

    batch start   publish theta_i; audit some explored seeds of batch i; open exploration of batch i+1 with theta_i
    (training)    the trainer rolls out batch i (workers help: rollouts go first) and updates to theta_{i+1}
    batch end     close exploration: what has come decides which seeds of batch i+1 are trained on

So the choice of seeds is stale by one version, and nothing else: kept seeds are generated again with theta_{i+1}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import pytorch_lightning as pl

from src.core.clock import Stopwatch
from src.core.protocols import Explorable
from src.core.types import (
    Batch,
    Explored,
    ExploredByInstance,
    PolicyVersion,
    Prompt,
    RequestKind,
    SampleRequest,
    SampleResult,
)


class Sync(Protocol):
    """Where the explored rewards of the next batch come from, and when they count."""

    wait_s: float
    """How long to wait for results when training is over."""

    def start(self, module: Explorable, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Training begins: explore for the batch of `iteration` meanwhile."""

    def finish(self, module: Explorable) -> ExploredByInstance:
        """Training is over: what counts."""


class Race:
    """What has come when training ends counts; the rest is dropped."""

    wait_s = 0.0

    def start(self, module: Explorable, iteration: int, prompts: Sequence[Prompt]) -> None:
        module.cluster.open_exploration(module.exploration(iteration, prompts), behind_rollouts=True)

    def finish(self, module: Explorable) -> ExploredByInstance:
        return explored_by_instance(module.cluster.close_exploration(wait_s=self.wait_s))


class Await(Race):
    """All that the planner asked for counts: waits for it, up to a limit (then as `Race`).

    Makes runs of planners reproducible that ask for the same whatever they measure.

    Args:
        timeout_s: the limit, for each iteration.
    """

    def __init__(self, *, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"explore.await_timeout_s must be positive, got {timeout_s}")
        self.wait_s = timeout_s


class Replay:
    """The explored rewards that an earlier run accepted, whatever was fast or slow then. Nothing is explored.

    Args:
        source: (iteration, policy that explores) -> what was accepted for the iteration's batch.
    """

    wait_s = 0.0

    def __init__(self, *, source: Callable[[int, PolicyVersion], ExploredByInstance]) -> None:
        self._source = source

    def start(self, module: Explorable, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Nothing to do."""

    def finish(self, module: Explorable) -> ExploredByInstance:
        coming = module.policy  # the updates are done: this is the policy that the seeds are chosen for
        return self._source(coming.iteration, replace(coming, iteration=coming.iteration - 1))


class SpotExploration(pl.Callback):
    """The callback described at the top of this file. The planner, beside the coordinator, decides what is explored.

    Args:
        sync: where explored rewards come from, and when they count.
        workers: spot workers that the cluster keeps, those included that are just starting or being replaced. Without
            any nothing is explored or audited.
    """

    def __init__(self, *, sync: Sync, workers: int) -> None:
        self._sync = sync
        self._workers = workers
        self._audits: list[SampleRequest] = []
        self._watch = Stopwatch()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module, batch = cast(Explorable, pl_module), cast(Batch, batch)
        self._watch = Stopwatch(module.cluster.now)
        with self._watch.phase("publish"):
            module.publish()
        self._audits = audit_requests(module, batch) if self._workers else []
        module.cluster.submit(self._audits, behind_rollouts=True)
        if self._workers and batch.next_prompts:
            self._sync.start(module, batch.iteration + 1, batch.next_prompts)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module, batch = cast(Explorable, pl_module), cast(Batch, batch)
        metrics: dict[str, float] = {}
        with self._watch.phase("explore_wait"):
            explored = self._sync.finish(module) if batch.next_prompts else {}
            audited = module.cluster.close(self._audits, wait_s=self._sync.wait_s)
        if batch.next_prompts:
            explorer = replace(module.policy, iteration=batch.iteration)
            module.offer(batch.iteration + 1, explored, explorer)
            metrics["explore/explored"] = sum(map(len, explored.values()))
        fresh = {(r.key.instance, r.key.seed): r.reward for r in audited if r.error is None}
        metrics |= module.audit(batch.iteration, fresh)
        metrics |= {f"time/{phase}_s": seconds for phase, seconds in self._watch.seconds.items()}
        module.cluster.log_metrics(batch.iteration + 1, metrics)


class FreshExploration(pl.Callback):
    """Explores each batch with the very weights that roll it out, before anything else (as Sol-RL, arXiv 2604.06916).

    Its choice of seeds is as good as can be, and the exploration is on the critical path.
    """

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module, batch = cast(Explorable, pl_module), cast(Batch, batch)
        module.publish()
        with module.cluster.phase("explore", batch.iteration):
            module.cluster.open_exploration(module.exploration(batch.iteration, batch.prompts))
            explored = explored_by_instance(module.cluster.close_exploration(wait_s=math.inf))
        module.offer(batch.iteration, explored, module.policy)
        module.cluster.log_metrics(batch.iteration, {"explore/explored": sum(map(len, explored.values()))})


def audit_requests(module: Explorable, batch: Batch) -> list[SampleRequest]:
    """AUDIT requests for uniformly drawn explored seeds of this batch, under this iteration's weights."""
    return [
        module.request(RequestKind.AUDIT, batch.iteration, instance, batch.prompts[instance], seed)
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
