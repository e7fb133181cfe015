"""Several rewards as one number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt
from src.rl.rewards.reward import Reward


@dataclass(frozen=True, kw_only=True)
class Term:
    """weight (score - offset) / scale: offset and scale bring rewards of different ranges to one.

    They are fixed numbers, such as mean and standard deviation of the base model's scores: a normalisation over
    the batch would make a score depend on who else was scored.
    """

    reward: Reward
    weight: float = 1.0
    offset: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and math.isfinite(self.offset)):
            raise ValueError(f"Term.weight and Term.offset must be finite, got {self.weight} and {self.offset}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"Term.scale must be positive and finite, got {self.scale}")

    def share(self, scores_B: NDArray[np.float32]) -> NDArray[np.float64]:
        """What the reward's scores add to the sum, [B]."""
        return self.weight * (scores_B.astype(np.float64) - self.offset) / self.scale


class WeightedSum:
    """The sum of terms; an image that one of them cannot score has no score.

    Args:
        terms: by the names that the sum's name is made of, and that their own scores have in the metrics.
    """

    def __init__(self, *, terms: Mapping[str, Term]) -> None:
        if not terms:
            raise ValueError("WeightedSum.terms must not be empty")
        self._terms = dict(terms)
        self.name = "+".join(self._terms)

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        return self.score_terms(images_BHWC, prompts)[0]

    def score_terms(
        self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]
    ) -> tuple[NDArray[np.float32], Mapping[str, NDArray[np.float32]]]:
        scores = {name: term.reward.score(images_BHWC, prompts) for name, term in self._terms.items()}
        shares = [term.share(scores[name]) for name, term in self._terms.items()]
        total_B: NDArray[np.float32] = np.sum(shares, axis=0).astype(np.float32)
        return total_B, scores
