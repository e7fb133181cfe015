"""Which explored seeds are worth training on: the subsets with the most contrast in reward.

All functions take the explored rewards of one prompt (N numbers) and return `count` of their indices, lowest
rewards first. Ties are broken by the generator that is passed in: rewards of small models are often equal,
and taking the first ones would favour seeds that came early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

Selector = Callable[[Sequence[float], int, random.Random], list[int]]


def _ranked(rewards: Sequence[float], ties: random.Random) -> list[int]:
    return sorted(range(len(rewards)), key=lambda index: (rewards[index], ties.random()))


def _check(rewards: Sequence[float], count: int) -> None:
    if not 0 < count <= len(rewards):
        raise ValueError(f"count must be in 1..{len(rewards)} (the number of explored rewards), got {count}")
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards must be finite, since others have no rank, got {list(rewards)}")


def extremes(rewards: Sequence[float], count: int, ties: random.Random) -> list[int]:
    """The count//2 lowest and the rest highest rewards (Sol-RL, arXiv 2604.06916)."""
    _check(rewards, count)
    order = _ranked(rewards, ties)
    low = count // 2
    return order[:low] + order[len(order) - (count - low) :]


def max_variance(rewards: Sequence[float], count: int, ties: random.Random) -> list[int]:
    """The subset of largest variance (PODS, arXiv 2504.13818), in O(N log N).

    Such a subset always consists of the i lowest and count - i highest rewards, so the best split is found
    from running sums. Of equally good splits the most even one is taken.
    """
    _check(rewards, count)
    order = _ranked(rewards, ties)
    # Moved and scaled into [0, 1], so that neither large rewards nor tiny differences lose digits.
    floor, span = rewards[order[0]], (rewards[order[-1]] - rewards[order[0]]) or 1.0
    lowest = [(rewards[index] - floor) / span for index in order[:count]]
    highest = [(rewards[index] - floor) / span for index in order[len(order) - count :]]
    total = sum(highest)
    squares = sum(value * value for value in highest)
    best, best_low = -1.0, 0
    for low in range(count + 1):
        spread = squares / count - (total / count) ** 2
        closer = abs(2 * low - count) < abs(2 * best_low - count)
        if spread > best + 1e-12 or (spread > best - 1e-12 and closer):
            best, best_low = max(best, spread), low
        if low < count:
            total += lowest[low] - highest[low]
            squares += lowest[low] ** 2 - highest[low] ** 2
    return order[:best_low] + order[len(order) - (count - best_low) :]
