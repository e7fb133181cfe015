"""A reward that misbehaves, in a module that loads fast: processes of a pool import it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt
from src.rl.rewards.reward import ScoreError


class Mean:
    """The mean pixel; dark images cannot be scored, one of 255 kills its process, and one of 254 takes for ever."""

    name = "mean"

    def __init__(self, *, darkest: float = 0.0) -> None:
        self._darkest = darkest

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        mean_B = images_BHWC.mean(axis=(1, 2, 3))
        if mean_B.min() < self._darkest:
            raise ScoreError("too dark")
        if mean_B.max() == 255:
            os._exit(3)
        if mean_B.max() == 254:
            time.sleep(600)
        return np.asarray(mean_B, np.float32)
