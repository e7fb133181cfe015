"""A deterministic engine without a model, and requests to feed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from src.core.clock import sleep_s
from src.core.protocols import OnStep, never, unwatched
from src.core.seeds import derive
from src.core.types import (
    Blob,
    Commit,
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

SPEC = SampleSpec(steps=4, stochastic_steps=(1, 2))


class FakeEngine:
    """Its weights are one line of text; a sample's reward is a pure function of seed and weights."""

    fingerprint = "fake"

    def __init__(self, *, batch_size: int = 4, lease_s: float = 0.0, weights: str = "", commit_bytes: int = 0) -> None:
        self.batch_size = batch_size
        self.weights = weights
        self.served: list[RequestKey] = []
        self._lease_s = lease_s
        self._commit_bytes = commit_bytes

    def load_weights(self, folder: Path) -> str:
        self.weights = (folder / "weights.txt").read_text()
        return self.weights

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
        keys = [request.key for request in requests]
        steps = requests[0].spec.steps
        assert [commit.key for commit in resume] in ([], keys)
        assert all(commit.weights_checksum == self.weights for commit in resume)
        step = first = resume[0].step if resume else 0
        yields = should_yield()
        while step < steps and not yields:
            sleep_s(self._lease_s / steps)
            step, yields = step + 1, should_yield()
            due = (commit_every > 0 and step % commit_every == 0) or yields
            on_step(step, [self._commit(key, step) for key in keys] if due else ())
        denoise_s = (step - first) * self._lease_s / steps
        report = WorkReport(denoise_s=denoise_s, decode_s=0.0, score_s=0.0, steps=len(requests) * (step - first))
        if step < steps:
            return [], report
        self.served += keys
        results = [
            SampleResult(key, worker, self.weights, reward=reward(key, self.weights), digest=str(key.seed))
            for key in keys
        ]
        return results, report

    def _commit(self, key: RequestKey, step: int) -> Commit:
        latents = Blob("uint8", (self._commit_bytes,), bytes(self._commit_bytes))
        nothing = Blob("float32", (0,), b"")
        return Commit(key, step, latents, Trajectory(nothing, nothing, nothing, "fake"), self.weights)


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
