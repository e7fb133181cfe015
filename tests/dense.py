"""Traces of markets on which much happens in little time."""

from __future__ import annotations

import random
from pathlib import Path


def dense_trace(
    path: Path,
    *,
    nodes: int,
    up_s: tuple[float, float],
    down_s: tuple[float, float] = (1.5, 3.0),
    until_s: float = 900.0,
) -> Path:
    """Each of the nodes is there for about `up_s` seconds at a time, and gone for about `down_s`."""
    rng = random.Random(5)
    rows = []
    for place in range(nodes):
        time_s, life = 0.0, 0
        while time_s < until_s:
            rows.append((time_s, "add", f"n{place}-{life}"))
            time_s += rng.uniform(*up_s) + (20.0 if life == 0 else 0.0)  # the first start takes longer
            rows.append((time_s, "remove", f"n{place}-{life}"))
            time_s, life = time_s + rng.uniform(*down_s), life + 1
    lines = [f"{int(1000 * time_s)},{what},{node}" for time_s, what, node in sorted(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path
