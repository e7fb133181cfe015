"""Which prompts belong to which iteration: a pure function, so exploration can look one iteration ahead."""

from __future__ import annotations

from collections.abc import Sequence

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from src.core import seeds
from src.core.types import Batch, Prompt


class Iterations(Dataset[Batch]):
    """Batches `first .. last - 1` of a run.

    Prompts are dealt without replacement: every pass over the set has an order of its own, and a batch may reach
    from one pass into the next. Batch i is the same whatever was read before it.
    """

    def __init__(self, *, prompts: Sequence[Prompt], per_iteration: int, seed: int, first: int, last: int) -> None:
        if not 0 < per_iteration <= len(prompts):
            raise ValueError(f"data.prompts_per_iteration must be in 1..{len(prompts)}, got {per_iteration}")
        self._prompts = prompts
        self._per_iteration = per_iteration
        self._seed = seed
        self._first = first
        self._last = last
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return max(0, self._last - self._first)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        iteration = self._first + index
        ahead = self.prompts_of(iteration + 1) if iteration + 1 < self._last else ()
        return Batch(iteration=iteration, prompts=self.prompts_of(iteration), next_prompts=ahead)

    def prompts_of(self, iteration: int) -> tuple[Prompt, ...]:
        """The prompts of one iteration's batch."""
        start = iteration * self._per_iteration
        return tuple(self._prompt_at(position) for position in range(start, start + self._per_iteration))

    def _prompt_at(self, position: int) -> Prompt:
        dealt, place = divmod(position, len(self._prompts))
        if dealt not in self._orders:
            self._orders[dealt] = seeds.permutation(len(self._prompts), "prompts", self._seed, dealt)
        return self._prompts[self._orders[dealt][place]]


class PromptData(pl.LightningDataModule):
    """Feeds the trainer one `Batch` per iteration, `first .. iterations - 1` (`first` is not 0 after a resume)."""

    def __init__(
        self, *, prompts: Sequence[Prompt], per_iteration: int, seed: int, iterations: int, first: int = 0
    ) -> None:
        super().__init__()
        self._batches = Iterations(
            prompts=prompts, per_iteration=per_iteration, seed=seed, first=first, last=iterations
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        own = torch.Generator()  # a loader draws a number when it starts, which must not move the global generator
        return DataLoader(self._batches, batch_size=None, shuffle=False, generator=own)
