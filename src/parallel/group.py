"""Process groups that live for one generation of members and are formed anew in milliseconds.

`torch.distributed.new_group` needs all processes of the default group, and equal histories in each. Here a group is
a bare backend whose keys in the store carry its generation: whoever agrees on (generation, rank, size) meets there,
whatever happened before. Forming one takes 5-14 ms with gloo; torchft's process groups, which wrap the same backend,
take 19 ms and would be one dependency more.

The store belongs to a process that nobody preempts (`serve_store`): if its host dies, no group can form any more.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo, ReduceOp

from src.core.protocols import GroupLost as GroupLost
from src.core.protocols import never

T = TypeVar("T")

STORE_TIMEOUT_S = 60.0
LOOK_S = 0.25
"""How often a member that waits for the others' arrival asks whether they still will come."""


def serve_store(host: str = "127.0.0.1", port: int = 0, *, timeout_s: float = STORE_TIMEOUT_S) -> TCPStore:
    """A store in this process, for groups to form through; port 0 has the system choose a free one, its `port`.

    It listens on `host` alone: left to itself, torch would listen on every interface.
    """
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store owns it from here on
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)


def connect_store(host: str, port: int, *, timeout_s: float = STORE_TIMEOUT_S) -> TCPStore:
    """The store of another process."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class ElasticGroup:
    """One generation's group (a `ulysses.Group`). Collectives wait until they are done.

    At the first error of a collective the group is dropped, which wakes up those who wait for this process once nothing
    refers to it any more, and GroupLost is raised. A member that freezes is noticed after `timeout_s`, one that dies
    as soon as the system has closed its connections.

    Args:
        store: shared by all members.
        name: of the group among others that form through the same store, such as `sp3`.
        generation: all members must mean the same one; it is never used twice.
        rank, size: place of this process in the group.
        timeout_s: how long a collective may take.
        arrival_s: how long the other members' arrival here may take, if not as long.
        is_over: whether it is known meanwhile that they will not all come. Asked now and then while gloo connects them,
            since nothing else notices a death before that is done. The store must then not be used again.
        device: of the tensors.

    Raises:
        GroupLost: not all members came in time.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        generation: int,
        rank: int,
        size: int,
        timeout_s: float,
        arrival_s: float | None = None,
        is_over: Callable[[], bool] = never,
        device: torch.device,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1}, got {rank}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.generation = generation
        self._rank, self._size = rank, size
        prefixed = PrefixStore(f"{name}/{generation}", store)
        self._backend: Any = None
        arrival = timedelta(seconds=timeout_s if arrival_s is None else arrival_s)
        self._run(lambda: self._form(prefixed, timedelta(seconds=timeout_s), arrival, is_over, device))

    def _form(
        self, store: Store, timeout: timedelta, arrival: timedelta, is_over: Callable[[], bool], device: torch.device
    ) -> None:
        if device.type == "cpu":
            self._backend = _unless(is_over, lambda: ProcessGroupGloo(store, self._rank, self._size, arrival))
            self._backend._set_default_timeout(timeout)
        else:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._backend = ProcessGroupNCCL(store, self._rank, self._size, options)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], /
    ) -> ElasticGroup:
        return self._collective(lambda backend: backend.alltoall_base(output, input, output_sizes, input_sizes))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> ElasticGroup:
        return self._collective(lambda backend: backend.allgather(outputs, inputs))

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces the tensor by that of rank 0."""
        self._collective(lambda backend: backend.broadcast(tensor, 0))

    def sum(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over the group."""
        self._collective(lambda backend: backend.allreduce([tensor], ReduceOp.SUM))

    def wait(self) -> None:
        """Nothing to wait for: a collective returns when it is done, so it stands for its own `Work`."""

    def drop(self) -> None:
        """Leaves the group; the others see it as an error in their next collective. May be called twice."""
        if self._backend is not None:
            last, self._backend = [self._backend], None
            last[0].abort()
            # It ends with its last reference, which takes gloo up to 10 ms for each connection.
            threading.Thread(target=last.clear, name="end of a group").start()

    def _collective(self, start: Callable[[Any], Any]) -> ElasticGroup:
        if self._backend is None:
            raise GroupLost(f"generation {self.generation} was dropped")
        self._run(lambda: start(self._backend).wait())
        return self

    def _run(self, step: Callable[[], object]) -> None:
        try:
            step()
        except RuntimeError as error:  # torch raises nothing more exact
            self.drop()
            raise GroupLost(f"generation {self.generation}, rank {self._rank} of {self._size}: {error}") from error


def _unless(is_over: Callable[[], bool], make: Callable[[], T]) -> T:
    """What `make` returns. It cannot be interrupted, so when it is for nothing it is left to itself, in its thread.

    Raises:
        RuntimeError: it was for nothing. And what `make` raises.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error.with_traceback(None))  # whose frames would keep the store's connection

    threading.Thread(target=run, name="arrival in a group", daemon=True).start()
    while not made.done():
        try:
            made.exception(LOOK_S)
        except TimeoutError:
            if is_over():
                raise RuntimeError("somebody will not come") from None
    return made.result()
