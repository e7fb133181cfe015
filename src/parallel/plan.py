"""Which members share sequences, and how many: the degree is a policy, not "all who are there". Pure.

Sharing sequences always costs throughput: with times of 4.30, 2.68 and 1.63 s for 1, 2 and 4 GPUs (a published row),
four GPUs that serve alone finish 4 samples in 4.30 s, and in one group one after another in 6.52 s. It pays in three
cases, which `best_degree` knows: a sample does not fit into one member's memory; there are fewer samples left than
members (the tail of a phase); somebody waits for a single sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from src.core.types import Member


@dataclass(frozen=True)
class Shape:
    """What decides how a model can be shared: text and image tokens together, and attention heads."""

    tokens: int
    heads: int


@dataclass(frozen=True)
class Footprint:
    """Memory of one member: weights and the like, which sharing does not shrink, and activations, which it does."""

    fixed_bytes: float
    activation_bytes: float
    """Of one sample, unshared."""

    def at(self, degree: int) -> float:
        """Bytes on each member of a group."""
        return self.fixed_bytes + self.activation_bytes / degree


def allowed_degrees(shape: Shape, *, members: int, largest: int, min_tokens_per_rank: int = 512) -> list[int]:
    """Degrees that make sense, increasing; 1 always does.

    Every rank must have a head, or it idles through attention, and enough tokens, or the all-to-all costs more than it
    saves: at about 1024 tokens the published advice is to leave it alone.
    """
    for name, value in (("members", members), ("largest", largest), ("min_tokens_per_rank", min_tokens_per_rank)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    limit = min(members, largest, shape.heads, max(1, shape.tokens // min_tokens_per_rank))
    return list(range(1, limit + 1))


def best_degree(
    degrees: Sequence[int],
    seconds: Mapping[int, float],
    *,
    samples: int,
    members: int,
    footprint: Footprint,
    memory_bytes: float,
) -> int:
    """The degree that finishes `samples` samples first, of those that fit into memory; the smallest of equals.

    T(n) = ceil(samples / (members // n)) seconds(n): groups serve one sample at a time, in rounds.

    Args:
        degrees: to choose from.
        seconds: measured time of one sample by degree. A degree that was not measured is not chosen.

    Raises:
        ValueError: nothing fits into memory, or nothing that does was measured.
    """
    fitting = [degree for degree in degrees if degree <= members and footprint.at(degree) <= memory_bytes]
    if not fitting:
        raise ValueError(
            f"one sample needs {footprint.at(max(degrees)):.3g} bytes per member at degree {max(degrees)}, "
            f"memory_bytes is {memory_bytes:.3g}"
        )
    measured = [degree for degree in fitting if degree in seconds]
    if not measured:
        raise ValueError(f"seconds must hold one of the degrees {fitting}, got {sorted(seconds)}")
    return min(measured, key=lambda degree: (ceil(samples / (members // degree)) * seconds[degree], degree))


def groups_of(members: Sequence[Member], degree: int, *, across_nodes: bool = False) -> list[tuple[Member, ...]]:
    """Groups of `degree` members each, inside nodes first; those that do not fit serve alone, at the end.

    Inside a group and among groups the order is that of (node, slot), so all who compute this agree.

    Args:
        across_nodes: also make groups of what is left on several nodes (slow links, so not by default).
    """
    if degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}")
    ordered = sorted(members, key=lambda member: (member.node, member.slot))
    groups: list[tuple[Member, ...]] = []
    left: list[Member] = []
    for _, on_node in groupby(ordered, key=lambda member: member.node):
        full, rest = _cut(list(on_node), degree)
        groups += full
        left += rest
    if across_nodes:
        full, left = _cut(left, degree)
        groups += full
    return groups + [(member,) for member in left]


def _cut(members: list[Member], degree: int) -> tuple[list[tuple[Member, ...]], list[Member]]:
    whole = len(members) // degree * degree
    return [tuple(members[first : first + degree]) for first in range(0, whole, degree)], members[whole:]


def training_degree(world: int, largest: int) -> int:
    """How many of `world` training ranks share sequences when some have left: as many as may, in equal groups."""
    for name, value in (("world", world), ("largest", largest)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return max(degree for degree in range(1, min(world, largest) + 1) if world % degree == 0)


def check_geometry(*, world: int, degree: int, heads: int, pairs: int) -> None:
    """Refuses training geometry that cannot work, in one sentence.

    Args:
        world: training ranks.
        heads: attention heads of the model.
        pairs: trained (sample, step) pairs of the smallest update; the dp ranks share them.
    """
    if degree < 1 or world < 1 or world % degree:
        raise ValueError(f"parallel.sp_degree must divide trainer.devices={world}, got {degree}")
    if degree > heads:
        raise ValueError(f"parallel.sp_degree must be at most the model's {heads} attention heads, got {degree}")
    if pairs < world // degree:
        raise ValueError(
            f"an update trains on {pairs} (sample, step) pairs, too few for {world // degree} data-parallel ranks "
            f"(trainer.devices={world} / parallel.sp_degree={degree})"
        )
