"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count


class Timeline:
    """A clock (`core.clock.Clock`) that jumps from one happening to the next.

    What is due at the same moment happens in the order in which it was asked for, so a run depends on nothing but
    what is put in.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def __call__(self) -> float:
        return self._now_s

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        """Lets something happen `delay_s` seconds from now."""
        if not 0 <= delay_s < math.inf:
            raise ValueError(f"delay_s must be finite and not negative, got {delay_s}")
        heapq.heappush(self._due, (self._now_s + delay_s, next(self._number), happen))

    def run(self, until: Callable[[], bool], *, at_most_s: float = math.inf) -> bool:
        """Lets things happen until `until()` holds, for at most so many seconds; returns whether it does.

        Without a happening left it returns at once, or after `at_most_s` if that is finite.
        """
        end_s = self._now_s + at_most_s
        while not (done := until()):
            if not self._due or self._due[0][0] > end_s:
                break
            self._now_s, _, happen = heapq.heappop(self._due)
            happen()
        if not done and end_s < math.inf:
            self._now_s = end_s
        return done

    def advance(self, seconds: float) -> None:
        """Lets `seconds` pass."""
        self.run(lambda: False, at_most_s=seconds)
