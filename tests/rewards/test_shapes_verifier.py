import numpy as np
import pytest

from src.core.types import Prompt
from src.rl.rewards.reward import ScoreError
from src.rl.rewards.shapes import (
    Detection,
    ShapesAccuracy,
    ShapesReward,
    detect,
    graded_score,
    is_correct,
    relations,
)
from src.tasks.shapes import PROMPTS, ShapesTask

TASK = ShapesTask()


def scenes(count: int) -> tuple[np.ndarray, list[Prompt]]:
    rng = np.random.default_rng(3)
    prompts = [TASK.sample_prompt(rng) for _ in range(count)]
    return np.stack([TASK.render(prompt, rng) for prompt in prompts]), prompts


def test_every_rendered_scene_is_correct_and_has_the_full_score() -> None:
    images, prompts = scenes(1000)
    assert ShapesAccuracy().score(images, prompts).mean() == 1.0
    assert ShapesReward().score(images, prompts).mean() == 1.0


def test_every_object_of_a_rendered_scene_is_found_exactly() -> None:
    images, prompts = scenes(300)
    for image, prompt in zip(images, prompts, strict=True):
        wanted = [(e["class"], e["color"]) for e in prompt.metadata["include"] for _ in range(e["count"])]
        assert sorted((o.shape, o.color) for o in detect(image)) == sorted(wanted)


def test_noise_barely_matters() -> None:
    images, prompts = scenes(1000)
    noise = np.random.default_rng(4).normal(0, 38, images.shape)  # 15 % of the range
    noisy = np.clip(images + noise, 0, 255).astype(np.uint8)
    assert ShapesAccuracy().score(noisy, prompts).mean() >= 0.95


def test_scenes_of_other_prompts_are_wrong() -> None:
    images, prompts = scenes(1000)
    shifted = prompts[1:] + prompts[:1]
    assert ShapesAccuracy().score(images, shifted).mean() < 0.06
    assert ShapesReward().score(images, shifted).mean() < 0.3


def test_an_empty_and_a_full_image_score_nothing() -> None:
    black = np.zeros((1, *TASK.image_size), np.uint8)
    prompts = [TASK.train_prompts[0]]
    for image in (black, black + 255):
        assert ShapesReward().score(image, prompts)[0] == 0.0
        assert ShapesAccuracy().score(image, prompts)[0] == 0.0


def found(*objects: tuple[str | None, str | None, int, int]) -> list[Detection]:
    """Objects of 6x6 pixels by shape, colour, top and left."""
    return [Detection(shape, color, (top, left, top + 6, left + 6)) for shape, color, top, left in objects]


def row(tag: str, text: str) -> dict:
    return next(row for row in PROMPTS[tag]() if row["prompt"] == text)


TWO_RED_SQUARES = row("counting", "two red squares")
RED, BLUE = ("square", "red", 0, 0), ("circle", "blue", 0, 8)


@pytest.mark.parametrize(
    ("objects", "correct", "score"),
    [
        ([RED, RED], True, 1.0),
        ([RED], False, 0.5),
        ([RED, RED, RED], False, 0.5 / 1.5),  # too many: wrong, and one object left over
        ([RED, ("circle", "red", 0, 8)], False, 0.75),  # right colour, wrong shape
        ([RED, ("square", "blue", 0, 8)], False, 0.75),  # right shape, wrong colour
        ([RED, BLUE], False, 0.5 / 1.5),
        ([RED, RED, BLUE], True, 1.0 / 1.5),  # GenEval allows other objects, the graded score does not
        ([], False, 0.0),
    ],
)
def test_counting(objects: list, correct: bool, score: float) -> None:
    assert is_correct(found(*objects), TWO_RED_SQUARES) is correct
    assert graded_score(found(*objects), TWO_RED_SQUARES) == pytest.approx(score)


def test_colours_must_belong_to_their_objects() -> None:
    wanted = row("color_attr", "a red square and a blue circle")
    swapped = found(("square", "blue", 0, 0), ("circle", "red", 0, 8))
    assert is_correct(found(RED, BLUE), wanted)
    assert not is_correct(swapped, wanted)
    assert graded_score(swapped, wanted) == 0.5


def test_position() -> None:
    wanted = row("position", "a red square left of a blue circle")
    left, right = found(RED, BLUE), found(("square", "red", 0, 8), ("circle", "blue", 0, 0))
    assert is_correct(left, wanted)
    assert graded_score(left, wanted) == 1.0
    assert not is_correct(right, wanted)
    assert graded_score(right, wanted) == 0.5


@pytest.mark.parametrize(
    ("top", "left", "expected"),
    [
        (0, 8, {"right of"}),
        (0, -8, {"left of"}),
        (-8, 0, {"above"}),
        (8, 0, {"below"}),
        (8, 8, {"right of", "below"}),
        (1, 1, set()),  # centres closer than a tenth of both extents
    ],
)
def test_relations(top: int, left: int, expected: set[str]) -> None:
    a, b = found(("square", "red", top, left), ("square", "red", 0, 0))
    assert relations(a, b) == expected


def test_a_prompt_without_metadata_is_a_failure_and_no_zero() -> None:
    images, _ = scenes(1)
    for reward in (ShapesReward(), ShapesAccuracy()):
        with pytest.raises(ScoreError):
            reward.score(images, [Prompt(id=0, text="a red square")])
