"""The frozen reference policy of the KL term."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn

from src.models.adapter import DiTAdapter


class Reference(Protocol):
    """The policy before post-training, which the KL term holds on to."""

    def active(self, adapter: DiTAdapter) -> AbstractContextManager[None]:
        """Inside, the adapter computes the reference policy, without gradient."""


class FrozenCopy:
    """A copy of the transformer as it is now, for full fine-tuning."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = copy.deepcopy(transformer).requires_grad_(False)

    @contextmanager
    def active(self, adapter: DiTAdapter) -> Iterator[None]:
        trained, adapter.transformer = adapter.transformer, self.transformer
        try:
            with torch.no_grad():
                yield
        finally:
            adapter.transformer = trained
