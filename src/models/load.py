"""Opens a model in diffusers' layout, from a folder or from the Hugging Face hub, whatever model it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from src.models import tiny
from src.models.adapter import DiTAdapter
from src.models.flux import load_flux
from src.models.pipelines import PipelineSettings
from src.models.qwen_image import load_qwen_image
from src.models.sd3 import load_sd3

INDEX = "model_index.json"

PIPELINES: Mapping[str, Callable[[Path, PipelineSettings], DiTAdapter]] = {
    "QwenImagePipeline": load_qwen_image,
    "StableDiffusion3Pipeline": load_sd3,
    "FluxPipeline": load_flux,
}
"""Loader of a published model by the `_class_name` in its model_index.json."""

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""owner/name on the hub."""


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
    folder = Path(path)
    if not folder.is_dir() and HUB_ID.fullmatch(str(path)):
        folder = download(str(path), revision)
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


def is_model(path: str | Path) -> bool:
    """Whether `path` is a model folder, or could be an id on the hub."""
    return (Path(path) / INDEX).is_file() or (not Path(path).exists() and bool(HUB_ID.fullmatch(str(path))))


def pipeline_class(folder: Path) -> str:
    """The `_class_name` of a model folder.

    Raises:
        ValueError: it is no model folder, or its index is damaged.
    """
    try:
        name: str = json.loads((folder / INDEX).read_text(encoding="utf-8"))["_class_name"]
    except FileNotFoundError:
        raise ValueError(f"model path {folder} is not a model folder: it has no {INDEX}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged: {error!r}") from error
    return name


def download(repo: str, revision: str | None = None) -> Path:
    """A snapshot of a model on the hub: the folders its index names, as safetensors and full-precision files only.

    Raises:
        ValueError: the model is gated or unknown, or the hub cannot be reached and no copy is at hand.
    """
    try:
        index = huggingface_hub.hf_hub_download(repo, INDEX, revision=revision)
        parts = [name for name in json.loads(Path(index).read_text(encoding="utf-8")) if not name.startswith("_")]
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[INDEX, *(f"{part}/*" for part in parts)],
            ignore_patterns=["*.bin", "*.fp16*", "*.msgpack", "*.onnx*"],
        )
    except GatedRepoError:
        raise ValueError(
            f"model {repo} is gated: accept its licence at https://huggingface.co/{repo} and log in (`hf auth login`)"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"model {repo} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ValueError(f"model {repo}: neither a folder here nor public on the hub (private: `hf auth login`)") from None
    except (HfHubHTTPError, OSError) as error:  # offline is an OSError: httpx's and the hub's own errors too
        raise ValueError(f"model {repo} cannot be downloaded: {str(error).splitlines()[0]}") from error
    return Path(folder)


def _opened(folder: Path, load: Callable[[], DiTAdapter]) -> DiTAdapter:
    try:
        return load()
    except Exception as error:  # the file formats raise many kinds, the reader needs the folder's name
        raise ValueError(f"model folder {folder} is incomplete or damaged: {error}") from error
