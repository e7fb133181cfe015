"""GenEval prompts to train on, made by its rules (Ghosh et al., 2023), and its own suite to evaluate on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from src.core.types import Prompt
from src.tasks.prompt_sets import read_prompts

PROMPT_SEED = 20_261
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}

WEIGHTS = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
"""How often a kind of prompt is trained on, as in Flow-GRPO; the easiest, single objects, is left out."""


class GenEvalTask:
    """Prompts of objects with counts, colours and positions.

    Args:
        heldout: GenEval's evaluation suite; none of its prompts is trained on.
        classes: file of object names, one a line.
        train_size: prompts to train on, all different.
    """

    name = "geneval"

    def __init__(self, *, heldout: str | Path, classes: str | Path, train_size: int = 10_000) -> None:
        if train_size < 1:
            raise ValueError(f"train_size must be at least 1, got {train_size}")
        self._heldout = Path(heldout)
        self._classes = Path(classes).read_text(encoding="utf-8").split("\n")
        self._classes = [name for name in self._classes if name]
        self._train_size = train_size

    @cached_property
    def heldout_prompts(self) -> Sequence[Prompt]:
        return read_prompts(self._heldout)

    @cached_property
    def train_prompts(self) -> Sequence[Prompt]:
        rng = np.random.default_rng(PROMPT_SEED)
        seen = {prompt.text for prompt in self.heldout_prompts}
        tags = [tag for tag, weight in WEIGHTS.items() for _ in range(weight)]
        prompts: list[Prompt] = []
        while len(prompts) < self._train_size:
            tag = _one(tags, rng)
            row = {"tag": tag, **KINDS[tag](self._classes, rng)}
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                prompts.append(Prompt(id=len(prompts), text=row["prompt"], metadata=row))
        return tuple(prompts)


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _one(items: Sequence[str], rng: np.random.Generator) -> str:
    return items[int(rng.integers(len(items)))]


def _two(items: Sequence[str], rng: np.random.Generator) -> tuple[str, str]:
    first, second = rng.choice(len(items), size=2, replace=False)
    return items[int(first)], items[int(second)]


def _colourable(classes: Sequence[str]) -> list[str]:
    return [name for name in classes if name != "person"]


def _two_object(classes: Sequence[str], rng: np.random.Generator) -> dict[str, Any]:
    a, b = _two(classes, rng)
    include = [{"class": a, "count": 1}, {"class": b, "count": 1}]
    return {"include": include, "prompt": f"a photo of {_article(a)} and {_article(b)}"}


def _counting(classes: Sequence[str], rng: np.random.Generator) -> dict[str, Any]:
    name, count = _one(classes, rng), int(rng.integers(2, 5))
    return {
        "include": [{"class": name, "count": count}],
        "exclude": [{"class": name, "count": count + 1}],
        "prompt": f"a photo of {NUMBERS[count]} {_plural(name)}",
    }


def _colors(classes: Sequence[str], rng: np.random.Generator) -> dict[str, Any]:
    name, color = _one(_colourable(classes), rng), _one(COLORS, rng)
    include = [{"class": name, "count": 1, "color": color}]
    return {"include": include, "prompt": f"a photo of {_article(color)} {name}"}


def _position(classes: Sequence[str], rng: np.random.Generator) -> dict[str, Any]:
    a, b = _two(classes, rng)
    relation = _one(RELATIONS, rng)
    include = [{"class": b, "count": 1}, {"class": a, "count": 1, "position": [relation, 0]}]
    return {"include": include, "prompt": f"a photo of {_article(a)} {relation} {_article(b)}"}


def _color_attr(classes: Sequence[str], rng: np.random.Generator) -> dict[str, Any]:
    (a, b), (one, other) = _two(_colourable(classes), rng), _two(COLORS, rng)
    include = [{"class": a, "count": 1, "color": one}, {"class": b, "count": 1, "color": other}]
    return {"include": include, "prompt": f"a photo of {_article(one)} {a} and {_article(other)} {b}"}


KINDS: Mapping[str, Callable[[Sequence[str], np.random.Generator], dict[str, Any]]] = {
    "two_object": _two_object,
    "counting": _counting,
    "colors": _colors,
    "position": _position,
    "color_attr": _color_attr,
}
"""A random prompt of each GenEval tag, with its metadata."""
