"""Opens a model folder in diffusers' layout, whatever model it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from src.models import tiny
from src.models.adapter import DiTAdapter

LOADERS: Mapping[str, Callable[[Path], DiTAdapter]] = {tiny.PIPELINE_CLASS: tiny.load_pretrained}
"""Loader by the `_class_name` of the folder's model_index.json."""


def load_adapter(path: str | Path) -> DiTAdapter:
    """The model in `path`, with a frozen prompt encoder and a trainable transformer.

    Raises:
        ValueError: there is no such folder, it is incomplete or damaged, or its pipeline class is unknown.
    """
    folder = Path(path)
    index_file = folder / "model_index.json"
    try:
        pipeline = json.loads(index_file.read_text(encoding="utf-8"))["_class_name"]
    except FileNotFoundError:
        raise ValueError(f"model path {folder} is not a model folder: it has no model_index.json") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{index_file} is damaged: {error!r}") from error
    if pipeline not in LOADERS:
        raise ValueError(f"{index_file}: no adapter for pipeline {pipeline!r}, known: {sorted(LOADERS)}")
    try:
        return LOADERS[pipeline](folder)
    except Exception as error:  # the file formats raise many kinds, the reader needs the folder's name
        raise ValueError(f"model folder {folder} is incomplete or damaged: {error}") from error
