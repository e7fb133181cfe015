"""Where models are: folders in diffusers' layout, or ids on the Hugging Face hub. No torch here."""

from __future__ import annotations

import json
import re
from pathlib import Path

INDEX = "model_index.json"

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""owner/name on the hub."""


def is_hub_id(path: str | Path) -> bool:
    """Whether `path` names a model on the hub: it looks like one, and there is no such folder here."""
    return not Path(path).exists() and bool(HUB_ID.fullmatch(str(path)))


def is_model(path: str | Path) -> bool:
    """Whether `path` is a model folder, or could be an id on the hub."""
    return (Path(path) / INDEX).is_file() or is_hub_id(path)


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
