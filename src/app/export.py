"""The trained LoRA adapter in the run folder: `pipeline.load_lora_weights(run_folder)` in plain diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl

from src.app.config import Config
from src.models.location import is_hub_id
from src.rl.module import FlowGRPO

CARD = """\
---
library_name: diffusers
pipeline_tag: text-to-image
tags: [text-to-image, diffusers, lora, reinforcement-learning]
{base_model}---

# {name}

A LoRA adapter (rank {rank}, alpha {alpha}) of `{path}`, post-trained with Flow-GRPO on the reward `{reward}` for
{iteration} iterations. Held-out images were made with {steps} steps, guidance {guidance} and {size}.

```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{path}", torch_dtype=torch.bfloat16).to("cuda")
pipeline.load_lora_weights("{folder}")
image = pipeline("a prompt").images[0]
```
{average}"""

AVERAGE = """
`ema/` holds the running average of the adapter over the training: load it in the same way.
"""


class LoRAExport(pl.Callback):
    """Writes the adapter, its running average if there is one, and a model card.

    Args:
        every: iterations between exports; the last iteration and an interrupted one are always exported.
        folder: the run folder.
        last: number of the last iteration.
        config: of the run, for the card.
    """

    def __init__(self, *, every: int, folder: Path, last: int, config: Config) -> None:
        if every < 1:
            raise ValueError(f"callbacks.export.every must be at least 1, got {every}")
        self._every = every
        self._folder = folder
        self._last = last
        self._config = config

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = cast(FlowGRPO, pl_module)
        due = module.iteration % self._every == 0 or module.iteration == self._last
        if self._config["model"]["lora"] is not None and (due or module.cluster.should_stop()):
            module.cluster.lead(lambda: export(module, self._folder, self._config))


def export(module: FlowGRPO, folder: Path, config: Config) -> None:
    """The adapter as it is now, as `folder`."""
    from src.models.export import save_lora  # imported here: slow to load

    save_lora(module.transformer, folder)
    if module.ema is not None:
        save_lora(module.transformer, folder / "ema", module.ema.average)
    (folder / "README.md").write_text(
        model_card(config, folder, iteration=module.iteration, averaged=module.ema is not None), encoding="utf-8"
    )


def model_card(config: Config, folder: Path, *, iteration: int, averaged: bool) -> str:
    """The text of README.md: what the adapter is, and how to use it."""
    model, algo = config["model"], config["algo"]
    size = model["load"]
    return CARD.format(
        name=config["name"],
        base_model=f"base_model: {model['path']}\n" if is_hub_id(model["path"]) else "",
        path=model["path"],
        rank=model["lora"]["rank"],
        alpha=model["lora"]["alpha"],
        reward=reward_name(config["reward"]["reward"]),
        iteration=iteration,
        steps=algo["eval_steps"],
        guidance=algo["guidance_scale"],
        size=f"{size['height']} x {size['width']} pixels" if "height" in size else "the model's own size",
        folder=folder,
        average=AVERAGE if averaged else "",
    )


def reward_name(section: Mapping[str, Any]) -> str:
    """What people call the reward of a configuration's section: the names of a sum's terms, or its own."""
    terms = section.get("terms", {})
    own = section.get("function", {}).get("path") or section.get("name") or section["_target_"].rpartition(".")[2]
    return " + ".join(terms) or str(own)
