"""Prompt sets of the field, read from files: text (OCR, preference), JSON lines (GenEval), Parquet, Arrow datasets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from src.core.types import Prompt

Rows = Iterator[tuple[str, Any, Mapping[str, Any]]]
"""Place (for messages), prompt and metadata of each row of a file."""


class PromptSet:
    """Prompts to train on and prompts to evaluate on, from files that `read_prompts` understands.

    Args:
        train: the prompts to train on.
        heldout: those to evaluate on. None: the ones that `split` takes out of `train`.
        split: number of texts to take out, those with the smallest sha256. So the split depends on nothing but the
            texts, and rows with equal texts stay together.

    Raises:
        ValueError: not exactly one of `heldout` and `split` is given, or `split` leaves nothing to train on.
    """

    def __init__(
        self, *, name: str, train: str | Path, heldout: str | Path | None = None, split: int | None = None
    ) -> None:
        if (heldout is None) == (split is None):
            raise ValueError(f"either heldout or split must be given, got heldout={heldout} and split={split}")
        if split is not None and split < 1:
            raise ValueError(f"split must be at least 1, got {split}")
        self.name = name
        self._train = Path(train)
        self._heldout = None if heldout is None else Path(heldout)
        self._split = split

    @cached_property
    def train_prompts(self) -> Sequence[Prompt]:
        return self._parts[0]

    @cached_property
    def heldout_prompts(self) -> Sequence[Prompt]:
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        prompts = read_prompts(self._train)
        if self._heldout is not None:
            return prompts, read_prompts(self._heldout)
        texts = sorted({prompt.text for prompt in prompts}, key=lambda text: hashlib.sha256(text.encode()).digest())
        assert self._split is not None
        if self._split >= len(texts):
            raise ValueError(f"split must be less than the {len(texts)} texts of {self._train}, got {self._split}")
        taken = set(texts[: self._split])
        return (
            _numbered((prompt.text, prompt.metadata) for prompt in prompts if prompt.text not in taken),
            _numbered((prompt.text, prompt.metadata) for prompt in prompts if prompt.text in taken),
        )


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, in its order.

    `.txt` has one prompt a line. `.jsonl` has one object a line, `.parquet` and a folder that Hugging Face's
    `Dataset.save_to_disk` wrote have rows with a `prompt`; the whole row is the metadata, without what is null. Where
    that has no `target` and the prompt has a part in double quotes, this is the text to render, the `target`.
    A name with `*` means all files that fit, in the order of their names, such as the shards of a Parquet data set.

    Raises:
        ValueError: there is no such file, its kind is unknown, it has no prompt, or a row is not as it should be.
    """
    if path.suffix not in _READERS:
        kinds = ", ".join(name or "a folder of Dataset.save_to_disk" for name in _READERS)
        raise ValueError(f"a prompt file must be one of {kinds}, got {path}")
    files = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
    if not files or not files[0].exists():
        raise ValueError(f"there is no prompt file {path}")
    rows = [_checked(*row) for file in files for row in _READERS[path.suffix](file)]
    if not rows:
        raise ValueError(f"prompt file {path} is empty")
    return _numbered(rows)


def _numbered(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[Prompt, ...]:
    return tuple(Prompt(id=number, text=text, metadata=metadata) for number, (text, metadata) in enumerate(rows))


def _checked(place: str, text: Any, metadata: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: prompt must be a text, got {text!r}")
    quoted = text.split('"')
    return text, {"target": quoted[1], **metadata} if len(quoted) > 2 else metadata


def _text_rows(file: Path) -> Rows:
    for place, line in _lines(file):
        yield place, line.strip(), {}


def _json_rows(file: Path) -> Rows:
    for place, line in _lines(file):
        try:
            row = json.loads(line)
            text = row["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{place} is no JSON object with a prompt: {error!r}") from error
        yield place, text, row


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            yield f"{file}:{number}", line


def _parquet_rows(file: Path) -> Rows:
    from pyarrow import parquet  # imported here: other kinds of files need it not

    return _table_rows(file, parquet.read_table)


def _dataset_rows(folder: Path) -> Rows:
    """What `Dataset.save_to_disk` wrote: Arrow streams, listed by state.json."""
    from pyarrow import ipc

    splits, state = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        raise ValueError(f"{folder} holds the splits {', '.join(names)}: give one of them, such as {folder / names[0]}")
    if not state.is_file():
        raise ValueError(f"{folder} is no folder of Dataset.save_to_disk: it has no state.json")
    for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]:
        yield from _table_rows(folder / entry["filename"], lambda file: ipc.open_stream(file).read_all())


def _table_rows(file: Path, read: Callable[[Path], Any]) -> Rows:
    """Rows of an Arrow table, counted from 1 in each file."""
    try:
        table = read(file)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{file} cannot be read: {error}") from error
    if "prompt" not in table.column_names:
        raise ValueError(f"{file} has no column prompt, only {', '.join(table.column_names)}")
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{file}:{number}", row["prompt"], _without_null(row)


def _without_null(value: Any) -> Any:
    """Tables give every object all keys that any object has, the missing ones as null."""
    if isinstance(value, Mapping):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


_READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".txt": _text_rows,
    ".jsonl": _json_rows,
    ".parquet": _parquet_rows,
    "": _dataset_rows,
}
"""By the ending of the name."""
