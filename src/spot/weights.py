"""Published policy weights: one folder per version, complete or absent, and never changed.

    <root>/0.7/                what `save` wrote (safetensors and such)
    <root>/0.7/manifest.json   {"version": "0.7", "checksum": ..., "files": {name: sha256}}, see core.folders

A version is written beside its final place and renamed, so that a reader sees all of it or nothing. It is not
synced to disk: after a power cut the job goes on from its checkpoint and publishes anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.core import folders
from src.core.protocols import Engine
from src.core.types import PolicyVersion


@dataclass(frozen=True)
class Published:
    version: PolicyVersion
    folder: Path
    checksum: str
    """Of the weights themselves, as their writer and every reader compute it (not of the files)."""
    bytes: int


def folder_of(root: Path, version: PolicyVersion) -> Path:
    return root / str(version)


def publish(root: Path, version: PolicyVersion, save: Callable[[Path], str]) -> Published:
    """Writes and publishes a version; `save(folder)` writes its files and returns the weights' checksum.

    There is one publisher at a time. Raises ValueError if `version` is not newer than all that are there.
    """
    root.mkdir(parents=True, exist_ok=True)
    newest = max(versions(root), default=None)
    if newest is not None and version <= newest:
        raise ValueError(f"weights {version} are not newer than the published {newest} in {root}")
    for leftover in root.glob(".*"):
        shutil.rmtree(leftover)
    draft = root / f".{version}"
    draft.mkdir()
    checksum = save(draft)
    size_bytes = sum(path.stat().st_size for path in draft.iterdir())
    folders.seal(draft, version=str(version), checksum=checksum)
    folder = folder_of(root, version)
    draft.rename(folder)
    return Published(version, folder, checksum, size_bytes)


def find(root: Path, version: PolicyVersion) -> Published:
    """A published version, whose files are not looked into.

    Raises:
        FolderError: it is missing, or another version; the message names folder and file.
    """
    return _found(root, version, folders.read_manifest)


def verify(root: Path, version: PolicyVersion) -> Published:
    """As `find`, and checks each file.

    Raises:
        FolderError: it is missing, not as it was published, or another version; the message names folder and file.
    """
    return _found(root, version, folders.verify)


def _found(root: Path, version: PolicyVersion, read: Callable[[Path], Mapping[str, Any]]) -> Published:
    folder = folder_of(root, version)
    try:
        manifest = read(folder)
        size_bytes = sum((folder / name).stat().st_size for name in manifest["files"])
    except (folders.FolderError, FileNotFoundError) as error:  # the latter if it is retired meanwhile
        raise folders.FolderError(f"weights {version} in {folder}: {error}") from error
    if manifest.get("version") != str(version):
        raise folders.FolderError(f"weights in {folder} say that they are version {manifest.get('version')}")
    return Published(version, folder, manifest["checksum"], size_bytes)


def load(published: Published, engine: Engine) -> None:
    """Has the engine hold a published policy. What it then holds is checked, and so are the files, in effect: they are
    read again only to name one that is damaged, since either check takes half a second for a gigabyte.

    Raises:
        FolderError: a file is not as it was published.
        ValueError: the engine holds another policy, and all that it would make would be rejected.
        Exception: what the engine raises.
    """
    try:
        checksum = engine.load_weights(published.folder)
    except Exception:
        verify(published.folder.parent, published.version)
        raise
    if checksum != published.checksum:
        verify(published.folder.parent, published.version)
        raise ValueError(
            f"weights {published.version}: the engine holds {checksum} after loading {published.folder}, "
            f"but {published.checksum} was published"
        )


def remove(root: Path, old: Iterable[PolicyVersion]) -> None:
    """Deletes versions that nobody needs any more."""
    for version in old:
        folder = folder_of(root, version)
        if folder.exists():
            grave = folder.rename(root / f".{version}")
            shutil.rmtree(grave)


def versions(root: Path) -> list[PolicyVersion]:
    """The versions that are there, oldest first."""
    return sorted(PolicyVersion.parse(folder.name) for folder in root.glob("[0-9]*.[0-9]*"))
