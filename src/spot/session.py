"""One job's private Ray: on the loopback interface, with a token of its own, in a folder of its own.

The parent process starts it, a training rank connects to it. Both pass their settings on by environment
variables, so that everything which the job starts has them.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from src.spot.reaper import JOB_VARIABLE

# Ray reads these when it is imported. The second one's name tells where it is on by default; on Linux too it
# makes all servers listen on 127.0.0.1 only, which no argument of ray.init does. Whoever needs ray imports it
# from here, so that they are set.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray as ray

NAMESPACE = "spotlight"
COORDINATOR = "coordinator"
_REPOSITORY = Path(__file__).parents[2]


def environment(scratch: Path) -> dict[str, str]:
    """What every process of the job finds in its environment."""
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        JOB_VARIABLE: str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
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


def start(scratch: Path, *, object_store_bytes: int) -> str:
    """Starts Ray (takes seconds) and returns its address."""
    # Ray prints a paragraph for every process that is killed, straight to stdout. Here that is daily business.
    ray._private.worker._worker_logs_enabled = False
    with _own_sigterm_handler(), _sigterm_blocked():
        context = ray.init(
            "local",
            num_cpus=1,  # our actors take no share of a CPU; for each, Ray would start an idle process
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            namespace=NAMESPACE,
            object_store_memory=object_store_bytes,
            _temp_dir=str(scratch),
        )
    address = str(context.address_info["gcs_address"])
    if not address.startswith("127.0.0.1:"):
        ray.shutdown()
        raise RuntimeError(f"Ray listens on {address}, not on loopback: it was imported before src.spot.session")
    return address


def stop() -> None:
    """Ends Ray, if it was started."""
    node = ray._private.worker._global_node
    if node is not None:  # its daemons do not hear the SIGTERM after which Ray would wait a second for each of them
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})
    ray.shutdown()


def connect(address: str) -> Any:
    """Connects a training rank to the job's Ray and returns the coordinator's actor."""
    with _own_sigterm_handler():
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    return ray.get_actor(COORDINATOR)


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keeps this process's handler, which Ray would replace."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
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
