"""Where every random choice comes from: integers that are pure functions of (run seed, iteration, purpose).

Nothing draws from a global generator, so a choice is the same whatever was drawn before it, in which process,
and whether the run was resumed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

SEED_BITS = 62
"""Sample seeds are non-negative and fit a signed 64-bit integer with room to spare."""


def derive(*parts: int | str) -> int:
    """A 62-bit integer from the parts: blake2b over their text, so that neighbours share nothing."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - SEED_BITS)


def generator(*parts: int | str) -> random.Random:
    """An independent generator for one purpose."""
    return random.Random(derive(*parts))


def sample_seed(run_seed: int, iteration: int, instance: int, index: int) -> int:
    """The seed of candidate `index` of the prompt at position `instance` of an iteration's batch.

    It does not depend on the number of workers, ranks or candidates: candidates 0..G-1 of a prompt are the
    same whether G or N are drawn. (Seeds from chunk-local indices make workers repeat one another's noise.)
    """
    return derive("sample", run_seed, iteration, instance, index)


def sample_seeds(run_seed: int, iteration: int, instance: int, count: int) -> tuple[int, ...]:
    """The first `count` candidate seeds of a prompt."""
    return tuple(sample_seed(run_seed, iteration, instance, index) for index in range(count))


def eval_seed(index: int) -> int:
    """The fixed seed of held-out image `index`: equal for all runs and iterations, so that curves compare."""
    return derive("eval", index)


def permutation(count: int, *parts: int | str) -> list[int]:
    """A random order of range(count) for one purpose."""
    order = list(range(count))
    generator(*parts).shuffle(order)
    return order


def draw(items: Sequence[int], count: int, *parts: int | str) -> tuple[int, ...]:
    """`count` of the items without replacement (all of them if there are fewer), for one purpose."""
    return tuple(generator(*parts).sample(list(items), min(count, len(items))))
