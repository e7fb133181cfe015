"""GenEval's rules, on every line of its own suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src.core.types import Prompt
from src.rl.rewards.geneval import GenEvalReward
from src.rl.rewards.geneval_rules import Found, graded, is_correct, relations
from src.rl.rewards.reward import ScoreError
from src.tasks.prompt_sets import read_prompts

SUITE = read_prompts(Path(__file__).parents[2] / "data" / "prompts" / "geneval_heldout.jsonl")
PLACES = {"left of": (-40, 0), "right of": (40, 0), "above": (0, -40), "below": (0, 40)}

Scene = dict[str, list[Found]]
Palette = dict[tuple[float, float, float, float], str]


def ideal(metadata: Any) -> tuple[Scene, Palette]:
    """Objects, 20 pixels wide, that are just what a line asks for, and their colours by box."""
    scene: Scene = {}
    palette: Palette = {}
    placed: list[tuple[float, float]] = []
    for number, clause in enumerate(metadata["include"]):
        x, y = 100.0 + 300 * number, 100.0
        if "position" in clause:
            relation, target = clause["position"]
            x, y = placed[target][0] + PLACES[relation][0], placed[target][1] + PLACES[relation][1]
        placed.append((x, y))
        for copy in range(clause["count"]):
            box = (x + 1000 * copy, y, x + 1000 * copy + 20, y + 20)
            scene.setdefault(clause["class"], []).append(Found(box))
            palette[box] = clause.get("color", "grey")
    return scene, palette


def namer(palette: Palette) -> Any:
    return lambda found, name: [palette[one.box] for one in found]


def verdicts(scene: Scene, palette: Palette, metadata: Any) -> tuple[bool, float]:
    return is_correct(scene, metadata, namer(palette)), graded(scene, metadata, namer(palette))


@pytest.mark.parametrize("tag", sorted({prompt.metadata["tag"] for prompt in SUITE}))
def test_what_a_line_asks_for_is_correct_and_less_or_other_is_not(tag: str):
    lines = [prompt.metadata for prompt in SUITE if prompt.metadata["tag"] == tag]
    assert len(lines) >= 79
    for metadata in lines:
        scene, palette = ideal(metadata)
        assert verdicts(scene, palette, metadata) == (True, 1.0)
        assert verdicts({}, {}, metadata) == (False, 0.0)
        for clause in metadata["include"]:
            name = clause["class"]
            fewer = {**scene, name: scene[name][1:]}
            correct, score = verdicts(fewer, palette, metadata)
            assert not correct
            assert score < 1
            if "color" in clause:
                wrong = palette | {one.box: "mauve" for one in scene[name]}
                assert verdicts(scene, wrong, metadata)[0] is False
            if "position" in clause:
                target = metadata["include"][clause["position"][1]]["class"]
                swapped = {name: scene[target], target: scene[name]}
                assert verdicts(swapped, palette, metadata) == (False, 0.75)
                aside = {**scene, name: scene[target]}
                assert verdicts(aside, palette, metadata)[0] is False
        for clause in metadata.get("exclude", ()):
            extra = Found((5000, 0, 5020, 20))
            more = {**scene, clause["class"]: [*scene[clause["class"]], extra]}
            assert verdicts(more, palette | {extra.box: "grey"}, metadata) == (False, 0.5)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        ((0, 0), set()),
        ((3, -3), set()),  # within a tenth of both extents
        ((30, 0), {"right of"}),
        ((-30, 4), {"left of"}),
        ((0, 30), {"below"}),
        ((25, -25), {"right of", "above"}),
        ((30, 12), {"right of"}),
    ],
)
def test_relations(offset: tuple[int, int], expected: set[str]):
    x, y = offset
    assert relations(Found((x, y, x + 20, y + 20)), Found((0, 0, 20, 20))) == expected


def test_only_the_most_confident_objects_are_judged():
    metadata = {"include": [{"class": "cat", "count": 1, "color": "red"}]}
    red, blue = Found((0, 0, 9, 9)), Found((20, 0, 29, 9))
    palette = {red.box: "red", blue.box: "blue"}
    assert is_correct({"cat": [red, blue]}, metadata, namer(palette))
    assert not is_correct({"cat": [blue, red]}, metadata, namer(palette))


def test_a_position_to_what_is_not_there_does_not_hold():
    metadata = {"include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["above", 0]}]}
    assert verdicts({"cat": [Found((0, 0, 9, 9))]}, {}, metadata) == (False, 0.25)


class Eyes:
    """Sees what it is told to, and notes at which confidence."""

    def __init__(self, scene: Scene, palette: Palette) -> None:
        self._scene, self._palette = scene, palette
        self.asked: list[float] = []

    def detect(self, image_HWC: Any, *, confidence: float) -> Scene:
        self.asked.append(confidence)
        return self._scene

    def colors(self, image_HWC: Any, found: Sequence[Found], name: str) -> list[str]:
        return [self._palette[one.box] for one in found]


def test_the_reward_counts_with_more_confidence_and_needs_metadata():
    counting = next(prompt for prompt in SUITE if prompt.metadata["tag"] == "counting")
    colors = next(prompt for prompt in SUITE if prompt.metadata["tag"] == "colors")
    image = np.zeros((1, 8, 8, 3), np.uint8)
    for prompt, confidence in ((counting, 0.9), (colors, 0.3)):
        eyes = Eyes(*ideal(prompt.metadata))
        for strict in (False, True):
            assert GenEvalReward(detector=eyes, colors=eyes, strict=strict).score(image, [prompt]).tolist() == [1.0]
        assert eyes.asked == [confidence] * 2
    with pytest.raises(ScoreError, match="prompt 3 has no GenEval metadata"):
        GenEvalReward(detector=eyes, colors=eyes).score(image, [Prompt(3, "a cat")])
