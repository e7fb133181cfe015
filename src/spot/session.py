"""The Ray that a job runs on: one of its own, here, or a cluster that is there already (src/spot/joined.py).

A job's own Ray is on the loopback interface, with a token of its own, in a folder of its own. The parent process starts
it, a training rank connects to it. Both pass their settings on by environment variables, so that everything which the
job starts has them.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from src.spot.reaper import JOB_VARIABLE

# Ray reads these when it is imported. Whoever needs ray imports it from here, so that they are set. Training ranks
# inherit the second one from their parent.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray as ray

BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Its name tells where it is off by default; on Linux too, "0" makes all servers listen on 127.0.0.1 only, which no
argument of ray.init does."""
TOKEN = "RAY_AUTH_TOKEN"
COORDINATOR = "coordinator"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OWN_TOKEN = secrets.token_hex(32)  # one per process: Ray keeps the first that it sees
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Where a process of the job runs."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its Ray actor."""
    is_here: bool = True
    """On the parent's machine: its process id means something, and it sees the run folder."""


class Session(Protocol):
    """The Ray that a job runs on."""

    def check(self) -> Mapping[str, str]:
        """Settings that all processes of the job need in their environment, besides `environment`.

        Raises:
            ClusterError: something is missing without which it cannot be used.
        """

    def start(self, scratch: Path, variables: Mapping[str, str]) -> str:
        """Starts or joins it, with these variables in the environment of every actor, and returns its address.

        Raises:
            ClusterError: it cannot be used.
        """

    def place(self, node: str | None) -> Place:
        """Where to put an actor that belongs on a node; None: the parent's own."""

    def stop(self) -> None:
        """Ends what was started or joined, if it was."""


class ClusterError(RuntimeError):
    """A Ray cluster cannot be used as it is; the message tells why in one line."""


def environment(scratch: Path) -> dict[str, str]:
    """What every process of the job finds in its environment."""
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        JOB_VARIABLE: str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        # torch's: memory in large pages, which a process that is killed is rid of at once
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),
        "RAY_worker_niceness": "0",  # 15 by default, for every actor: the trainer waits for the coordinator
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


@contextmanager
def environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class OwnRay:
    """A job's own Ray, for one machine.

    Args:
        object_store_bytes: shared memory through which large results pass.
        reserved_gpus, spot_gpus: if each spot worker is to have a GPU for itself, how many the training ranks have, the
            first ones of the machine, and how many are needed besides. Ray hands out what is left.
    """

    def __init__(self, *, object_store_bytes: int = 256 * 2**20, reserved_gpus: int = 0, spot_gpus: int = 0) -> None:
        self._object_store_bytes = object_store_bytes
        self._reserved_gpus = reserved_gpus
        self._spot_gpus = spot_gpus

    def check(self) -> Mapping[str, str]:
        return {TOKEN: os.environ.get(TOKEN, _OWN_TOKEN), BEYOND_LOOPBACK: "0"}

    def start(self, scratch: Path, variables: Mapping[str, str]) -> str:
        """See `Session.start`; takes seconds."""
        if self._spot_gpus:
            variables = {**variables, _VISIBLE: ",".join(self._left())}
        # Ray prints a paragraph for every process that is killed, straight to stdout. Here that is daily business.
        ray._private.worker._worker_logs_enabled = False
        with environ(variables), own_sigterm_handler(), sigterm_blocked():
            context = ray.init(
                "local",
                num_cpus=1,  # our actors take no share of a CPU; for each, Ray would start an idle process
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                namespace=namespace(scratch),
                object_store_memory=self._object_store_bytes,
                _temp_dir=str(scratch),
            )
        address = str(context.address_info["gcs_address"])
        if not address.startswith("127.0.0.1:"):
            ray.shutdown()
            raise RuntimeError(f"Ray listens on {address}, not on loopback: it was imported before src.spot.session")
        return address

    def _left(self) -> list[str]:
        """The GPUs that are not the ranks'."""
        gpus = ray._private.accelerators.NvidiaGPUAcceleratorManager
        count = gpus.get_current_node_num_accelerators()
        visible = gpus.get_current_process_visible_accelerator_ids() or [str(number) for number in range(count)]
        left = visible[self._reserved_gpus :]
        if len(left) < self._spot_gpus:
            raise ClusterError(f"{self._reserved_gpus} + {self._spot_gpus} GPUs are needed, there are {len(visible)}")
        return left

    def place(self, node: str | None) -> Place:
        return Place() if node is None or not self._spot_gpus else Place({"num_gpus": 1})

    def stop(self) -> None:
        node = ray._private.worker._global_node
        if node is not None:  # its daemons do not hear the SIGTERM after which Ray would wait for each a second
            kill = node.kill_all_processes
            node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})
        ray.shutdown()


def namespace(scratch: Path) -> str:
    """Of a job's actors: another job on the same Ray has its own coordinator."""
    return scratch.name


def connect(address: str) -> Any:
    """Connects a training rank to the job's Ray and returns the coordinator's actor."""
    job = namespace(Path(os.environ[JOB_VARIABLE]))
    with own_sigterm_handler():
        ray.init(address, namespace=job, log_to_driver=False, logging_level="error")
    return ray.get_actor(COORDINATOR)


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Keeps this process's handler, which Ray would replace."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """What is started meanwhile, and whatever that starts, never sees a SIGTERM unless it unblocks it.

    Batch systems and init send it to all processes of a job at once; Ray and coordinator must outlive it, so that the
    training rank can finish and save. (SIGINT is blocked in Ray's processes by Ray itself.) This process gets what
    came meanwhile right after.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
