"""What a synthetic task offers: prompts, a vocabulary, and a renderer of ground-truth images.

A rendered task needs no download: the base model, the recognisers and the tests all draw their data from
`render`, and the held-out prompts are seen by none of them before evaluation.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt


class Task(Protocol):
    """Prompts to post-train on, and others to evaluate on.

    Prompt sets are functions of a fixed seed, never of the run's seed: every run trains and evaluates on the
    same prompts.
    """

    @property
    def name(self) -> str: ...

    @property
    def train_prompts(self) -> Sequence[Prompt]:
        """Prompts for post-training."""
        ...

    @property
    def heldout_prompts(self) -> Sequence[Prompt]:
        """Prompts for evaluation only."""
        ...


class RenderedTask(Task, Protocol):
    """A text-to-image task whose true images can be drawn."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every token that a prompt's text may hold: single characters, or words separated by spaces."""
        ...

    @property
    def max_tokens(self) -> int:
        """Length of the longest prompt in tokens."""
        ...

    @property
    def image_size(self) -> tuple[int, int, int]:
        """(height, width, channels) of the images."""
        ...

    def sample_prompt(self, rng: np.random.Generator) -> Prompt:
        """Draw a prompt for pretraining; never one that is held out."""
        ...

    def render(self, prompt: Prompt, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Draw one true image of `prompt`, uint8 [height, width, channels]; `rng` picks font, place, size."""
        ...
