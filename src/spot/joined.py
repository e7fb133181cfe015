"""A job on a Ray cluster that is there already: parent and training ranks on a reserved node, spot workers on others.

A label of Ray's nodes tells reserved and spot ones apart (`ray start --labels`). The coordinator is put on the parent's
node; every spot worker is tied to its own. Ray's token is that of the cluster, from where Ray looks for it; it is never
made here and never logged.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from src.core.clock import monotonic_s, sleep_s, wall_s
from src.spot.ray_nodes import RayNode, RayNodes
from src.spot.session import BEYOND_LOOPBACK, ClusterError, Place, namespace, own_sigterm_handler, ray

log = logging.getLogger(__name__)

_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
_ASK_S = 1.0
"""From one attempt to reach the cluster to the next."""


class JoinedRay:
    """A Ray cluster that others have started (`session.Session`).

    Args:
        address: host and port of its head, as given to `ray start --address`, or `auto`: the one on this machine.
        label: the key of the label that tells its nodes apart.
        reserved, spot: the values of it. Nodes with neither are left alone.
        timeout_s: how long to try to reach it.
        grace_s: what a node is given that Ray drains without a deadline.
        gpus_per_worker: of its node, for each spot worker alone.
    """

    def __init__(
        self,
        *,
        address: str,
        label: str,
        reserved: str,
        spot: str,
        timeout_s: float,
        grace_s: float,
        gpus_per_worker: int,
    ) -> None:
        self._address = address
        self._label = label
        self._reserved = reserved
        self._spot = spot
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._gpus_per_worker = gpus_per_worker
        self.nodes = RayNodes(read=self._spot_nodes, leaving=self._leaving, drain=drain)
        """Its spot nodes (`market.Nodes`)."""

    def check(self) -> Mapping[str, str]:
        default = Path.home() / ".ray" / "auth_token"
        if not (os.environ.get("RAY_AUTH_TOKEN") or Path(os.environ.get(_TOKEN_FILE, default)).is_file()):
            raise ClusterError(
                f"there is no token for it in RAY_AUTH_TOKEN, {_TOKEN_FILE} or {default} "
                "(`ray get-auth-token --generate` makes one, which all nodes need)"
            )
        return {BEYOND_LOOPBACK: "1"}

    def start(self, scratch: Path, variables: Mapping[str, str]) -> str:
        """See `Session.start`."""
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = True  # what BEYOND_LOOPBACK says, where ray is imported already
        ray._private.worker._worker_logs_enabled = False
        address = self._reachable()
        try:
            with own_sigterm_handler():
                ray.init(
                    address,
                    namespace=namespace(scratch),
                    log_to_driver=False,
                    logging_level="error",
                    runtime_env={"env_vars": dict(variables)},
                )
        except (ConnectionError, ray.exceptions.RayError) as error:
            raise ClusterError(f"it does not let us in ({error}): is our token its token?") from error
        self._here = ray.get_runtime_context().get_node_id()
        self._check_tiers()
        return address

    def place(self, node: str | None) -> Place:
        if node is None:
            return Place({"scheduling_strategy": _on(self._here)})
        return Place(
            {"scheduling_strategy": _on(self.nodes.ray_id(node)), "num_gpus": self._gpus_per_worker}, is_here=False
        )

    def stop(self) -> None:
        ray.shutdown()

    def _reachable(self) -> str:
        """The cluster's address, as soon as something listens there."""
        deadline_s = monotonic_s() + self._timeout_s
        while True:
            with suppress(ConnectionError, OSError):
                address: str = ray._private.services.canonicalize_bootstrap_address(self._address)
                host, _, port = address.rpartition(":")
                with socket.create_connection((host, int(port)), timeout=_ASK_S):
                    return address
            if monotonic_s() >= deadline_s:
                raise ClusterError(f"no Ray cluster is reached there within {self._timeout_s:g} s")
            sleep_s(_ASK_S)

    def _spot_nodes(self) -> Sequence[RayNode]:
        return [
            RayNode(row["NodeID"], row["NodeManagerAddress"])
            for row in ray.nodes()
            if row["Alive"] and row["Labels"].get(self._label) == self._spot
        ]

    def _leaving(self) -> Mapping[str, float]:
        """Nodes that are drained, and the seconds that they have left (Ray Train asks in the same way)."""
        deadlines_ms: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
        now_s = wall_s()
        return {id: max(0.0, ms / 1000 - now_s) if ms else self._grace_s for id, ms in deadlines_ms.items()}

    def _check_tiers(self) -> None:
        """Refuses to train where a reserved node is wanted and this is none."""
        rows = [row for row in ray.nodes() if row["Alive"]]
        tiers = {row["NodeID"]: row["Labels"].get(self._label) for row in rows}
        if tiers[self._here] == self._reserved:
            return
        self.stop()
        if self._reserved not in tiers.values():
            raise ClusterError(f"none of its {len(rows)} nodes is reserved: none has the label {self._wanted}")
        machines = sorted(row["NodeManagerAddress"] for row in rows if tiers[row["NodeID"]] == self._reserved)
        raise ClusterError(f"this node is not reserved: it lacks the label {self._wanted}, as {machines} have it")

    @property
    def _wanted(self) -> str:
        return f"{self._label}={self._reserved}"


def drain(node_id: str, grace_s: float) -> None:
    """Asks Ray to put nothing more on a node, which will be gone in `grace_s` seconds. What runs there goes on.

    Ray has this for its own autoscaler and for a hidden command (`ray drain-node`); it is not part of its public API.
    """
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    deadline_ms = int((wall_s() + grace_s) * 1000)
    client = ray._private.worker.global_worker.gcs_client
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    try:
        accepted, why_not = client.drain_node(node_id, reason, "preemption notice", deadline_ms)
    except Exception as error:  # of whatever kind: the notice stands, and nothing of this job is put there any more
        accepted, why_not = False, error
    if not accepted:
        log.warning("Ray does not drain node %s: %s", node_id, why_not)


def _on(node_id: str) -> Any:
    """Ties an actor to a node: it is never started elsewhere."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
