"""What happens between iterations besides exploration: evaluation on held-out prompts, checkpoints, and ranks that come
and go."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from src.app import checkpoint
from src.app.checkpoint import Checkpoint, CheckpointError
from src.app.processes import shared_folder
from src.core import seeds
from src.core.clock import Stopwatch
from src.core.folders import write_whole
from src.core.stats import mean
from src.core.types import Blob, PolicyVersion, Prompt, RequestKey, RequestKind, SampleRequest, SampleResult, SampleSpec
from src.parallel.elastic import ElasticWorld
from src.parallel.strategy import UlyssesStrategy
from src.rl.metrics import mean_scores
from src.rl.module import FlowGRPO
from src.rl.rewards.image_stats import image_statistics
from src.spot.reaper import JOB_VARIABLE


class Evaluation(pl.Callback):
    """Rewards and images of held-out prompts, with fixed seeds and without step noise.

    Runs before the first iteration, after every `every`-th and after the last one.

    Args:
        prompts: the held-out set; image i of it always has the same seed.
        spec: how held-out images are denoised.
        every: iterations between evaluations.
        images: how many of them are written into the run folder.
        average: evaluate the running average of the weights (`algo.ema`) in place of the weights.
        folder: where (`images/` of the run folder).
        last: number of the last iteration.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        spec: SampleSpec,
        every: int,
        images: int,
        average: bool,
        folder: Path,
        last: int,
    ) -> None:
        if every < 1:
            raise ValueError(f"callbacks.evaluate.every must be at least 1, got {every}")
        self._prompts = prompts
        self._spec = spec
        self._every = every
        self._images = images
        self._average = average
        self._folder = folder
        self._last = last

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = cast(FlowGRPO, pl_module)
        if module.iteration == 0:
            self._evaluate(module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = cast(FlowGRPO, pl_module)
        if module.iteration % self._every == 0 or module.iteration == self._last:
            self._evaluate(module)

    def _evaluate(self, module: FlowGRPO) -> None:
        watch = Stopwatch(module.cluster.now)
        with (
            self._policy(module) as policy,  # publication is no part of the phase: the ledger has an account for it
            watch.phase("evaluate"),
            module.cluster.phase("evaluate", module.iteration),
        ):
            requests = [self._request(module, policy, index) for index in range(len(self._prompts))]
            results = module.cluster.collect(requests)
        made = [result for result in results if result.error is None]
        if not made:
            raise RuntimeError(f"all {len(results)} held-out samples failed; the first one: {results[0].error}")
        rewards = [result.reward for result in made]
        scores = mean_scores([result.scores for result in made])
        images_BHWC = np.stack([_image(result.image) for result in made if result.image is not None])
        statistics = image_statistics(images_BHWC)
        metrics = {
            "eval/reward": mean(rewards),
            "eval/exact": mean([float(reward > 0.999) for reward in rewards]),
            "eval/judge": math.nan,
            **{f"eval/{name}": value for name, value in scores.items()},
            "eval/failed": float(len(results) - len(made)),
            "time/evaluate_s": watch.seconds["evaluate"],
            **{f"images/{name}": value for name, value in statistics.items()},
        }
        rows = module.cluster.lead(lambda: self._write_images(module.iteration, results))
        module.cluster.record(
            "evaluated",
            iteration=module.iteration,
            reward=metrics["eval/reward"],
            judge=metrics["eval/judge"],
            images=rows,
        )
        module.cluster.log_metrics(module.iteration, metrics)

    def _policy(self, module: FlowGRPO) -> AbstractContextManager[PolicyVersion]:
        """Inside, the weights that are evaluated are the model's and the workers'."""
        if self._average:
            return module.averaged()
        module.publish()
        return nullcontext(module.policy)

    def _request(self, module: FlowGRPO, policy: PolicyVersion, index: int) -> SampleRequest:
        seed, steps = seeds.eval_seed(index), self._spec.steps
        key = RequestKey(module.run, module.iteration, RequestKind.EVAL, index, seed, policy, steps)
        return SampleRequest(key, self._prompts[index], self._spec)

    def _write_images(self, iteration: int, results: Sequence[SampleResult]) -> list[dict[str, Any]]:
        """Writes PNG files, and their rows into manifest.json in place of later iterations'; returns the new rows."""
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = self._folder / "manifest.json"
        earlier = json.loads(manifest.read_text(encoding="utf-8")) if manifest.exists() else []
        rows = []
        for index, result in enumerate(results[: self._images]):
            if result.image is None:
                continue
            file = f"{iteration:03d}_{index:02d}.png"
            pixels = _image(result.image)
            Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(self._folder / file)
            row = {"iteration": iteration, "index": index, "prompt": self._prompts[index].text, "file": file}
            rows.append({**row, "reward": result.reward, "judge": result.scores.get("judge")})
        kept = [row for row in earlier if row["iteration"] < iteration]
        write_whole(manifest, json.dumps(kept + rows, indent=1))
        return rows


class Checkpointing(pl.Callback):
    """Saves between iterations, restores before the first one, and ends the job when the user asks for it.

    Args:
        root: `checkpoints/` of the run folder.
        every: iterations between checkpoints; the last iteration and an interrupted one are always saved.
        keep: newest checkpoints that are not deleted.
        last: number of the last iteration.
        base: checksum of the model that training started from: the reference policy, which is not saved.
        resume: the checkpoint to go on from.
        deepspeed: also save in DeepSpeed's own form, in `deepspeed/` beside them; for other programs.
    """

    def __init__(
        self,
        *,
        root: Path,
        every: int,
        keep: int,
        last: int,
        base: str,
        resume: Checkpoint | None,
        deepspeed: bool = False,
    ) -> None:
        if every < 1 or keep < 1:
            raise ValueError(f"callbacks.checkpoint.every and .keep must be at least 1, got {every} and {keep}")
        self._root = root
        self._every = every
        self._keep = keep
        self._deepspeed = deepspeed
        self._last = last
        self._base = base
        self._resume = resume

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Before any other callback looks at the module."""
        if self._resume is not None:
            restore(cast(FlowGRPO, pl_module), self._resume, base=self._base)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = cast(FlowGRPO, pl_module)
        stop = module.cluster.should_stop()
        if stop or module.iteration % self._every == 0 or module.iteration == self._last:
            watch = Stopwatch(module.cluster.now)
            with watch.phase("save"):
                content = snapshot(module, base=self._base)  # of all ranks: each may hold a part
                folder, size_bytes = module.cluster.lead(lambda: self._save(module.iteration, content))
            module.cluster.record(
                "checkpoint_saved",
                iteration=module.iteration,
                path=f"{self._root.name}/{folder.name}",
                bytes=size_bytes,
                save_s=watch.seconds["save"],
            )
            module.cluster.log_metrics(module.iteration, {"time/save_s": watch.seconds["save"]})
            if self._deepspeed:
                cast(UlyssesStrategy, trainer.strategy).save_engine(self._root / "deepspeed", folder.name)
                module.cluster.lead(lambda: checkpoint.prune(self._root / "deepspeed", keep=self._keep))
        trainer.should_stop = trainer.should_stop or stop

    def _save(self, iteration: int, content: Checkpoint) -> tuple[Path, int]:
        folder = checkpoint.save(self._root, iteration, content, keep=self._keep)
        return folder, sum(file.stat().st_size for file in folder.iterdir())


class Boundaries(pl.Callback):
    """Lets training ranks come and go, before anything else happens in an iteration.

    Args:
        base: see `Checkpointing`.
    """

    def __init__(self, *, world: ElasticWorld, base: str) -> None:
        self._world = world
        self._base = base
        self._first = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        first, self._first = self._first, False
        if not first:  # at the boundary before its first iteration a rank came in
            self._world.boundary(lambda: self._save(cast(FlowGRPO, pl_module)))

    def _save(self, module: FlowGRPO) -> str:
        known = rank_state(module, base=self._base)
        published = str(module.published) if module.published else None  # of this job: a later one publishes anew
        content = replace(known, state={**known.state, "published": published})
        return str(checkpoint.save(shared_folder(Path(os.environ[JOB_VARIABLE])), module.iteration, content, keep=1))


def snapshot(module: FlowGRPO, *, base: str) -> Checkpoint:
    """Everything that decides the rest of the run. All ranks must call it; each gets the whole."""
    known = rank_state(module, base=base)
    return replace(known, state={**known.state, "planner": module.cluster.planner_state()})


def rank_state(module: FlowGRPO, *, base: str) -> Checkpoint:
    """The part of it that the ranks know, without the coordinator."""
    moments, scalars = module.updater.state(dict(module.transformer.named_parameters()))
    return Checkpoint(
        tensors={
            "policy": module.adapter.trainable_state(),
            "optimizer": moments,
            "random": random_state(),
            **({"ema": module.ema.average} if module.ema is not None else {}),
        },
        state={
            "run": module.run,
            "seed": module.seed,
            "incarnation": module.incarnation,
            "iteration": module.iteration,
            "base": base,
            "optimizer": scalars,
            "seed_bank": module.seed_bank.state_dict(),
        },
    )


def restore(module: FlowGRPO, content: Checkpoint, *, base: str) -> None:
    """Puts the run where `snapshot` was taken.

    Raises:
        CheckpointError: the checkpoint belongs to another seed or base model.
    """
    state = content.state
    for field, here in (("seed", module.seed), ("base", base)):
        if state[field] != here:
            raise CheckpointError(f"the checkpoint was made with {field}={state[field]}, this job has {field}={here}")
    module.adapter.load_trainable_state(content.tensors["policy"])
    parameters = dict(module.transformer.named_parameters())
    module.updater.restore(parameters, content.tensors["optimizer"], state["optimizer"])
    if module.ema is not None and "ema" in content.tensors:
        module.ema.load({name: tensor.to(module.device) for name, tensor in content.tensors["ema"].items()})
    set_random_state(content.tensors["random"])
    module.seed_bank.load_state_dict(state["seed_bank"])
    if "planner" in state:
        module.cluster.restore_planner(state["planner"])
    module.published = PolicyVersion.parse(state["published"]) if state.get("published") else None
    module.iteration = state["iteration"]


def random_state() -> dict[str, Tensor]:
    """States of torch's generators: `torch` for the CPU, and `cuda0`, `cuda1`, ... if this process uses GPUs."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.get_rng_state_all() if used else []
    return {"torch": torch.get_rng_state(), **{f"cuda{number}": state for number, state in enumerate(gpus)}}


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Puts back what `random_state` gave, but for GPUs that this machine lacks."""
    torch.set_rng_state(states["torch"])
    for number in range(torch.cuda.device_count()):
        if f"cuda{number}" in states:
            torch.cuda.set_rng_state(states[f"cuda{number}"], number)


def _image(blob: Blob | None) -> NDArray[np.uint8]:
    assert blob is not None
    return np.frombuffer(blob.buffer, dtype=np.uint8).reshape(blob.shape)
