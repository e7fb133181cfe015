"""A running average of the trained weights: smoother than any of them, and the better model to keep."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class EMA:
    """average <- d average + (1 - d) weights, after optimizer updates n = `every`, 2 `every`, ...

    d = min(decay, (1 + n) / (10 + n)): as it rises, the average forgets the first weights soon (as in Flow-GRPO).

    Args:
        decay: d in the long run, in [0, 1).
        every: updates between two steps of the average.
    """

    def __init__(self, *, decay: float, every: int) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA.decay must lie in [0, 1), got {decay}")
        if every < 1:
            raise ValueError(f"EMA.every must be at least 1, got {every}")
        self.decay = decay
        self.every = every
        self.average: dict[str, Tensor] = {}
        """By the parameters' names, fp32; a checkpoint holds it."""

    def start(self, parameters: Mapping[str, Tensor]) -> None:
        """The average of a run that begins is the weights that it begins with; a resumed one has its own."""
        if not self.average:
            self.average = {name: _copy(tensor) for name, tensor in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor], number: int) -> None:
        """Takes in the weights after optimizer update `number`, counted from 1 over the whole run."""
        if number % self.every:
            return
        decay = min(self.decay, (1 + number) / (10 + number))
        for name, tensor in parameters.items():
            self.average[name].lerp_(tensor.detach().float(), 1 - decay)

    def load(self, average: Mapping[str, Tensor]) -> None:
        """Goes on from a checkpoint's average."""
        self.average = {name: _copy(tensor) for name, tensor in average.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32, copy=True)
