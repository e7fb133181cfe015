"""A Ray cluster of several raylets on this machine: nodes with loopback addresses of their own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from src.app.processes import free_port
from tests.app.processes import wait_for

LABEL = "ray.io/market-type"
RAY = str(Path(sys.executable).with_name("ray"))
STARTS = 4
STARTED = "Ray runtime started"
QUICK_DEATH = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray's defaults take 15 seconds to find a node dead."""


ASK = """
import json, sys
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
state = GlobalState()
state._initialize_global_state(
    GcsClientOptions.create(sys.argv[1], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
)
print(json.dumps({row["NodeManagerAddress"]: row["NodeID"] for row in state.node_table() if row["Alive"]}))
"""
"""Ray's ids of the living nodes by machine, without becoming a job of the cluster."""


class Raylets:
    """Starts nodes by `ray start`, as a user does, and kills them as a market does.

    Ray's sockets are in its folder, and their paths must be short.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="raylets-"))
        self.address = f"127.0.0.2:{free_port()}"
        self.token = secrets.token_hex(32)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Raylets:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in list(self._nodes):
            self.kill(machine)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """Of whoever has to do with this cluster."""
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        return {**os.environ, **ray, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **QUICK_DEATH}

    def start_head(self, market: str) -> None:
        port = self.address.rpartition(":")[2]
        self._start("127.0.0.2", market, ["--head", f"--port={port}", "--include-dashboard=false"])

    def start(self, machine: str, market: str) -> None:
        self._start(machine, market, [f"--address={self.address}"])

    def kill(self, machine: str) -> None:
        """Everything on it, at once and without a word."""
        node = self._nodes.pop(machine)
        with suppress(ProcessLookupError):  # it may have given up
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def drain(self, machine: str, deadline_s: int) -> None:
        """As Ray's autoscaler does when it hears of a preemption."""
        ids = json.loads(self._run(sys.executable, "-c", ASK, self.address).splitlines()[-1])
        self._run(
            RAY,
            "drain-node",
            f"--address={self.address}",
            f"--node-id={ids[machine]}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=test",
            f"--deadline-remaining-seconds={deadline_s}",
        )

    def _run(self, *command: str) -> str:
        ran = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=True)
        return ran.stdout

    def _start(self, machine: str, market: str, options: Sequence[str]) -> None:
        """Returns when the node is up. On a busy machine Ray gives up its first start now and then."""
        for _ in range(STARTS):
            log = self._launch(machine, market, options)
            node = self._nodes[machine]
            wait_for(f"the start of {machine}", lambda node=node, log=log: node.poll() is not None or STARTED in log())
            if node.poll() is None:
                return
        raise AssertionError(f"{machine} does not start: {log()[-1000:]}")

    def _launch(self, machine: str, market: str, options: Sequence[str]) -> Callable[[], str]:
        """Returns what reads its log."""
        log = self.folder / f"{machine}.log"
        with log.open("wb") as output:
            self._nodes[machine] = subprocess.Popen(
                [
                    RAY,
                    "start",
                    "--block",
                    f"--node-ip-address={machine}",
                    f"--labels={LABEL}={market}",
                    f"--temp-dir={self.folder}",
                    "--num-cpus=1",
                    "--object-store-memory=100000000",
                    *options,
                ],
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return log.read_text
