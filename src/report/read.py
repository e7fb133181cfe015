"""A run folder as plain data. Reads what is there: a run that was killed, or still runs, is a run too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from src.core.events import Event, read_jsonl

Curve = tuple[tuple[float, float], ...]
"""(step, value) by increasing step; values are finite."""


@dataclass(frozen=True)
class Picture:
    """A held-out image: `iteration` 0 was made before training; equal `index` means equal prompt and seed."""

    iteration: int
    index: int
    prompt: str
    reward: float
    judge: float | None
    path: Path


@dataclass(frozen=True)
class Run:
    """Everything that a report shows of one run."""

    folder: Path
    events: tuple[Event, ...]
    curves: Mapping[str, Curve]
    summary: Mapping[str, Any]
    """Empty until the run has ended."""
    config: str
    """config.yaml as it stands."""
    settings: Mapping[str, str]
    """What it says, by dotted name; see `flatten`."""
    pictures: tuple[Picture, ...]

    @property
    def name(self) -> str:
        """The last two parts of the folder: Hydra's date and time."""
        return "/".join(self.folder.parts[-2:])

    @property
    def status(self) -> str:
        """What `run_ended` says; `unfinished` without one (also after a restart that has not ended yet)."""
        last = next((e for e in reversed(self.events) if e["kind"] in ("run_started", "run_ended")), None)
        return str(last["status"]) if last is not None and last["kind"] == "run_ended" else "unfinished"

    @property
    def wall_s(self) -> float:
        """Seconds from the first start to the last event, restarts included."""
        return max((float(event["time_s"]) for event in self.events), default=0.0)


def read_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        ValueError: `folder` is no run folder, or a file in it is damaged (other than by a torn last line);
            the message names the folder or the file and line.
    """
    events_file = folder / "events.jsonl"
    if not events_file.is_file():
        raise ValueError(f"{folder} is no run folder: it has no events.jsonl")
    metrics_file = folder / "metrics.jsonl"
    config_file = folder / "config.yaml"
    config = config_file.read_text(encoding="utf-8") if config_file.is_file() else ""
    return Run(
        folder=folder.resolve(),
        events=_events(events_file),
        curves=curves(read_jsonl(metrics_file)) if metrics_file.is_file() else {},
        summary=_json(folder / "summary.json", default={}),
        config=config,
        settings=_settings(config, config_file),
        pictures=_pictures(folder / "images"),
    )


def _events(path: Path) -> tuple[Event, ...]:
    events = tuple(read_jsonl(path))
    for line, event in enumerate(events, start=1):
        if not (isinstance(event.get("time_s"), (int, float)) and isinstance(event.get("kind"), str)):
            raise ValueError(f"{path}:{line}: an event has time_s and kind")
    return events


def _settings(config: str, path: Path) -> dict[str, str]:
    try:
        return flatten(config)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def curves(rows: Any) -> dict[str, Curve]:
    """Metric rows {"step", "time_s", name: value, ...} as one curve per name.

    Of several values at one step the last counts: a resumed run does its last steps again. NaN and infinite
    values (nothing to measure in that step) are left out.
    """
    values: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time_s") and isinstance(value, (int, float)) and math.isfinite(value):
                values.setdefault(name, {})[float(row["step"])] = float(value)
    return {name: tuple(sorted(points.items())) for name, points in values.items()}


def flatten(config: str) -> dict[str, str]:
    """The values of a config.yaml by dotted name: `algo:\\n  noise_level: 0.7` gives `algo.noise_level`.

    Numbers and truth values as YAML writes them, lists in brackets, nothing as `null`.

    Raises:
        ValueError: it is no mapping.
        yaml.YAMLError: it is no YAML.
    """
    tree = yaml.safe_load(config) or {}
    if not isinstance(tree, dict):
        raise ValueError("a configuration maps names to values")
    return dict(_leaves(tree))


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def _pictures(folder: Path) -> tuple[Picture, ...]:
    rows = _json(folder / "manifest.json", default=[])
    try:
        pictures = [
            Picture(
                iteration=int(row["iteration"]),
                index=int(row["index"]),
                prompt=str(row["prompt"]),
                reward=float(row["reward"]),
                judge=None if row["judge"] is None else float(row["judge"]),
                path=folder / Path(row["file"]).name,
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'manifest.json'}: unexpected row: {error!r}") from error
    return tuple(sorted(pictures, key=lambda picture: (picture.iteration, picture.index)))


def _json(path: Path, *, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
