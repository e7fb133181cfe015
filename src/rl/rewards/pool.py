"""Scorers that are slow on one CPU core, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
from numpy.typing import NDArray

from src.core.types import Prompt
from src.rl.rewards.reward import Reward, ScoreError

_reward: Reward | Exception
"""The scorer of a pool's process, or why there is none."""


def _start(make: Callable[[], Reward]) -> None:
    global _reward
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _reward = make()
    except Exception as error:  # told to whoever asks for scores: a process that ends here would say nothing
        _reward = error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent closes nothing: its pool would wait for work for ever


def _score(images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
    if isinstance(_reward, Exception):
        raise _reward
    return _reward.score(images_BHWC, prompts)


class ProcessPool:
    """A reward computed by several processes, each with a scorer of its own. They start at the first call.

    A batch is cut into images, so a score never depends on the number of processes. A process that dies or
    takes too long costs the scores of its batch, which the caller may ask for again, from new processes. What
    the making of a scorer raises is raised by `score`.

    Args:
        name: of the scores.
        reward: makes the scorer; it must be picklable, as a module-level class or a partial of one is.
        processes: how many.
        timeout_s: for all images of a call.
    """

    def __init__(self, *, name: str, reward: Callable[[], Reward], processes: int, timeout_s: float = 300.0) -> None:
        if processes < 1:
            raise ValueError(f"ProcessPool.processes must be at least 1, got {processes}")
        if not timeout_s > 0:
            raise ValueError(f"ProcessPool.timeout_s must be positive, got {timeout_s}")
        self.name = name
        self._make = reward
        self._processes = processes
        self._timeout_s = timeout_s
        self._pool: ProcessPoolExecutor | None = None

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        try:
            pool = self._started()
            waiting: list[Future[NDArray[np.float32]]] = [
                pool.submit(_score, images_BHWC[b : b + 1], [prompts[b]]) for b in range(len(prompts))
            ]
            return np.concatenate([one.result(timeout=self._timeout_s) for one in waiting])
        except (BrokenExecutor, FutureTimeout) as error:
            self.close()
            raise ScoreError(f"{self.name}: a scorer process died or was silent for {self._timeout_s} s") from error

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        running = list(pool._processes.values()) if pool._processes else []
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:  # shutdown alone waits for a scorer that hangs
            process.kill()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that torch's threads hold
            self._pool = ProcessPoolExecutor(
                self._processes, mp_context=spawn, initializer=_start, initargs=(self._make,)
            )
        return self._pool
