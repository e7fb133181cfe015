"""How well stale exploration ranks: all N explored seeds of some iterations, made again with fresh weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytorch_lightning as pl

from benchmarks.job import Job
from src.core import seeds
from src.core.protocols import Engine
from src.core.selection import max_variance
from src.core.stats import mean, spearman, variance
from src.core.types import Batch, RequestKind, SampleRequest
from src.rl.module import FlowGRPO


@dataclass(frozen=True)
class Ranked:
    """One prompt: its N seeds' fresh rewards, and what they were ranked by in several ways, seed by seed."""

    fresh_N: list[float]
    by: dict[str, list[float]]


class RankingStudy(pl.Callback):
    """Before iterations `iterations` ranks their explored seeds in all ways; it leaves no trace in the training.

    stale   the reward under the explorer's weights, as explored
    ode     the same weights and initial noise, without step noise
    fresh   the reward under the iteration's weights, as rolled out: what the others are to predict
    """

    def __init__(self, *, job: Job, iterations: Sequence[int]) -> None:
        self._job = job
        self._iterations = frozenset(iterations)
        self.found: dict[int, list[Ranked]] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module, batch = cast(FlowGRPO, pl_module), cast(Batch, batch)
        if batch.iteration not in self._iterations:
            return
        explored = [module.seed_bank.explored(batch.iteration, i) for i in range(len(batch.prompts))]
        requests = [
            module.request(RequestKind.AUDIT, batch.iteration, instance, batch.prompts[instance], found.seed)
            for instance, group in enumerate(explored)
            for found in group
        ]
        fresh = iter(rewards(self._job.engine, requests))
        # The explorer has pulled nothing since it explored this batch: it still holds the stale weights.
        ode = iter(rewards(self._job.spot_engines[0], [_without_noise(request) for request in requests]))
        self.found[batch.iteration] = [
            Ranked(
                fresh_N=[next(fresh) for _ in group],
                by={"stale": [found.reward for found in group], "ode": [next(ode) for _ in group]},
            )
            for group in explored
        ]


def ranking_figures(prompts: Sequence[Ranked], keep: int, *purpose: int | str) -> dict[str, float]:
    """Rank correlation with the fresh rewards within a prompt (mean over prompts), and the share of the variance.

    The share is the variance of the fresh rewards of the `keep` seeds that the ranking would keep, over that of the
    best `keep` (both summed over prompts). For random seeds it is the expectation, (keep - 1) / keep times the
    unbiased variance of all N; their correlation is that of a shuffle.
    """
    ties = seeds.generator("ranking", *purpose)
    best = sum(_kept_variance(prompt.fresh_N, prompt.fresh_N, keep, ties) for prompt in prompts)
    figures = {}
    for name in prompts[0].by:
        pairs = [(prompt.by[name], prompt.fresh_N) for prompt in prompts]
        figures[f"spearman_{name}"] = _mean_of_numbers([spearman(*pair) for pair in pairs])
        kept = sum(_kept_variance(*pair, keep, ties) for pair in pairs)
        figures[f"variance_share_{name}"] = kept / best if best else float("nan")
    shuffled = [spearman(ties.sample(p.fresh_N, len(p.fresh_N)), p.fresh_N) for p in prompts]
    figures["spearman_random"] = _mean_of_numbers(shuffled)
    drawn = sum(_drawn_variance(prompt.fresh_N, keep) for prompt in prompts)
    figures["variance_share_random"] = drawn / best if best else float("nan")
    return figures


def _kept_variance(ranked_by_N: Sequence[float], fresh_N: Sequence[float], keep: int, ties: random.Random) -> float:
    return variance([fresh_N[index] for index in max_variance(ranked_by_N, keep, ties)])


def _drawn_variance(fresh_N: Sequence[float], keep: int) -> float:
    count = len(fresh_N)
    return variance(fresh_N) * count / (count - 1) * (keep - 1) / keep


def _mean_of_numbers(values: Sequence[float]) -> float:
    return mean([value for value in values if value == value])


def _without_noise(request: SampleRequest) -> SampleRequest:
    return replace(request, spec=replace(request.spec, stochastic_steps=()))


def rewards(engine: Engine, requests: Sequence[SampleRequest]) -> list[float]:
    """One each, in order."""
    results, _ = engine.serve(requests, "ranking study")
    failed = next((result.error for result in results if result.error), None)
    if failed:
        raise RuntimeError(f"the ranking study needs every reward: {failed}")
    return [result.reward for result in results]
