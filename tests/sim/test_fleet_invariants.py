"""Whatever the market does to groups, loads and leases: no request is lost, no GPU serves twice, all are paid for."""

from __future__ import annotations

import random

import pytest

from src.core.events import read_jsonl
from src.core.types import PolicyVersion, RequestKind
from src.spot.cost import cost_of
from src.spot.market import Market
from src.spot.prices import FixedPrices
from src.spot.traces import Change, Trace
from tests.sim.fakes import Round
from tests.spot.fakes import requests

V0 = PolicyVersion(0, 0)
END_S = 2000.0
PRICES = FixedPrices(reserved_usd_per_gpu_hour=1.0, spot_usd_per_gpu_hour=1.0)


def rough_market(rng: random.Random) -> Market:
    """Places that have a node, and lose it, for seconds or minutes at a time."""
    changes, places = [], rng.randint(1, 5)
    for place in range(places):
        time_s, joins, life = rng.choice([0.0, rng.uniform(0, 200)]), True, 0
        while time_s < END_S:
            changes.append(Change(round(time_s, 1), f"{place}.{life}", joins))
            time_s, joins, life = time_s + rng.uniform(1, 150), not joins, life + (not joins)
    trace = Trace(name="rough", changes=tuple(sorted(changes, key=lambda it: it.time_s)), duration_s=END_S)
    return Market(trace=trace, nodes=min(places, trace.places), grace_s=rng.choice([0.0, 0.5, 1.0, 10.0, 60.0]))


def serving(events):
    """How many spot GPUs are in groups after each event; a worker has one lease at a time."""
    gpus, leases = {}, {}
    for event in events:
        worker = event.get("worker")
        match event["kind"]:
            case "worker_joined" if event["role"] == "spot":
                gpus[worker] = event["gpus"]
            case "worker_lost":
                gpus.pop(worker, None)
            case "lease_granted":
                assert leases.setdefault(worker, event["lease"]) == event["lease"]
            case "lease_done" | "lease_lost":
                assert leases.pop(worker) == event["lease"]
        yield event, sum(gpus.values())


def paid_gpu_s(events):
    since, paid = {}, 0.0
    for event in events:
        if event["kind"] == "node_came":
            assert event["node"] not in since
            since[event["node"]] = event["time_s"]
        elif event["kind"] == "node_went":
            paid += event["time_s"] - since.pop(event["node"])
    return paid + sum(events[-1]["time_s"] - start_s for start_s in since.values())


@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_lost_and_no_gpu_serves_twice(tmp_path, virtual, seed):
    rng = random.Random(seed)
    gpus_per_node = rng.choice([1, 2, 4])
    cluster = virtual(
        market=rough_market(rng),
        degree=rng.choice([1, 2, 3, 4, 8]),
        across_nodes=rng.random() < 0.6,
        gpus_per_node=gpus_per_node,
        commit_every=rng.choice([0, 1, 3]),
        keeps_commits=rng.random() < 0.8,
        durations=Round(
            regroup_s=rng.choice([0.0, 3.0, 60.0]), start_s=rng.choice([0.0, 60.0]), load_s=rng.choice([1.0, 30.0])
        ),
    )
    cluster.publish(V0, cluster.samples.saves("v0"))
    explores = requests(RequestKind.EXPLORE, 200, policy=V0, iteration=1)
    cluster.submit(explores)
    for iteration in range(4):
        cluster.timeline.advance(300.0)
        rollouts = requests(RequestKind.ROLLOUT, 40, policy=V0, first=1000 * (iteration + 1))
        results = cluster.collect(rollouts)
        assert [(result.key, result.error) for result in results] == [(request.key, None) for request in rollouts]
    assert len(cluster.close(explores, wait_s=100_000.0)) == len(explores)

    events = list(read_jsonl(tmp_path / "events.jsonl"))
    nodes = 0
    for event, serve in serving(events):
        nodes += (event["kind"] == "node_came") - (event["kind"] == "node_went")
        assert serve <= gpus_per_node * nodes
    accepted = [seed for event in events if event["kind"] == "results_accepted" for _, seed, _ in event["results"]]
    assert len(accepted) == len(set(accepted)) == 200 + 4 * 40
    assert cost_of(events, prices=PRICES).spot_s == pytest.approx(gpus_per_node * paid_gpu_s(events))
