"""Prompt sets of the field, read from files: text (OCR, preference) and JSON lines (GenEval)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from src.core.types import Prompt


class PromptSet:
    """Prompts to train on and prompts to evaluate on, each from a file that `read_prompts` understands."""

    def __init__(self, *, name: str, train: str | Path, heldout: str | Path) -> None:
        self.name = name
        self._train = Path(train)
        self._heldout = Path(heldout)

    @cached_property
    def train_prompts(self) -> Sequence[Prompt]:
        return read_prompts(self._train)

    @cached_property
    def heldout_prompts(self) -> Sequence[Prompt]:
        return read_prompts(self._heldout)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, in its order.

    `.txt` has one prompt a line; where a line has a part in double quotes, that is the text to render, and the
    metadata's `target`. `.jsonl` has one object a line with a `prompt`; the whole object is the metadata.

    Raises:
        ValueError: there is no such file, its kind is unknown, it has no prompt, or a line is not as it should be.
    """
    if path.suffix not in _READERS:
        raise ValueError(f"a prompt file must end with one of {sorted(_READERS)}, got {path}")
    if not path.is_file():
        raise ValueError(f"there is no prompt file {path}")
    lines = path.read_text(encoding="utf-8").splitlines()
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            text, metadata = _READERS[path.suffix](line, f"{path}:{number}")
            prompts.append(Prompt(id=len(prompts), text=text, metadata=metadata))
    if not prompts:
        raise ValueError(f"prompt file {path} is empty")
    return tuple(prompts)


def _text_line(line: str, place: str) -> tuple[str, dict[str, Any]]:
    quoted = line.split('"')
    return line.strip(), {"target": quoted[1]} if len(quoted) > 2 else {}


def _json_line(line: str, place: str) -> tuple[str, dict[str, Any]]:
    try:
        row = json.loads(line)
        text = row["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{place} is no JSON object with a prompt: {error!r}") from error
    if not isinstance(text, str) or not text:
        raise ValueError(f"{place}: prompt must be a text, got {text!r}")
    return text, row


_READERS: Mapping[str, Callable[[str, str], tuple[str, dict[str, Any]]]] = {".txt": _text_line, ".jsonl": _json_line}
