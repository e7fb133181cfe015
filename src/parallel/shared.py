"""What the engines of processes that share sequences have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from src.core.protocols import Engine
from src.core.types import Commit, SampleRequest


@dataclass(frozen=True)
class Part:
    """What the members of a group denoise together."""

    requests: tuple[SampleRequest, ...]
    resume: tuple[Commit, ...]


class EngineOfGroup:
    """An engine of one process, of which a group makes one; whatever does not concern the others is its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def fingerprint(self) -> str:
        return self._engine.fingerprint

    @property
    def batch_size(self) -> int:
        return self._engine.batch_size

    def load_weights(self, folder: Path) -> str:
        return self._engine.load_weights(folder)

    def weights_changed(self) -> str:
        return self._engine.weights_changed()
