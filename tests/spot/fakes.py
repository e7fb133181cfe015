"""A deterministic engine without a model, and requests to feed it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from src.core.clock import sleep_s
from src.core.seeds import derive
from src.core.types import (
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleResult,
    SampleSpec,
    WorkReport,
)

SPEC = SampleSpec(steps=4, stochastic_steps=(1, 2))


class FakeEngine:
    """Its weights are one line of text; a sample's reward is a pure function of seed and weights."""

    fingerprint = "fake"

    def __init__(self, *, batch_size: int = 4, lease_s: float = 0.0, weights: str = "") -> None:
        self.batch_size = batch_size
        self.weights = weights
        self.served: list[RequestKey] = []
        self._lease_s = lease_s

    def load_weights(self, folder: Path) -> str:
        self.weights = (folder / "weights.txt").read_text()
        return self.weights

    def serve(self, requests: Sequence[SampleRequest], worker: str) -> tuple[list[SampleResult], WorkReport]:
        sleep_s(self._lease_s)
        keys = [request.key for request in requests]
        self.served += keys
        results = [
            SampleResult(key, worker, self.weights, reward=reward(key, self.weights), digest=str(key.seed))
            for key in keys
        ]
        steps = sum(request.spec.steps for request in requests)
        return results, WorkReport(denoise_s=self._lease_s, decode_s=0.0, score_s=0.0, steps=steps)


def reward(key: RequestKey, weights: str) -> float:
    return derive(key.seed, weights) % 1000 / 1000


def saves(weights: str):
    """What `publish` is given to write those weights."""

    def save(folder: Path) -> str:
        (folder / "weights.txt").write_text(weights)
        return weights

    return save


def requests(
    kind: RequestKind,
    count: int,
    *,
    policy: PolicyVersion,
    iteration: int = 0,
    first: int = 0,
    run: str = "run",
    spec: SampleSpec = SPEC,
) -> list[SampleRequest]:
    """`count` requests of one prompt; their seeds are first, first + 1, ..."""
    prompt = Prompt(0, "a red circle")
    keys = [RequestKey(run, iteration, kind, 0, seed, policy, spec.steps) for seed in range(first, first + count)]
    return [SampleRequest(key, prompt, spec) for key in keys]
