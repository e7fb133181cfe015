"""A rule-based GenEval verifier: it finds coloured shapes in the pixels and checks them against a prompt.

Detection: pixels brighter than half are foreground; which channels reach half of the brightest one gives the
colour; connected pixels of one colour are an object; its shape is the one whose mask, drawn into the object's
box, overlaps it best. The check itself is GenEval's (Ghosh et al., 2023, evaluate_images.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from src.core.types import Prompt
from src.rl.rewards.reward import ScoreError
from src.tasks.shapes import PALETTE, SHAPES, shape_mask

FOREGROUND = 128
"""A pixel whose brightest channel is below this is background."""

SPECK = 6
"""Connected regions of fewer pixels are ignored."""

FIT = 0.75
"""Least overlap (intersection over union) with a shape's mask to be that shape."""

POSITION_THRESHOLD = 0.1
"""GenEval's: the share of both objects' extent by which their centres must differ to be off-centre at all."""

COLOR_OF_CODE = {sum((value > 0) << i for i, value in enumerate(rgb)): name for name, rgb in PALETTE.items()}


@dataclass(frozen=True)
class Detection:
    """An object that was found."""

    shape: str | None
    """One of SHAPES, or None if it looks like none of them."""
    color: str | None
    """A name of the palette, or None."""
    box: tuple[int, int, int, int]
    """top, left, bottom, right in pixels; the last two are exclusive."""

    @property
    def centre(self) -> tuple[float, float]:
        """(y, x)."""
        top, left, bottom, right = self.box
        return (top + bottom) / 2, (left + right) / 2

    @property
    def extent(self) -> tuple[int, int]:
        """(height, width)."""
        top, left, bottom, right = self.box
        return bottom - top, right - left


def detect(image_HWC: NDArray[np.uint8]) -> list[Detection]:
    """Every object of an RGB image, in the order of colours, then from top to bottom."""
    brightest = image_HWC.max(axis=2)
    codes = ((image_HWC > brightest[:, :, None] / 2) * np.array([1, 2, 4])).sum(axis=2)
    codes[brightest < FOREGROUND] = 0
    found = []
    for code in np.unique(codes[codes > 0]):
        labels, _ = ndimage.label(codes == code)
        for index, (rows, columns) in enumerate(ndimage.find_objects(labels), start=1):
            region = labels[rows, columns] == index
            if region.sum() >= SPECK:
                box = (rows.start, columns.start, rows.stop, columns.stop)
                found.append(Detection(classify(region), COLOR_OF_CODE.get(int(code)), box))
    return found


def classify(region: NDArray[np.bool_]) -> str | None:
    """The shape whose mask overlaps the region best; None if none overlaps well or the box is not square."""
    height, width = region.shape
    if abs(height - width) > max(1, max(height, width) // 4):
        return None
    overlaps = {shape: overlap(region, shape_mask(shape, height, width)) for shape in SHAPES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= FIT else None


def overlap(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Intersection over union."""
    return float((a & b).sum() / (a | b).sum())


def relations(a: Detection, b: Detection) -> set[str]:
    """How `a` lies to `b` by GenEval's rule: where its centre is, beyond a share of both extents."""
    offset = np.subtract(a.centre, b.centre)
    slack = POSITION_THRESHOLD * np.add(a.extent, b.extent)
    beyond = np.sign(offset) * np.maximum(np.abs(offset) - slack, 0.0)
    if not beyond.any():
        return set()
    down, right = beyond / np.linalg.norm(offset)
    holds = {"left of": right < -0.5, "right of": right > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {relation for relation, value in holds.items() if value}


def is_correct(found: Sequence[Detection], metadata: Mapping[str, Any]) -> bool:
    """GenEval's verdict: every included object is there, in its colour and place, and no excluded one is."""
    matched: list[list[Detection]] = []
    for entry in metadata["include"]:
        right = [o for o in found if o.shape == entry["class"] and o.color == entry.get("color", o.color)]
        if len(right) < entry["count"]:
            return False
        matched.append(right[: entry["count"]])
        if not _placed(entry, matched):
            return False
    return all(sum(o.shape == entry["class"] for o in found) < entry["count"] for entry in metadata.get("exclude", ()))


def _placed(entry: Mapping[str, Any], matched: Sequence[Sequence[Detection]]) -> bool:
    """Whether all objects of the last matched entry lie as asked to all of the entry that it refers to."""
    if "position" not in entry:
        return True
    relation, target = entry["position"]
    return all(relation in relations(a, b) for a in matched[-1] for b in matched[target])


def graded_score(found: Sequence[Detection], metadata: Mapping[str, Any]) -> float:
    """A denser reward in [0, 1]; it is 1 only if the image is correct and shows nothing else.

    Each requested object is given an object of the image: one of its shape and colour (credit 1), else of its
    colour or its shape (credit 1/2). The mean credit is divided by 1 + 1/2 per object left over, and by 2 if
    it is full but GenEval's verdict is no (wrong position).
    """
    wanted = [(e["class"], e["color"]) for e in metadata["include"] for _ in range(e["count"])]
    left = [(o.shape, o.color) for o in found]
    missing = []
    for want in wanted:
        if want in left:
            left.remove(want)
        else:
            missing.append(want)
    credit = float(len(wanted) - len(missing))
    for shape, color in missing:
        close = [o for o in left if o[1] == color] or [o for o in left if o[0] == shape]
        if close:
            left.remove(close[0])
            credit += 0.5
    score = credit / len(wanted) / (1.0 + 0.5 * len(left))
    return score if missing or is_correct(found, metadata) else score / 2


class ShapesReward:
    """The graded score of the verifier."""

    name = "geneval"

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        pairs = zip(images_BHWC, prompts, strict=True)
        return np.array([graded_score(detect(image), _metadata(p)) for image, p in pairs], np.float32)


class ShapesAccuracy:
    """GenEval's own score, 1 for a correct image and 0 for others: the judge of the shapes task."""

    name = "geneval_exact"

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        pairs = zip(images_BHWC, prompts, strict=True)
        return np.array([is_correct(detect(image), _metadata(p)) for image, p in pairs], np.float32)


def _metadata(prompt: Prompt) -> Mapping[str, Any]:
    if "include" not in prompt.metadata:
        raise ScoreError(f"prompt {prompt.id} has no GenEval metadata")
    return prompt.metadata
