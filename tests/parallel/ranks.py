"""A pool of processes that compute together: started once, since importing torch and diffusers takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from src.parallel.group import ElasticGroup, connect_store, serve_store

START_S, TASK_S = 240.0, 120.0
GROUP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Rank:
    """What a task gets: its place, and a fresh group of all that run it."""

    rank: int
    size: int
    group: ElasticGroup
    generation: int
    store_port: int
    device: torch.device


class RankPool:
    """`size` processes. `run(task, *arguments, size=n)` has the first n of them call task(rank, *arguments).

    On `cuda` each has the GPU of its number.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        self._store = serve_store()
        self._generation = 0
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(size):
            ours, theirs = context.Pipe()
            own = torch.device(device, number if device == "cuda" else None)
            process = context.Process(target=_serve, args=(theirs, self._store.port, own), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(START_S), "a rank did not start"
            pipe.recv()

    def run(self, task: Callable[..., Any], *arguments: Any, size: int) -> list[Any]:
        """What the task returned on each rank, in their order. Raises what it raised first."""
        self._generation += 1
        pipes = self._pipes[:size]
        for rank, pipe in enumerate(pipes):
            pipe.send((task, rank, size, self._generation, arguments))
        results = {}
        while len(results) < size:
            waiting = [pipe for pipe in pipes if pipe not in results]
            ready = wait(waiting, TASK_S)
            assert ready, f"{len(waiting)} of {size} ranks did not finish within {TASK_S} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[pipe] = pipe.recv()
        for good, value in results.values():
            assert good, value
        return [results[pipe][1] for pipe in pipes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, port: int, device: torch.device) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = connect_store("127.0.0.1", port)
    pipe.send("ready")
    while True:
        task, rank, size, generation, arguments = pipe.recv()
        try:
            group = ElasticGroup(
                store,
                name="task",
                generation=generation,
                rank=rank,
                size=size,
                timeout_s=GROUP_TIMEOUT_S,
                device=device,
            )
            outcome = (True, task(Rank(rank, size, group, generation, port, device), *arguments))
            group.drop()
        except Exception:
            outcome = (False, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(outcome)


def largest_difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Largest relative difference of two lists of tensors.

    Relative to the largest element of each tensor of `other`; gradients that vanish but for rounding (below a
    thousandth of the largest of all) are measured against that.
    """
    return _largest(one, other, lambda tensor: float(tensor.abs().max()))


def largest_rms(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The same of the root mean squares."""
    return _largest(one, other, lambda tensor: float(tensor.double().square().mean().sqrt()))


def _largest(
    one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], size: Callable[[torch.Tensor], float]
) -> float:
    largest = [size(b) for b in other]
    floor = max(largest) / 1000
    differences = [size(a - b) for a, b in zip(one, other, strict=True)]
    return max(difference / max(scale, floor) for difference, scale in zip(differences, largest, strict=True))
