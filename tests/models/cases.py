"""How tests ask for the same image of our sampler and of a family's own pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from src.models.adapter import DiTAdapter
from src.models.load import load_adapter, load_schedule
from src.models.packing import unpack
from src.models.sampler import Sampler
from src.models.steps import FlowSDE


@dataclass(frozen=True)
class Case:
    """A family, and how its pipeline and our sampler are asked for the same image."""

    call: dict[str, Any]
    guidance: float
    tokens: int = 96


CASES = {
    "qwen_image": Case({"true_cfg_scale": 4.0, "negative_prompt": " "}, 4.0, tokens=160),
    "sd3": Case({"guidance_scale": 4.5, "negative_prompt": ""}, 4.5),
    "flux": Case({"guidance_scale": 3.5}, 3.5),
}


def opened(folders: dict[str, Path], family: str, height: int, width: int, **settings: Any) -> DiTAdapter:
    chosen = {"dtype": "float32", "prompt_tokens": CASES[family].tokens} | settings
    return load_adapter(folders[family], height=height, width=width, **chosen)


def sampler_of(
    folders: dict[str, Path], adapter: DiTAdapter, family: str, *, batch_size: int = 2, steps: int = 4
) -> Sampler:
    height, width = adapter.image_size
    return Sampler(
        adapter=adapter,
        rule=FlowSDE(noise_level=0.7),
        schedule_for=load_schedule(folders[family], height=height, width=width),
        noise_steps=steps,
        batch_size=batch_size,
    )


def pipeline_latents(family: str, noise_BLC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    if family != "sd3":
        return noise_BLC
    return unpack(noise_BLC, rows=height // 16, columns=width // 16)
