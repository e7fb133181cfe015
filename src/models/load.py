"""Opens a model in diffusers' layout, from a folder or from the Hugging Face hub, whatever model it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from src.models import tiny
from src.models.adapter import DiTAdapter
from src.models.flux import load_flux
from src.models.hub import download
from src.models.location import INDEX, is_hub_id, pipeline_class
from src.models.pipelines import PipelineSettings
from src.models.qwen_image import load_qwen_image
from src.models.schedule import ShiftedSchedule, diffusers_schedule, image_tokens
from src.models.sd3 import load_sd3

PIPELINES: Mapping[str, Callable[[Path, PipelineSettings], DiTAdapter]] = {
    "QwenImagePipeline": load_qwen_image,
    "StableDiffusion3Pipeline": load_sd3,
    "FluxPipeline": load_flux,
}
"""Loader of a published model by the `_class_name` in its model_index.json."""

SCHEDULER_MAKES_LEVELS = frozenset({"StableDiffusion3Pipeline"})
"""Pipelines that leave the noise levels to their scheduler; see `schedule.diffusers_schedule`."""


def load_adapter(path: str | Path, *, revision: str | None = None, **settings: Any) -> DiTAdapter:
    """The model in `path`, with frozen encoders and a trainable transformer.

    Args:
        path: a folder, or an id on the Hugging Face hub such as "Qwen/Qwen-Image" if there is no such folder.
        revision: branch, tag or commit on the hub.
        settings: of `PipelineSettings`, for published models; the tiny models of this project take none.

    Raises:
        ValueError: there is no such model, it is gated, incomplete or damaged, its pipeline class is unknown,
            or a setting does not fit.
    """
    folder = _folder(path, revision)
    pipeline = pipeline_class(folder)
    if pipeline == tiny.PIPELINE_CLASS:
        if settings:
            raise ValueError(f"{folder} is a tiny model, which takes no settings, got {sorted(settings)}")
        return _opened(folder, lambda: tiny.load_pretrained(folder))
    if pipeline not in PIPELINES:
        known = sorted([*PIPELINES, tiny.PIPELINE_CLASS])
        raise ValueError(f"{folder / INDEX}: no adapter for pipeline {pipeline!r}, known: {known}")
    chosen = PipelineSettings(**settings)
    return _opened(folder, lambda: PIPELINES[pipeline](folder, chosen))


def load_schedule(path: str | Path, *, revision: str | None = None, height: int, width: int) -> ShiftedSchedule:
    """The noise schedule that a published model comes with, for images of this size in pixels.

    Raises:
        ValueError: there is no such model, its scheduler_config.json is damaged, or holds what is not known here.
    """
    folder = _folder(path, revision)
    pipeline, file = pipeline_class(folder), folder / "scheduler" / "scheduler_config.json"
    try:
        return diffusers_schedule(
            json.loads(file.read_text(encoding="utf-8")),
            image_tokens=image_tokens(height, width),
            own_levels=pipeline in SCHEDULER_MAKES_LEVELS,
        )
    except (ArithmeticError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def _folder(path: str | Path, revision: str | None) -> Path:
    return download(str(path), revision) if is_hub_id(path) else Path(path)


def _opened(folder: Path, load: Callable[[], DiTAdapter]) -> DiTAdapter:
    try:
        return load()
    except Exception as error:  # the file formats raise many kinds, the reader needs the folder's name
        raise ValueError(f"model folder {folder} is incomplete or damaged: {error}") from error
