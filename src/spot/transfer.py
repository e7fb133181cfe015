"""How published weights get to other machines: as objects in Ray's store, one per file.

The coordinator puts each file there once, however many workers ask; Ray moves it to each machine once, and from machine
to machine. A worker writes it down, and loads and checks it as it does a folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from src.core.types import PolicyVersion
from src.spot import weights
from src.spot.client import call
from src.spot.session import ray


class Shelf:
    """The files that were asked for, in the coordinator's process: objects end with the process that put them there."""

    def __init__(self) -> None:
        self._files: dict[PolicyVersion, Mapping[str, Any]] = {}

    def files(self, root: Path, version: PolicyVersion) -> Mapping[str, Any]:
        """References to the bytes of each file of a published version, by name.

        Raises:
            FileNotFoundError: it is not there, or not any more.
        """
        if version not in self._files:
            folder = weights.folder_of(root, version)
            self._files[version] = {path.name: ray.put(np.fromfile(path, np.uint8)) for path in folder.iterdir()}
        return self._files[version]

    def drop(self, old: Iterable[PolicyVersion]) -> None:
        """Nobody needs these versions any more."""
        for version in old:
            self._files.pop(version, None)


@contextmanager
def fetched(host: Any, version: PolicyVersion) -> Iterator[weights.Published]:
    """A copy of a published policy, from the coordinator, in a folder that is deleted in the end."""
    files: Mapping[str, Any] = call(host.weights, version)
    with tempfile.TemporaryDirectory(prefix="spotlight-weights-") as root:
        folder = weights.folder_of(Path(root), version)
        folder.mkdir()
        for name, content in zip(files, ray.get(list(files.values())), strict=True):
            content.tofile(folder / name)
        yield weights.find(Path(root), version)
