"""How stale may the weights be that rank seeds? By version lag, preview steps, learning rate, noise and window.

python -m benchmarks.staleness            # 3 seeds of every setting (about 20 minutes of one core)
python -m benchmarks.staleness --table    # docs/evidence.md's table, from the rows that are there
python -m benchmarks.staleness --quick

Before some iterations of a training run as Spotlight's, all N = 4 G candidate seeds of every prompt are made with the
iteration's weights, and ranked by the rewards that they have under the weights of 1, 2, 4 and 8 iterations before, and
by previews of fewer steps under those of one iteration before. A shuffle is the control.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl

from benchmarks.job import Job, build_job, quiet, resolved
from benchmarks.output import print_figures, say, spread
from benchmarks.ranking import Ranked, ranking_figures, rewards
from src.core.events import JsonLines, read_jsonl
from src.core.types import Batch, RequestKind, SampleRequest, SampleSpec
from src.rl.module import FlowGRPO

LAGS = (1, 2, 4, 8)
PREVIEWS = (3, 2)
"""Of T = 6 steps."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "as in tiny_text": (),
    "lr 1.5e-4": ("algo.optimizer.lr=1.5e-4",),
    "lr 6e-4": ("algo.optimizer.lr=6e-4",),
    "noise 0.4": ("algo.noise_level=0.4",),
    "noise 1.0": ("algo.noise_level=1.0",),
    "window of 2 early steps": ("algo=flow_grpo_fast",),
}


class LagStudy(pl.Callback):
    """Keeps every policy, and ranks the seeds of some iterations by those before; leaves no trace in the training."""

    def __init__(self, *, job: Job, iterations: Sequence[int], folder: Path, previews: Sequence[int]) -> None:
        self._job = job
        self._iterations = frozenset(iterations)
        self._folder = folder
        self._previews = previews
        self.found: dict[int, list[Ranked]] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module, batch = cast(FlowGRPO, pl_module), cast(Batch, batch)
        folder = self._folder / str(batch.iteration)
        folder.mkdir()
        self._job.engine.save_weights(folder)
        if batch.iteration not in self._iterations:
            return
        candidates = self._candidates(module, batch)
        flat = [request for group in candidates for request in group]
        by = {}
        for lag in (lag for lag in LAGS if lag <= batch.iteration):
            by[f"lag {lag}"] = self._stale(flat, batch.iteration - lag)
        for steps in self._previews:
            by[f"{steps} steps"] = self._stale([_preview(request, steps) for request in flat], batch.iteration - 1)
        fresh = rewards(self._job.engine, flat)
        count = len(candidates[0])
        self.found[batch.iteration] = [
            Ranked(fresh_N=fresh[at : at + count], by={name: values[at : at + count] for name, values in by.items()})
            for at in range(0, len(flat), count)
        ]

    def _candidates(self, module: FlowGRPO, batch: Batch) -> list[list[SampleRequest]]:
        exploration = module.exploration(batch.iteration, batch.prompts)
        count, steps = self._job.config["planner"]["seeds_per_prompt"], exploration.spec.steps
        asked = [[exploration.request(i, index, steps) for index in range(count)] for i in range(len(batch.prompts))]
        return [[replace(r, key=replace(r.key, kind=RequestKind.AUDIT)) for r in group] for group in asked]

    def _stale(self, requests: Sequence[SampleRequest], iteration: int) -> list[float]:
        """The spot worker loads its weights again before whatever it makes next: it is of a newer policy."""
        engine = self._job.spot_engines[0]
        engine.load_weights(self._folder / str(iteration))
        return rewards(engine, requests)


def _preview(request: SampleRequest, steps: int) -> SampleRequest:
    spec = SampleSpec(steps, tuple(range(steps - 1)), request.spec.guidance_scale)
    return replace(request, spec=spec, key=replace(request.key, steps=steps))


@dataclass(frozen=True)
class Study:
    """One training run and what is looked at in it."""

    setting: str
    seed: int
    iterations: tuple[int, ...]
    overrides: tuple[str, ...]

    @property
    def key(self) -> str:
        return repr(self)

    def run(self) -> list[dict[str, Any]]:
        """A row of figures per studied iteration."""
        config = resolved(
            [
                "experiment=tiny_text",
                "explore.sync=await",
                "callbacks.evaluate.images=0",
                "callbacks.evaluate.every=100",
                f"seed={self.seed}",
                f"trainer.max_steps={self.iterations[-1] + 1}",
                *self.overrides,
            ]
        )
        with tempfile.TemporaryDirectory() as name:
            job = build_job(config, Path(name) / "run", spot_engine=lambda engine: engine)
            weights = Path(name) / "weights"
            weights.mkdir()
            previews = () if "algo=flow_grpo_fast" in self.overrides else PREVIEWS  # its window may not fit
            study = LagStudy(job=job, iterations=self.iterations, folder=weights, previews=previews)
            job.run([study, job.exploration])
        keep = config["algo"]["group_size"]
        return [
            {"key": self.key, "setting": self.setting, "seed": self.seed, "iteration": iteration}
            | ranking_figures(prompts, keep, "staleness", self.seed, iteration)
            for iteration, prompts in study.found.items()
        ]


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over runs and iterations, by setting."""
    found: dict[str, Any] = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        names = [name for name in chosen[0] if name.startswith(("spearman_", "variance_share_"))]
        found[setting] = {name: spread([row[name] for row in chosen]) for name in names}
    base = next(iter(found.values()))
    ratio = base["variance_share_lag 1"]["mean"] / base["variance_share_random"]["mean"]
    return {"settings": found, "rows": len(rows), "variance_share_lag_1_over_random_ratio": ratio}


def table(found: dict[str, Any]) -> str:
    """Spearman correlation with the fresh rewards / share of the best variance, mean over runs and iterations."""
    columns = [*(f"lag {lag}" for lag in LAGS), *(f"{steps} steps" for steps in PREVIEWS), "random"]
    lines = ["| setting | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for setting, values in found["settings"].items():
        cells = []
        for name in columns:
            if f"spearman_{name}" in values:
                rho, share = (values[f"{kind}_{name}"]["mean"] for kind in ("spearman", "variance_share"))
                cells.append(f"{rho:.2f} / {share:.2f}")
            else:
                cells.append("-")
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/staleness"), help="where rows are kept")
    parser.add_argument("--quick", action="store_true", help="one small run: a test")
    parser.add_argument("--table", action="store_true", help="print markdown instead of the JSON line")
    options = parser.parse_args(arguments)
    quiet()
    studies = [
        Study(setting=setting, seed=seed, iterations=(9, 17), overrides=overrides)
        for seed in range(options.seeds)
        for setting, overrides in SETTINGS.items()
    ]
    if options.quick:
        small = ("data.prompts_per_iteration=2", "data.eval_prompts=8", "algo.group_size=4")
        studies = [Study("as in tiny_text", 0, (2,), (*small, "planner.seeds_per_prompt=8"))]
    rows = rows_of(studies, options.out / "rows.jsonl")
    found = figures(rows)
    if options.table:
        print(table(found))
    else:
        print_figures("staleness", found)


def rows_of(studies: Sequence[Study], file: Path) -> list[dict[str, Any]]:
    """The rows of the studies; those that are not in the file yet are made and added."""
    rows = list(read_jsonl(file)) if file.exists() else []
    kept = JsonLines(file)
    known = {row["key"] for row in rows}
    for study in studies:
        if study.key not in known:
            for row in study.run():
                kept.append(row)
                rows.append(row)
            say(f"{study.setting}, seed {study.seed}")
    kept.close()
    wanted = {study.key for study in studies}
    return [row for row in rows if row["key"] in wanted]


if __name__ == "__main__":
    main()
