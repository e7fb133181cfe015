"""What the engines of processes that share sequences have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from io import BytesIO
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from src.core.protocols import Engine
from src.core.types import Commit, SampleRequest


@dataclass(frozen=True)
class Part:
    """What the members of a group denoise together."""

    requests: tuple[SampleRequest, ...]
    resume: tuple[Commit, ...]

    def pack(self) -> bytes:
        """For another process: a line of JSON, then the bytes of all arrays. Whoever reads it runs nothing."""
        arrays: list[bytes] = []

        def plain(value: Any) -> Any:
            if isinstance(value, bytes):
                arrays.append(value)
                return len(value)
            return {field.name: getattr(value, field.name) for field in fields(value)}

        return json.dumps(self, default=plain).encode() + b"\n" + b"".join(arrays)

    @classmethod
    def unpack(cls, packed: bytes) -> Part:
        """The inverse of `pack`."""
        rest = BytesIO(packed)
        part: Part = _rebuilt(cls, json.loads(rest.readline()), rest)
        return part


def _rebuilt(kind: Any, value: Any, arrays: BytesIO) -> Any:
    """What `plain` JSON stands for, by its type."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        types = get_type_hints(kind)
        return kind(**{name: _rebuilt(types[name], each, arrays) for name, each in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_rebuilt(get_args(kind)[0], each, arrays) for each in value)
    if kind is bytes:
        return arrays.read(value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, IntEnum) else value


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
