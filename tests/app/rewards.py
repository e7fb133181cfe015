"""Rewards that misbehave, to be named in a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt
from src.rl.rewards.reward import ScoreError


class Brightness:
    """Mean of the pixels, in 1..2 so that a 0 cannot come from it; refuses images that it finds too dark.

    Args:
        darkest: mean below which an image cannot be scored.
    """

    name = "brightness"

    def __init__(self, *, darkest: float = 0.0) -> None:
        self._darkest = darkest

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        mean_B = images_BHWC.mean(axis=(1, 2, 3), dtype=np.float64) / 255
        if mean_B.min() < self._darkest:
            raise ScoreError(f"an image is too dark: {mean_B.min():.3f}")
        scores_B: NDArray[np.float32] = (1 + mean_B).astype(np.float32)
        return scores_B


def redness(
    images_BHWC: NDArray[np.uint8], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The mean of the first channel, in [0, 1]."""
    return [float(image[..., 0].mean() / 255) for image in images_BHWC]
