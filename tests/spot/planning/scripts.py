"""Small scripts of events for planners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from src.spot.planning.protocol import (
    Action,
    Closed,
    Event,
    Explore,
    LeaseServed,
    Opened,
    Planner,
    SeedsExplored,
    TrainingEnded,
    TrainingStarted,
    Worker,
)

TWO = (Worker("a", 4), Worker("b", 4))


def opened(
    iteration: int,
    *,
    prompts: int = 4,
    keep: int = 4,
    workers: tuple[Worker, ...] = TWO,
    previews: tuple[int, ...] = (),
    reserved_usd_per_hour: float = 36.0,
    spot_usd_per_hour: float = 0.0,
) -> Opened:
    return Opened(
        iteration=iteration,
        prompts=prompts,
        keep=keep,
        steps=10,
        workers=workers,
        previews=previews,
        reserved_usd_per_hour=reserved_usd_per_hour,
        spot_usd_per_hour=spot_usd_per_hour,
    )


def asked(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """(prompt, count) of all that was asked for."""
    return [(action.prompt, action.count) for action in actions if isinstance(action, Explore)]


class Driver:
    """Serves what a planner asks for, `pass_s` seconds per pass, all workers in step; keeps the log."""

    def __init__(self, planner: Planner, reward: Callable[[int, int], float], *, pass_s: float = 10.0) -> None:
        self.planner = planner
        self.log: list[tuple[float, Action]] = []
        self.now_s = 0.0
        self._reward = reward
        self._pass_s = pass_s
        self._queue: deque[tuple[int, int]] = deque()
        self._counts: dict[int, int] = {}

    def tell(self, event: Event) -> list[Action]:
        actions = self.planner.handle(self.now_s, event)
        for action in actions:
            self.log.append((self.now_s, action))
            if isinstance(action, Explore):
                first = self._counts.get(action.prompt, 0)
                self._counts[action.prompt] = first + action.count
                self._queue.extend((action.prompt, first + k) for k in range(action.count))
        return actions

    def iteration(self, opening: Opened, *, training_s: float = 100.0) -> list[int]:
        """One iteration, without rollouts. Returns how many seeds of each prompt came in time."""
        self._queue.clear()
        self._counts.clear()
        self.tell(opening)
        self.tell(TrainingStarted())
        came = [0] * opening.prompts
        end_s = self.now_s + training_s
        size = sum(worker.batch_size for worker in opening.workers)
        while self._queue and self.now_s + self._pass_s <= end_s:
            lease = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
            self.now_s += self._pass_s
            for worker in opening.workers:
                self.tell(LeaseServed(worker.name, opening.steps, self._pass_s))
            for prompt, _ in lease:
                came[prompt] += 1
            self.tell(SeedsExplored(opening.iteration, tuple((p, self._reward(p, k)) for p, k in lease)))
        self.now_s = end_s
        self.tell(TrainingEnded(training_s))
        self.tell(Closed())
        return came

    @property
    def late(self) -> int:
        """Seeds that did not come in time in the last iteration."""
        return len(self._queue)
