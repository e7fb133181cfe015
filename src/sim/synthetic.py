"""A training job without a network: it asks for the same samples, at the same moments, as `rl.module` does.

Rewards come from a model of rewards, and nothing is learnt. So it tells how long the iterations of a job take and what
they cost on a virtual cluster, for any number of workers, where what is asked for does not depend on what is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

from src.core import seeds
from src.core.selection import max_variance
from src.core.types import (
    Exploration,
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
    SampleSpec,
)
from src.sim.cluster import VirtualCluster


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """Samples whose rewards are normal within a prompt (`shape.Samples`).

    reward = level_p + spread (sqrt(persistence) z_seed + sqrt(1 - persistence) z_seed,policy)

    so the rewards of a seed under two policies correlate with `persistence`.
    """

    persistence: float = 0.85
    spread: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.persistence <= 1:
            raise ValueError(f"persistence must be within 0..1, got {self.persistence}")

    def make(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        return [
            SampleResult(request.key, "virtual", str(request.key.policy), reward=self.reward(request.key))
            for request in requests
        ]

    def reward(self, key: RequestKey) -> float:
        level = _level(self.seed, key.iteration, key.instance)
        kept = _NORMAL.inv_cdf(_uniform("kept", self.seed, key.seed))
        new = _NORMAL.inv_cdf(_uniform("new", self.seed, key.seed, str(key.policy)))
        return level + self.spread * (math.sqrt(self.persistence) * kept + math.sqrt(1 - self.persistence) * new)


@lru_cache(maxsize=1 << 14)
def _level(seed: int, iteration: int, instance: int) -> float:
    """Of a prompt in a batch: all of its samples ask for it."""
    return _uniform("level", seed, iteration, instance)


def _uniform(*parts: int | str) -> float:
    """Inside 0..1."""
    return (seeds.derive(*parts) + 0.5) / (1 << seeds.SEED_BITS)


_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class SyntheticJob:
    """The sizes of a job.

    Args:
        seed: of the run.
        prompts: P.
        rollouts_per_prompt: R.
        steps: T.
        iterations: how many.
        explores: the next batch is explored while this one is trained on.
    """

    seed: int
    prompts: int
    rollouts_per_prompt: int
    steps: int
    iterations: int
    explores: bool

    def run(self, cluster: VirtualCluster) -> None:
        """All iterations, as `rl.module.FlowGRPO` and `spot.callback.SpotExploration` go through them."""
        explored: dict[int, list[tuple[int, float]]] = {}
        for iteration in range(self.iterations):
            version = PolicyVersion(cluster.incarnation, iteration)
            cluster.publish(version, lambda folder, version=version: _save(folder, version))  # type: ignore[misc]
            if self.explores and iteration + 1 < self.iterations:
                ahead = self._exploration(cluster.run, iteration + 1, version)
                cluster.open_exploration(ahead, behind_rollouts=True)
            requests = self._rollouts(cluster.run, version, explored)
            with cluster.phase("rollout", iteration):
                cluster.collect(requests)
            with cluster.phase("train", iteration):
                pass
            explored = {}
            for result in cluster.close_exploration(wait_s=0.0):
                explored.setdefault(result.key.instance, []).append((result.key.seed, result.reward))
            cluster.log_metrics(iteration + 1, {"explore/explored": sum(map(len, explored.values()))})

    def _exploration(self, run: str, iteration: int, policy: PolicyVersion) -> Exploration:
        return Exploration(run, self.seed, iteration, self._prompts, self.rollouts_per_prompt, policy, self._spec)

    def _rollouts(
        self, run: str, policy: PolicyVersion, explored: dict[int, list[tuple[int, float]]]
    ) -> list[SampleRequest]:
        requests, spec = [], self._spec
        for prompt in self._prompts:
            instance = prompt.id
            known = explored.get(instance, [])
            if len(known) >= self.rollouts_per_prompt:
                ties = seeds.generator("ties", self.seed, policy.iteration, instance)
                kept = max_variance([reward for _, reward in known], self.rollouts_per_prompt, ties)
                chosen = [known[index][0] for index in kept]
            else:
                chosen = list(seeds.sample_seeds(self.seed, policy.iteration, instance, self.rollouts_per_prompt))
            for seed in chosen:
                key = RequestKey(run, policy.iteration, RequestKind.ROLLOUT, instance, seed, policy, self.steps)
                requests.append(SampleRequest(key, prompt, spec))
        return requests

    @property
    def _prompts(self) -> tuple[Prompt, ...]:
        return tuple(Prompt(index, "") for index in range(self.prompts))

    @property
    def _spec(self) -> SampleSpec:
        return SampleSpec(self.steps, tuple(range(self.steps - 1)))


def _save(folder: Path, version: PolicyVersion) -> str:
    """No weights: the version stands for them, and is their checksum."""
    (folder / "version.txt").write_text(str(version))
    return str(version)
