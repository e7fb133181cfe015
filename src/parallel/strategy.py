"""How training ranks are run, as Lightning strategies. Only this layer knows world size and rank."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.strategies import SingleDeviceStrategy

from src.parallel.updater import LocalUpdater


class LocalStrategy(SingleDeviceStrategy):
    """One training rank.

    Args:
        device: torch device of the model.
        warmup_updates: optimizer updates over which the learning rate rises linearly.
        grad_clip: largest global norm of the gradient.
    """

    updater: LocalUpdater

    def __init__(self, *, device: str, warmup_updates: int, grad_clip: float) -> None:
        super().__init__(device=device)
        self._warmup_updates = warmup_updates
        self._grad_clip = grad_clip

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        (optimizer,) = self.optimizers
        self.updater = LocalUpdater(
            optimizer=optimizer,
            grad_clip=self._grad_clip,
            warmup_updates=self._warmup_updates,
        )
