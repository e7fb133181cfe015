"""Files and folders that are either whole or not there: atomic writes, and manifests with the sha256 of every file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


class FolderError(ValueError):
    """A sealed folder is missing, truncated or altered; the message names the file."""


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader, or whoever comes after a kill, finds the old or the new content, never a part."""
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def seal(folder: Path, **facts: str) -> None:
    """Writes the manifest of all files in `folder`, and what else is to be known of it. Call it last, before the folder
    gets its final name."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a sealed folder; its `files` are the sha256 of each by name. They are there, but not looked into.

    Raises:
        FolderError: the folder, its manifest or a file is missing, or the manifest is damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"] = dict(manifest["files"])
    except FileNotFoundError:
        raise FolderError(f"{folder / MANIFEST} does not exist") from None
    except (ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{folder / MANIFEST} is damaged: {error}") from error
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise FolderError(f"{missing[0]} is missing")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Checks every file of `folder` against its manifest, and returns the manifest.

    Raises:
        FolderError: the folder, its manifest or a file is missing, or a file is not what was sealed.
    """
    manifest = read_manifest(folder)
    for name, digest in manifest["files"].items():
        if sha256(folder / name) != digest:
            raise FolderError(f"{name} is truncated or altered (its sha256 differs from the manifest)")
    return manifest


def sha256(path: Path) -> str:
    """Hex digits of a file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
