"""The arms of the selection study: one training loop, and what is exchanged around it to choose seeds otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytorch_lightning as pl

from benchmarks.job import Job
from src.app.engine import RolloutEngine
from src.core.protocols import Engine
from src.core.types import RequestKey, RequestKind, SampleRequest, SampleResult, WorkReport
from src.spot.callback import FreshExploration
from src.spot.coordinator import Coordinator
from src.spot.inline import InlineCluster


@dataclass(frozen=True)
class Arm:
    """A way to choose the seeds per prompt that are trained on.

    Args:
        candidates: N / G, explored seeds per trained one; 0 explores nothing.
        explore: the callback that drives exploration.
        spot_engine: what the explorer's engine is turned into.
        cluster_of: who answers the trainer.
        trained: seeds that are trained on, as a multiple of G: more than 1 is more work for the trainer.
    """

    name: str
    candidates: int
    explore: Callable[[Job], pl.Callback] = lambda job: job.exploration
    spot_engine: Callable[[RolloutEngine], Engine] = lambda engine: engine
    cluster_of: type[InlineCluster] = InlineCluster
    trained: int = 1


class _Exploring(ABC):
    """An engine that is asked to explore in another way, and does all else as it is."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.load_weights = engine.load_weights

    @property
    def fingerprint(self) -> str:
        return self._engine.fingerprint

    @property
    def batch_size(self) -> int:
        return self._engine.batch_size

    def serve(
        self, requests: Sequence[SampleRequest], worker: str, **how: Any
    ) -> tuple[list[SampleResult], WorkReport]:
        exploring = requests[0].key.kind is RequestKind.EXPLORE
        asked = [self.instead(request) for request in requests] if exploring else requests
        results, report = self._engine.serve(asked, worker, **how)
        answered = zip(results, requests, strict=True)
        return [replace(result, key=request.key) for result, request in answered], report

    @abstractmethod
    def instead(self, request: SampleRequest) -> SampleRequest:
        """What is made for an EXPLORE request."""


class OdeExploring(_Exploring):
    """Explores without step noise: a seed is then its initial latents alone."""

    def instead(self, request: SampleRequest) -> SampleRequest:
        return replace(request, spec=replace(request.spec, stochastic_steps=()))


class TrajectoryExploring(_Exploring):
    """Explores with trajectories, as rollouts have them."""

    def instead(self, request: SampleRequest) -> SampleRequest:
        return replace(request, key=replace(request.key, kind=RequestKind.ROLLOUT))


class ReusingCluster(InlineCluster):
    """Trains on the explored samples themselves, stale log-probabilities included; nothing is generated again."""

    def __init__(self, *, coordinator: Coordinator, engine: Engine, spot_engines: Sequence[Engine]) -> None:
        super().__init__(coordinator=coordinator, engine=engine, spot_engines=spot_engines)
        self._explored: dict[tuple[int, int, int], SampleResult] = {}

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        results = super().close_exploration(wait_s=wait_s)
        self._explored = {_sample(result.key): result for result in results}
        return results

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        missing = [request for request in requests if not self._known(request)]
        made = iter(super().collect(missing)) if missing else iter(())
        return [self._explored[_sample(r.key)] if self._known(r) else next(made) for r in requests]

    def _known(self, request: SampleRequest) -> bool:
        return request.key.kind is RequestKind.ROLLOUT and _sample(request.key) in self._explored


def _sample(key: RequestKey) -> tuple[int, int, int]:
    return key.iteration, key.instance, key.seed


ARMS = {
    arm.name: arm
    for arm in (
        Arm("random", 0),
        Arm("random_2g", 0, trained=2),
        Arm("fresh_2g", 2, explore=lambda job: FreshExploration()),
        Arm("fresh_4g", 4, explore=lambda job: FreshExploration()),
        Arm("stale_2g", 2),
        Arm("stale_4g", 4),
        Arm(
            "stale_4g_not_regenerated",
            4,
            spot_engine=TrajectoryExploring,
            cluster_of=ReusingCluster,
        ),
        Arm("stale_4g_ode_ranked", 4, spot_engine=OdeExploring),
    )
}
