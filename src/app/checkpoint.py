"""Checkpoints: a folder of safetensors and JSON with a manifest of sha256, written aside and renamed.

A checkpoint is taken between two iterations, when no exploration is open, and holds all that decides the rest of
the run: the trained weights, the optimizer, the iteration, the seeds chosen for the next batch, what the planner has
learnt, the random state.
The frozen reference is the model folder itself: its checksum is held, and another base is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from src.core.folders import FolderError, seal, verify

PREFIX = "iteration_"


class CheckpointError(ValueError):
    """A checkpoint is missing, truncated or altered; the message names it."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of one checkpoint: tensors by file name, and one JSON state."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def save(root: Path, iteration: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes `root/iteration_000012` and deletes all but the newest `keep` checkpoints."""
    target = root / f"{PREFIX}{iteration:06d}"
    aside = root / f".{target.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, tensors in checkpoint.tensors.items():
        save_file(dict(tensors), aside / f"{name}.safetensors")
    (aside / "state.json").write_text(json.dumps(checkpoint.state), encoding="utf-8")
    seal(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    prune(root, keep=keep)
    return target


def prune(root: Path, *, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints."""
    for old in found(root)[:-keep]:
        shutil.rmtree(old)


def load(folder: Path) -> Checkpoint:
    """Reads a checkpoint after checking every file against the manifest.

    Raises:
        CheckpointError: it is missing, truncated or altered.
    """
    try:
        verify(folder)
    except FolderError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be used: {error}") from error
    tensors = {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    return Checkpoint(tensors, json.loads((folder / "state.json").read_text(encoding="utf-8")))


def found(root: Path) -> list[Path]:
    """Checkpoint folders below `root`, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if path.is_dir())
