"""A worker hears from its node that this will be taken away: the node is drained, and nobody is started on it."""

from __future__ import annotations

import os
import signal

import pytest

from src.spot.ray_nodes import RayNode, RayNodes
from tests.spot.conftest import make_engine, until
from tests.spot.test_spares_and_markets import started


@pytest.mark.timeout(300)
def test_a_notice_to_one_worker_is_a_notice_to_its_node(tmp_path):
    alive, drained = [RayNode("a", "10.0.0.1")], []
    nodes = RayNodes(read=lambda: list(alive), leaving=dict, drain=lambda id, grace_s: drained.append((id, grace_s)))
    with started(tmp_path, commit_every=1, engine=make_engine, spot_workers=2, market=nodes) as run:
        workers = run.both_workers()
        os.kill(workers["spot-node0-0.0"], signal.SIGTERM)
        until(lambda: len(run.events("worker_lost")) == 2, within_s=30, what="the end of both")
        assert {e["reason"] for e in run.events("worker_lost")} == {"preempted"}
        assert drained == [("a", 5.0)]
        alive.append(RayNode("b", "10.0.0.2"))
        until(lambda: run.events("worker_joined", node="node1"), within_s=60, what="a worker on the next node")
        alive.pop(0)
        until(lambda: run.events("node_went", node="node0"), within_s=10, what="the end of the node")
        assert run.events("node_came", node="node0")[0]["machine"] == "10.0.0.1"
        assert len(run.events("worker_joined", node="node0")) == 2
        assert not run.events("worker_failed")
