"""What a virtual cluster is made of: its hardware, how long everything takes there, and what samples are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from src.core.types import SampleRequest, SampleResult


class Durations(Protocol):
    """How long things take, in seconds."""

    @property
    def publish_s(self) -> float:
        """The trainer makes new weights available."""

    @property
    def load_s(self) -> float:
        """A worker takes them."""

    @property
    def regroup_s(self) -> float:
        """GPUs that are there form a new group."""

    @property
    def start_s(self) -> float:
        """A node that comes becomes ready to serve."""

    def denoise_s(self, samples: int, steps: int, degree: int) -> float:
        """A group of `degree` GPUs denoises so many samples over so many steps."""

    @property
    def commit_s(self) -> float:
        """A worker hands over where it stands."""

    def finish_s(self, samples: int, degree: int) -> float:
        """It decodes and scores them."""

    @property
    def updates(self) -> int:
        """Of an iteration."""

    def update_s(self, gpus: int) -> float:
        """So many GPUs make one of an iteration's updates."""


class Samples(Protocol):
    """What the samples of a virtual run are: real ones of a real model, or those of a reward model."""

    def make(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """One result each, in order."""


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """The hardware of a virtual cluster.

    Args:
        reserved_gpus: they train, and serve rollouts while they do not.
        gpus_per_node: of a spot node.
        degree: GPUs that share sequences in a group, reserved and spot alike; those that do not fit serve alone.
        across_nodes: groups may span nodes.
        batch_size: samples of one forward pass of a group.
        commit_every: denoising steps between commits; 0: only at notices.
        keeps_commits: False loses what is in flight with its worker.
        reserved_explores: the reserved GPUs explore, too, if somebody waits for it.
        spot_trains: spot nodes train, too, as elastic ranks (docs/parallel.md).
    """

    reserved_gpus: int
    gpus_per_node: int
    degree: int = 1
    across_nodes: bool = False
    batch_size: int
    commit_every: int
    keeps_commits: bool = True
    reserved_explores: bool = False
    spot_trains: bool = False

    def __post_init__(self) -> None:
        for name in ("reserved_gpus", "gpus_per_node", "degree", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.commit_every < 0:
            raise ValueError(f"commit_every must not be negative, got {self.commit_every}")
