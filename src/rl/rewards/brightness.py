"""A reward that any model learns within seconds, for tests of the training loop."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt


class BrightnessReward:
    """The mean pixel value, in [0, 1], whatever the prompt."""

    name = "brightness"

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        return np.asarray(images_BHWC.mean(axis=(1, 2, 3)) / 255.0, np.float32)
