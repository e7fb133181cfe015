"""What a reward is, and what happens when one cannot be computed."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt


class ScoreError(Exception):
    """An image could not be scored. That says nothing about the image: it is left out, never given 0."""


class Reward(Protocol):
    """Scores images from their pixels."""

    @property
    def name(self) -> str: ...

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        """Score image b as a picture of `prompts[b]`; the result has shape [B], larger is better.

        Raises:
            ScoreError: at least one image could not be scored; no score of this call is to be used.
        """
        ...


def score_samples(
    reward: Reward, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt], *, attempts: int = 2
) -> list[float | ScoreError]:
    """Score every image, separating those that fail from those that do not.

    The whole batch is tried first; if that fails, each image is scored alone, at most `attempts` times. A
    result is the score or the last error, so a caller cannot take a failure for a number.

    Raises:
        ValueError: the numbers of images and prompts differ.
    """
    if len(images_BHWC) != len(prompts):
        raise ValueError(f"images and prompts must pair up, got {len(images_BHWC)} and {len(prompts)}")
    try:
        return [*_finite_scores(reward, images_BHWC, prompts)]
    except ScoreError:
        return [_score_one(reward, images_BHWC[b : b + 1], prompts[b : b + 1], attempts) for b in range(len(prompts))]


def _score_one(
    reward: Reward, image_1HWC: NDArray[np.uint8], prompt_1: Sequence[Prompt], attempts: int
) -> float | ScoreError:
    failure = ScoreError("not attempted")
    for _ in range(attempts):
        try:
            return _finite_scores(reward, image_1HWC, prompt_1)[0]
        except ScoreError as error:
            failure = error
    return failure


def _finite_scores(reward: Reward, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[float]:
    scores_B = reward.score(images_BHWC, prompts)
    if scores_B.shape != (len(prompts),):
        raise ValueError(f"reward {reward.name} returned shape {scores_B.shape} for {len(prompts)} images")
    if not np.isfinite(scores_B).all():
        raise ScoreError(f"reward {reward.name} returned a score that is not finite")
    return [float(score) for score in scores_B]
