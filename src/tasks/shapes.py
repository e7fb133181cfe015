"""Coloured shapes by count, colour and position, with prompts in GenEval's metadata schema.

A prompt's metadata is a line of GenEval's prompt files (Ghosh et al., 2023, github.com/djghosh13/geneval):
`tag`; `include`, a list of `{"class", "count", "color"?, "position"?: [relation, index of another entry]}`;
and `exclude`, a list of `{"class", "count"}` that must not be reached. Here every entry has a colour.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from src.core.types import Prompt

PROMPT_SEED = 20_260
"""Seed of the prompt sets."""

SHAPES = ("square", "circle", "triangle")

PALETTE: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
}

NUMBERS = {2: "two", 3: "three", 4: "four"}


@lru_cache
def shape_mask(shape: str, height: int, width: int) -> NDArray[np.bool_]:
    """The pixels of a shape that fills a box of height x width pixels: those it covers at least by half."""
    fine = 8
    image = Image.new("L", (width * fine, height * fine))
    draw, right, bottom = ImageDraw.Draw(image), width * fine - 1, height * fine - 1
    if shape == "square":
        draw.rectangle((0, 0, right, bottom), fill=255)
    elif shape == "circle":
        draw.ellipse((0, 0, right, bottom), fill=255)
    elif shape == "triangle":
        draw.polygon(((right / 2, 0), (right, bottom), (0, bottom)), fill=255)
    else:
        raise ValueError(f"shape must be one of {SHAPES}, got {shape!r}")
    return np.asarray(image.resize((width, height), Image.Resampling.BOX)) >= 128


class ShapesTask:
    """One to four coloured shapes on black, each in its quarter of the image.

    Objects fill the quarters in reading order, or stand as the prompt's relation says; their size and their place
    in the quarter are random. The fixed order is on purpose: where objects may stand in any quarter, true images
    of a prompt differ so much that a tiny model learns ten times more slowly to draw them, and hardly at all
    from rewards.

    Args:
        size: height and width of the images in pixels.
        tags: GenEval tags to make prompts of: "colors", "counting", "color_attr", "position".
        heldout_fraction: share of each tag's prompts that is held out.

    Raises:
        ValueError: an odd size, or an unknown tag.
    """

    name = "shapes"

    def __init__(
        self,
        *,
        size: int = 16,
        tags: Sequence[str] = ("colors", "counting", "color_attr", "position"),
        heldout_fraction: float = 0.2,
    ) -> None:
        if size % 2:
            raise ValueError(f"size must be even, got {size}")
        unknown = set(tags) - set(PROMPTS)
        if unknown:
            raise ValueError(f"tags must be among {sorted(PROMPTS)}, got {sorted(unknown)}")
        self.image_size = (size, size, 3)
        rng = np.random.default_rng(PROMPT_SEED)
        train: list[dict[str, Any]] = []
        heldout: list[dict[str, Any]] = []
        for tag in tags:
            every = [{"tag": tag, **row} for row in PROMPTS[tag]()]
            order = rng.permutation(len(every))
            cut = round(heldout_fraction * len(every))
            heldout += [every[i] for i in order[:cut]]
            train += [every[i] for i in order[cut:]]
        self._train, self._heldout = train, heldout

    @property
    def vocabulary(self) -> tuple[str, ...]:
        words = {word for row in (*self._train, *self._heldout) for word in row["prompt"].split()}
        return tuple(sorted(words))

    @property
    def max_tokens(self) -> int:
        return max(len(row["prompt"].split()) for row in (*self._train, *self._heldout))

    @cached_property
    def train_prompts(self) -> Sequence[Prompt]:
        return tuple(Prompt(id=i, text=row["prompt"], metadata=row) for i, row in enumerate(self._train))

    @cached_property
    def heldout_prompts(self) -> Sequence[Prompt]:
        return tuple(Prompt(id=i, text=row["prompt"], metadata=row) for i, row in enumerate(self._heldout))

    def sample_prompt(self, rng: np.random.Generator) -> Prompt:
        """A training prompt, each tag equally often."""
        tags = sorted({row["tag"] for row in self._train})
        tag = tags[rng.integers(len(tags))]
        same = [prompt for prompt in self.train_prompts if prompt.metadata["tag"] == tag]
        return same[rng.integers(len(same))]

    def render(self, prompt: Prompt, rng: np.random.Generator) -> NDArray[np.uint8]:
        include = prompt.metadata["include"]
        objects = [(entry["class"], entry["color"]) for entry in include for _ in range(entry["count"])]
        relation = next((entry["position"][0] for entry in include if "position" in entry), None)
        quarters = READING_ORDER[: len(objects)] if relation is None else QUARTERS_OF_RELATION[relation]
        image = np.zeros(self.image_size, np.uint8)
        for (shape, color), quarter in zip(objects, quarters, strict=True):
            self._draw(image, shape, color, quarter, rng)
        return image

    def _draw(
        self,
        image: NDArray[np.uint8],
        shape: str,
        color: str,
        quarter: tuple[int, int],
        rng: np.random.Generator,
    ) -> None:
        side = self.image_size[0] // 2
        size = side - int(rng.integers(1, 3))
        # A free pixel always stays at the bottom and right, so that shapes never touch.
        top, left = (index * side + int(rng.integers(side - size)) for index in quarter)
        box = image[top : top + size, left : left + size]
        box[shape_mask(shape, size, size)] = PALETTE[color]


READING_ORDER = ((0, 0), (0, 1), (1, 0), (1, 1))
"""The quarters of an image as (row, column)."""

QUARTERS_OF_RELATION = {
    "left of": ((0, 1), (0, 0)),
    "right of": ((0, 0), (0, 1)),
    "above": ((1, 0), (0, 0)),
    "below": ((0, 0), (1, 0)),
}
"""The quarter of the reference, then that of the object which is left of it, right of it, ..."""


def _kinds() -> Iterator[tuple[str, str]]:
    return product(PALETTE, SHAPES)


def _one(color: str, shape: str) -> dict[str, Any]:
    return {"class": shape, "count": 1, "color": color}


def _colors() -> list[dict[str, Any]]:
    return [{"include": [_one(c, s)], "prompt": f"a {c} {s}"} for c, s in _kinds()]


def _counting() -> list[dict[str, Any]]:
    return [
        {
            "include": [{"class": shape, "count": count, "color": color}],
            "exclude": [{"class": shape, "count": count + 1}],
            "prompt": f"{number} {color} {shape}s",
        }
        for (count, number), (color, shape) in product(NUMBERS.items(), _kinds())
    ]


def _color_attr() -> list[dict[str, Any]]:
    return [
        {"include": [_one(c1, s1), _one(c2, s2)], "prompt": f"a {c1} {s1} and a {c2} {s2}"}
        for (c1, s1), (c2, s2) in product(_kinds(), _kinds())
        if c1 != c2
    ]


def _position() -> list[dict[str, Any]]:
    return [
        {
            "include": [_one(c1, s1), {**_one(c2, s2), "position": [relation, 0]}],
            "prompt": f"a {c2} {s2} {relation} a {c1} {s1}",
        }
        for relation, (c1, s1), (c2, s2) in product(QUARTERS_OF_RELATION, _kinds(), _kinds())
        if c1 != c2
    ]


PROMPTS = {"colors": _colors, "counting": _counting, "color_attr": _color_attr, "position": _position}
"""Every prompt of a GenEval tag."""
