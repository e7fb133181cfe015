"""What a reward is, and what happens when one cannot be computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Composite(Protocol):
    """A reward made of others."""

    def score_terms(
        self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]
    ) -> tuple[NDArray[np.float32], Mapping[str, NDArray[np.float32]]]:
        """What `Reward.score` gives, and the scores of the others by name, [B] each."""
        ...


@dataclass(frozen=True)
class Score:
    """What one image got; `terms` by name, if the reward is made of others."""

    value: float
    terms: Mapping[str, float] = field(default_factory=dict)


def score_samples(
    reward: Reward, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt], *, attempts: int = 2
) -> list[Score | ScoreError]:
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
) -> Score | ScoreError:
    failure = ScoreError("not attempted")
    for _ in range(attempts):
        try:
            return _finite_scores(reward, image_1HWC, prompt_1)[0]
        except ScoreError as error:
            failure = error
    return failure


def _finite_scores(reward: Reward, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[Score]:
    terms: Mapping[str, NDArray[np.float32]] = {}
    if isinstance(reward, Composite):
        scores_B, terms = reward.score_terms(images_BHWC, prompts)
    else:
        scores_B = reward.score(images_BHWC, prompts)
    if scores_B.shape != (len(prompts),):
        raise ValueError(f"reward {reward.name} returned shape {scores_B.shape} for {len(prompts)} images")
    if not np.isfinite(scores_B).all():
        raise ScoreError(f"reward {reward.name} returned a score that is not finite")
    return [
        Score(float(score), {name: float(each_B[row]) for name, each_B in terms.items()})
        for row, score in enumerate(scores_B)
    ]
