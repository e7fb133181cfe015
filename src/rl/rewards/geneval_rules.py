"""GenEval's rules (Ghosh et al., 2023): whether detected objects are what a prompt's metadata asks for.

Objects come by class, the most confident first: count and colour are judged on the first ones only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITION_THRESHOLD = 0.1
"""Share of both objects' extent by which their centres must differ to be off-centre at all."""


@dataclass(frozen=True)
class Found:
    """A detected object: its box (left, top, right, bottom) in pixels, and the mask of its pixels."""

    box: tuple[float, float, float, float]
    mask_HW: NDArray[np.bool_] | None = None


Objects = Mapping[str, Sequence[Found]]
"""Detected objects by class name, the most confident first."""

ColorsOf = Callable[[Sequence[Found], str], Sequence[str]]
"""The colours of objects of a class."""


def relations(a: Found, b: Found) -> set[str]:
    """How `a` lies to `b`: where its centre is, beyond a share of both extents."""
    (left_a, top_a, right_a, bottom_a), (left_b, top_b, right_b, bottom_b) = a.box, b.box
    offset = np.array([left_a + right_a - left_b - right_b, top_a + bottom_a - top_b - bottom_b]) / 2
    extent = np.array([right_a - left_a + right_b - left_b, bottom_a - top_a + bottom_b - top_b])
    beyond = np.maximum(np.abs(offset) - POSITION_THRESHOLD * extent, 0) * np.sign(offset)
    if (np.abs(beyond) < 1e-3).all():
        return set()
    right, down = beyond / np.linalg.norm(offset)
    holds = {"left of": right < -0.5, "right of": right > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {relation for relation, value in holds.items() if value}


def is_correct(objects: Objects, metadata: Mapping[str, Any], colors_of: ColorsOf) -> bool:
    """GenEval's verdict: every clause to include holds, and none to exclude does."""
    return all(credit == 1.0 for credit in credits(objects, metadata, colors_of)) and not excluded(objects, metadata)


def excluded(objects: Objects, metadata: Mapping[str, Any]) -> bool:
    """Whether there are too many objects of a class."""
    return any(len(objects.get(clause["class"], ())) >= clause["count"] for clause in metadata.get("exclude", ()))


def graded(objects: Objects, metadata: Mapping[str, Any], colors_of: ColorsOf) -> float:
    """A denser reward in [0, 1], 1 just for a correct image: the mean credit, over 1 + objects too many."""
    found = credits(objects, metadata, colors_of)
    surplus = sum(
        max(0, len(objects.get(clause["class"], ())) - clause["count"] + 1) for clause in metadata.get("exclude", ())
    )
    score: float = sum(found) / len(found) / (1 + surplus)
    return score


def credits(objects: Objects, metadata: Mapping[str, Any], colors_of: ColorsOf) -> list[float]:
    """For each clause to include the share of its objects that are there, in their colour; half of it if misplaced."""
    matched: list[Sequence[Found]] = []
    shares = []
    for clause in metadata["include"]:
        name, count = clause["class"], clause["count"]
        found = list(objects.get(name, ()))[:count]
        right = len(found)
        if "color" in clause and found:
            right = sum(color == clause["color"] for color in colors_of(found, name))
        share = right / count
        if "position" in clause and share == 1.0 and not _placed(found, clause["position"], matched):
            share = 0.5
        elif "position" in clause and share < 1.0:
            share /= 2
        matched.append(found if share == 1.0 else ())
        shares.append(share)
    return shares


def _placed(found: Sequence[Found], position: Sequence[Any], matched: Sequence[Sequence[Found]]) -> bool:
    """Whether all objects lie as asked to all of the clause that the position refers to, which must hold itself."""
    relation, target = position
    others = matched[target]
    return bool(others) and all(relation in relations(a, b) for a in found for b in others)
