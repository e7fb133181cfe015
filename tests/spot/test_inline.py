"""A whole cluster in one process."""

from __future__ import annotations

import pytest

from src.core.events import read_jsonl
from src.core.types import PolicyVersion, RequestKind
from src.spot import weights
from src.spot.coordinator import Coordinator
from src.spot.inline import InlineCluster
from src.spot.scheduler import Scheduler
from tests.spot.fakes import FakeEngine, requests, reward, saves

ROLLOUT, EVAL, AUDIT, EXPLORE = RequestKind
V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


@pytest.fixture
def start(tmp_path):
    """Makes the cluster with so many spot workers; the trainer's engine holds the weights "w0"."""
    coordinators = []

    def start(spot_workers: int) -> InlineCluster:
        coordinators.append(Coordinator(run="run", folder=tmp_path, scheduler=Scheduler(max_attempts=2)))
        return InlineCluster(
            coordinator=coordinators[-1],
            engine=FakeEngine(weights="w0"),
            spot_engines=[FakeEngine(batch_size=2) for _ in range(spot_workers)],
        )

    yield start
    for coordinator in coordinators:
        coordinator.shutdown()


def test_an_iteration(start, tmp_path):
    cluster = start(2)
    cluster.publish(V0, saves("w0"))
    explores = requests(EXPLORE, 7, policy=V0, iteration=1)
    cluster.submit(explores)
    rollouts = requests(ROLLOUT, 10, policy=V0)
    with cluster.phase("rollout", 0):
        made = cluster.collect(rollouts)
    assert [r.key for r in made] == [request.key for request in rollouts]
    assert [r.reward for r in made] == [reward(request.key, "w0") for request in rollouts]
    assert {r.worker for r in made} == {"reserved-local-0.0"}

    explored = cluster.close(explores, wait_s=0.0)
    assert [r.reward for r in explored] == [reward(request.key, "w0") for request in explores]
    assert [r.worker for r in explored] == [f"spot-local-{slot}.0" for slot in (0, 0, 1, 1, 0, 0, 1)]
    counts = {}
    for event in read_jsonl(tmp_path / "events.jsonl"):
        counts[event["kind"]] = counts.get(event["kind"], 0) + 1
    assert counts == {
        "run_started": 1,
        "worker_joined": 3,
        "policy_published": 1,
        "submitted": 2,
        "lease_granted": 3 + 4,
        "lease_done": 3 + 4,
        "results_accepted": 3 + 4,
        "closed": 2,
        "phase_started": 1,
        "phase": 1,
    }


def test_exploration_stays_with_the_policy_it_was_submitted_under(start):
    cluster = start(1)
    cluster.publish(V0, saves("w0"))
    explores = requests(EXPLORE, 2, policy=V0, iteration=1)
    cluster.submit(explores)
    cluster.publish(V1, saves("w1"))
    audits = requests(AUDIT, 1, policy=V1, iteration=1)
    cluster.submit(audits)
    explored = cluster.close(explores, wait_s=0.0)
    assert [r.weights_checksum for r in explored] == ["w0", "w0"]
    assert [r.weights_checksum for r in cluster.close(audits, wait_s=0.0)] == ["w1"]


def test_without_spot_workers_nothing_is_explored_and_everything_else_is_made(start):
    cluster = start(0)
    assert cluster.workers() == 0
    cluster.publish(V0, saves("w0"))
    explores = requests(EXPLORE, 3, policy=V0, iteration=1)
    cluster.submit(explores)
    assert len(cluster.collect(requests(EVAL, 5, policy=V0))) == 5
    assert cluster.close(explores, wait_s=10.0) == []


def test_trainer_weights_that_were_never_published_count_for_nothing(start):
    cluster = start(0)
    cluster.publish(V0, saves("w1"))
    errors = [r.error for r in cluster.collect(requests(ROLLOUT, 2, policy=V0))]
    assert errors == ["result of reserved-local-0.0 rejected: checksum"] * 2


def test_old_weights_are_deleted(start, tmp_path):
    cluster = start(1)
    for iteration in range(5):
        cluster.publish(PolicyVersion(0, iteration), saves("w"))
    assert list(map(str, weights.versions(tmp_path / "weights"))) == ["0.2", "0.3", "0.4"]


def test_metrics_and_stop(start, tmp_path):
    cluster = start(0)
    cluster.log_metrics(3, {"train/reward": 0.5})
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (row["step"], row["train/reward"]) == (3, 0.5)
    assert not cluster.should_stop()
