"""The samples of one iteration as stacked tensors, and the (sample, step) pairs that are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from src.core.types import SampleResult, Trajectory
from src.models.blobs import from_blob


@dataclass(frozen=True)
class Rollouts:
    """The samples that were made and scored; failed ones are left out and so move no group's baseline."""

    instances_B: tuple[int, ...]
    """Position of each sample's prompt in the batch: samples of one prompt are a group."""
    seeds_B: tuple[int, ...]
    rewards_B: tuple[float, ...]
    scores_B: tuple[Mapping[str, float], ...]
    """Of each sample, beside its reward."""
    fingerprints_B: tuple[str, ...]
    before_BSLC: Tensor
    after_BSLC: Tensor
    log_probs_BS: Tensor
    """Under the policy that made the samples, as reported by whoever made them."""
    failed: int

    @classmethod
    def stack(cls, results: Sequence[SampleResult]) -> Rollouts:
        """Stacks the results that have no error, in order. Raises RuntimeError if every sample failed."""
        made: list[tuple[SampleResult, Trajectory]] = [
            (result, result.trajectory) for result in results if result.error is None and result.trajectory
        ]
        if not made:
            first = next((result.error for result in results if result.error), "no result carries a trajectory")
            raise RuntimeError(f"all {len(results)} rollouts of the iteration failed; the first one: {first}")
        return cls(
            instances_B=tuple(result.key.instance for result, _ in made),
            seeds_B=tuple(result.key.seed for result, _ in made),
            rewards_B=tuple(result.reward for result, _ in made),
            scores_B=tuple(result.scores for result, _ in made),
            fingerprints_B=tuple(trajectory.fingerprint for _, trajectory in made),
            before_BSLC=torch.stack([from_blob(trajectory.before_SLC) for _, trajectory in made]),
            after_BSLC=torch.stack([from_blob(trajectory.after_SLC) for _, trajectory in made]),
            log_probs_BS=torch.stack([from_blob(trajectory.log_probs_S) for _, trajectory in made]),
            failed=len(results) - len(made),
        )

    def __len__(self) -> int:
        return len(self.instances_B)

    def to(self, device: torch.device) -> Rollouts:
        """The same with its tensors on a device."""
        return replace(
            self,
            before_BSLC=self.before_BSLC.to(device),
            after_BSLC=self.after_BSLC.to(device),
            log_probs_BS=self.log_probs_BS.to(device),
        )

    def subset(self, rows: Sequence[int]) -> Rollouts:
        """Some of the samples, in this order."""
        return replace(
            self,
            instances_B=tuple(self.instances_B[row] for row in rows),
            seeds_B=tuple(self.seeds_B[row] for row in rows),
            rewards_B=tuple(self.rewards_B[row] for row in rows),
            scores_B=tuple(self.scores_B[row] for row in rows),
            fingerprints_B=tuple(self.fingerprints_B[row] for row in rows),
            before_BSLC=self.before_BSLC[rows],
            after_BSLC=self.after_BSLC[rows],
            log_probs_BS=self.log_probs_BS[rows],
        )

    def groups(self) -> dict[int, list[int]]:
        """Row numbers of each prompt instance's samples."""
        groups: dict[int, list[int]] = {}
        for row, instance in enumerate(self.instances_B):
            groups.setdefault(instance, []).append(row)
        return groups


@dataclass(frozen=True)
class Pairs:
    """(sample, denoising step) pairs: `row_K` into `Rollouts`, `slot_K` into its S stochastic steps."""

    row_K: Tensor
    slot_K: Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Pairs:
        """From (row, slot) tuples."""
        row_slot_K2 = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
        return cls(row_slot_K2[:, 0], row_slot_K2[:, 1])

    def to(self, device: torch.device) -> Pairs:
        """The same on a device."""
        return Pairs(self.row_K.to(device), self.slot_K.to(device))

    def __len__(self) -> int:
        return len(self.row_K)

    def share(self, rank: int, ranks: int) -> Pairs:
        """The part of one of several ranks: successive pairs, as many on each as possible."""
        return Pairs(self.row_K.tensor_split(ranks)[rank], self.slot_K.tensor_split(ranks)[rank])

    def filled(self, count: int) -> Pairs:
        """The same, and repeats of the first one up to `count`."""
        missing = max(count - len(self), 0)
        return Pairs(*(torch.cat([each, each[:1].expand(missing)]) for each in (self.row_K, self.slot_K)))

    def split(self, size: int) -> list[Pairs]:
        """Micro-batches of at most `size` pairs."""
        return [
            Pairs(rows, slots)
            for rows, slots in zip(torch.split(self.row_K, size), torch.split(self.slot_K, size), strict=True)
        ]
