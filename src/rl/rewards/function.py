"""Any function as a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt

ScoreFunction = Callable[[NDArray[np.uint8], Sequence[str], Sequence[Mapping[str, Any]]], Sequence[float]]
"""(images [B, height, width, channels], prompts, their metadata) -> one number per image, larger is better."""


class FunctionReward:
    """The scores of a function.

    Args:
        name: of the scores.
        function: to raise `ScoreError` for a batch in which an image cannot be scored: each is then tried alone.
    """

    def __init__(self, *, name: str, function: ScoreFunction) -> None:
        self.name = name
        self._function = function

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        texts, metadata = [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
        return np.asarray(self._function(images_BHWC, texts, metadata), np.float32)
