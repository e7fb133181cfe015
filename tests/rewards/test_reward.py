from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from src.core.types import Prompt
from src.rl.rewards.brightness import BrightnessReward
from src.rl.rewards.image_stats import image_statistics
from src.rl.rewards.reward import Score, ScoreError, score_samples

PROMPTS = [Prompt(id=i, text="") for i in range(4)]
IMAGES = np.stack([np.full((2, 2, 1), 51 * i, np.uint8) for i in range(4)])


class FlakyReward(BrightnessReward):
    """Fails on images of one brightness, `failures` times in all."""

    def __init__(self, *, bad: int, failures: int) -> None:
        self.bad = bad
        self.failures = failures
        self.calls: list[int] = []

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        self.calls.append(len(prompts))
        if self.failures and (images_BHWC == self.bad).any():
            self.failures -= 1
            raise ScoreError("out of order")
        return super().score(images_BHWC, prompts)


def values(scores: Sequence[Score | ScoreError]) -> list[float]:
    return [score.value for score in scores if isinstance(score, Score)]


def test_a_whole_batch_is_scored_in_one_call() -> None:
    reward = FlakyReward(bad=-1, failures=1)
    assert values(score_samples(reward, IMAGES, PROMPTS)) == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert reward.calls == [4]


def test_a_failing_sample_is_retried() -> None:
    reward = FlakyReward(bad=102, failures=2)
    assert values(score_samples(reward, IMAGES, PROMPTS)) == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert reward.calls == [4, 1, 1, 1, 1, 1]


def test_a_sample_that_keeps_failing_is_a_failure_and_its_neighbours_keep_their_scores() -> None:
    scores = score_samples(FlakyReward(bad=102, failures=100), IMAGES, PROMPTS, attempts=3)
    assert isinstance(scores[2], ScoreError)
    assert values(scores) == pytest.approx([0.0, 0.2, 0.6])


def test_a_score_that_is_not_finite_is_a_failure() -> None:
    class NanReward(BrightnessReward):
        def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
            scores_B = super().score(images_BHWC, prompts)
            return np.where(images_BHWC[:, 0, 0, 0] == 51, np.float32(np.nan), scores_B)

    scores = score_samples(NanReward(), IMAGES, PROMPTS)
    assert [isinstance(score, ScoreError) for score in scores] == [False, True, False, False]


def test_bugs_are_not_taken_for_failures() -> None:
    with pytest.raises(ValueError, match="must pair up"):
        score_samples(BrightnessReward(), IMAGES, PROMPTS[:3])


def test_image_statistics() -> None:
    checker = np.zeros((1, 2, 2, 3), np.uint8)
    checker[0, 0, 0] = checker[0, 1, 1] = (255, 0, 0)
    assert image_statistics(checker) == pytest.approx(
        {"mean": 1 / 6, "std": np.sqrt(1 / 6 - 1 / 36), "edge_energy": 2 / 3, "saturation": 0.5}
    )
    flat = np.full((3, 4, 4, 1), 51, np.uint8)
    assert image_statistics(flat) == pytest.approx(
        {"mean": 0.2, "std": 0.0, "edge_energy": 0.0, "saturation": 0.0}, abs=1e-12
    )
