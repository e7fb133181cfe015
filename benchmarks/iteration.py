"""Seconds of one GRPO iteration, by phase, against a plain loop that does the same work.

python -m benchmarks.iteration [hydra overrides ...]      # e.g. trainer.accelerator=cuda model.compile=true

The product trains in one process without spot workers. Before each of its iterations the plain loop
(benchmarks/plain.py) does the same one with the same weights, prompts and seeds; rewards and the first update's
gradient must agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.job import build_job, quiet, resolved
from benchmarks.output import print_figures, say
from benchmarks.plain import PlainLoop, gradients_of
from src.core.clock import monotonic_s
from src.core.events import read_jsonl
from src.core.protocols import Engine
from src.core.types import Batch, SampleRequest, SampleResult
from src.rl.module import FlowGRPO
from src.spot.coordinator import Coordinator
from src.spot.inline import InlineCluster

QUICK = ("data.prompts_per_iteration=2", "algo.group_size=4")
GRADIENT_TOLERANCE = 1e-3
"""Relative: kernels of other batch sizes differ in the last bits, and the ratio's clipping may amplify one pair."""
REWARD_TOLERANCE = 0.02
"""Share of samples whose reward may differ: a pixel on the edge of a rounding, read otherwise."""
PHASES = ("rollout", "score", "train")

Rewards = dict[tuple[int, int], float]
"""By (instance, seed)."""


class Interleaved(pl.Callback):
    """Runs the plain loop before each iteration of the product, times both, and compares what they computed."""

    def __init__(self, plain: PlainLoop) -> None:
        self._plain = plain
        self._started_s: float | None = None
        self._gradients: list[Tensor] = []
        self._expected: list[Tensor] = []
        self.plain_seconds: list[dict[str, float]] = []
        self.product_seconds: list[float] = []
        self.gradient_errors: list[float] = []
        self.rewards: list[Rewards] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_pre_hook(self._keep_first_gradients)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._end_iteration()
        module, batch = cast(FlowGRPO, pl_module), cast(Batch, batch)
        count = module.geometry.group_size
        seeds_PG = [module.seed_bank.take(batch.iteration, i, count) for i in range(len(batch.prompts))]
        self._plain.adapter.load_trainable_state(module.adapter.trainable_state())
        started_s = monotonic_s()
        done = self._plain.iterate(batch, seeds_PG, module.spec(batch.iteration))
        self.plain_seconds.append({**done.seconds, "iteration": monotonic_s() - started_s})
        self.rewards.append(done.rewards)
        self._expected, self._gradients = done.gradients, []
        self._started_s = monotonic_s()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_iteration()

    def _end_iteration(self) -> None:
        if self._started_s is not None:
            self.product_seconds.append(monotonic_s() - self._started_s)
            self.gradient_errors.append(relative_error(self._gradients, self._expected))

    def _keep_first_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._gradients:
            self._gradients = gradients_of([p for group in optimizer.param_groups for p in group["params"]])


class RecordingCluster(InlineCluster):
    """Keeps the rewards of every iteration's rollouts."""

    def __init__(self, *, coordinator: Coordinator, engine: Engine, spot_engines: Sequence[Engine]) -> None:
        super().__init__(coordinator=coordinator, engine=engine, spot_engines=spot_engines)
        self.rewards: list[Rewards] = []

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        results = super().collect(requests)
        self.rewards.append({(result.key.instance, result.key.seed): result.reward for result in results})
        return results


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """|found - expected| / |expected| over all tensors together."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return float((difference / sum(float(b.square().sum()) for b in expected)) ** 0.5)


def product_phases(folder: Path) -> list[dict[str, float]]:
    """Seconds by phase of each iteration, from the run's event log.

    rollout and score as the engine reports them; exchange: the rest of the rollout phase (queue, results, stacking).
    """
    iterations: dict[int, dict[str, float]] = {}
    for event in read_jsonl(folder / "events.jsonl"):
        if event["kind"] == "lease_done" and event["request_kind"] == "rollout":
            seconds = iterations.setdefault(event["iteration"], {})
            seconds["rollout"] = seconds.get("rollout", 0.0) + event["denoise_s"] + event["decode_s"]
            seconds["score"] = seconds.get("score", 0.0) + event["score_s"]
        elif event["kind"] == "policy_published":
            iteration = int(event["version"].partition(".")[2])
            iterations.setdefault(iteration, {})["publish"] = event["publish_s"]
        elif event["kind"] == "phase":
            seconds = iterations.setdefault(event["iteration"], {})
            took_s = event["end_s"] - event["start_s"]
            if event["name"] == "train":
                seconds["train"] = took_s
            elif event["name"] == "rollout":
                seconds["exchange"] = took_s - seconds["rollout"] - seconds["score"]
    return [iterations[iteration] for iteration in sorted(iterations)]


def measure(overrides: Sequence[str], repetitions: int) -> dict[str, Any]:
    """Runs one iteration more than `repetitions`; the first one warms up."""
    config = resolved(["experiment=tiny_text", "planner=none", f"trainer.max_steps={repetitions + 1}", *overrides])
    plain = PlainLoop({**config, "model": {**config["model"], "compile": False}})
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(config, Path(folder), cluster_of=RecordingCluster)
        interleaved = Interleaved(plain)
        job.run([interleaved, job.exploration])
        phases = product_phases(Path(folder))
    product = [
        {**found, "iteration": seconds} for found, seconds in zip(phases, interleaved.product_seconds, strict=True)
    ]
    return {
        "repetitions": repetitions,
        "overrides": list(overrides),
        "spotlight_s": _table(product[1:]),
        "plain_s": _table(interleaved.plain_seconds[1:]),
        **{
            f"{prefix}plain_over_spotlight_ratio": _ratio(interleaved.plain_seconds[1:], product[1:], phase)
            for prefix, phase in [("", "iteration"), *((f"{phase}_", phase) for phase in PHASES)]
        },
        "gradient_relative_error": max(interleaved.gradient_errors),
        "rewards_different_share": different_share(cast(RecordingCluster, job.cluster).rewards, interleaved.rewards),
    }


def different_share(found: Sequence[Rewards], expected: Sequence[Rewards]) -> float:
    """Share of samples whose rewards are not equal."""
    pairs = [(one[sample], other[sample]) for one, other in zip(found, expected, strict=True) for sample in other]
    return sum(abs(a - b) > 1e-6 for a, b in pairs) / len(pairs)


def _table(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: _quartiles([row[name] for row in rows]) for name in rows[0]}


def _ratio(plain: Sequence[dict[str, float]], product: Sequence[dict[str, float]], phase: str) -> float:
    """Median over repetitions: each pair ran one after the other, on a machine in the same mood."""
    return statistics.median(a[phase] / b[phase] for a, b in zip(plain, product, strict=True))


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of experiment=tiny_text")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a few tiny iterations: a test")
    options = parser.parse_args(arguments)
    quiet()
    overrides = [*(QUICK if options.quick else ()), *options.overrides]
    found = measure(overrides, 2 if options.quick else options.repetitions)
    print_figures("iteration", found)
    if found["gradient_relative_error"] > GRADIENT_TOLERANCE or found["rewards_different_share"] > REWARD_TOLERANCE:
        say("the two loops did not compute the same: their times do not compare")
        sys.exit(1)


if __name__ == "__main__":
    main()
