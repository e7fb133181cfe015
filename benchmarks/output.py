"""What every benchmark prints: one JSON line on standard output, everything else on standard error."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from src.core.stats import mean, variance


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
    }


def print_figures(name: str, figures: Mapping[str, Any]) -> None:
    """The benchmark's line. Numbers that do not exist are null: JSON has no NaN."""
    line = {"name": name, **figures, "machine": machine()}
    print(json.dumps(_without_nan(line), allow_nan=False), flush=True)


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (ddof = 1); NaN for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    return float((variance(values) * len(values) / (len(values) - 1)) ** 0.5)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation over seeds."""
    return {"mean": mean(values), "sd": deviation(values)}


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return value
