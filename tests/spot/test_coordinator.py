"""What the coordinator keeps, logs and tells."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from src.core.events import read_jsonl
from src.core.types import (
    Exploration,
    Member,
    PolicyVersion,
    Prompt,
    RequestKind,
    SampleResult,
    SampleSpec,
    WorkReport,
)
from src.spot import weights
from src.spot.coordinator import Coordinator
from src.spot.cost import Ledger
from src.spot.members import Joined
from src.spot.prices import FixedPrices
from src.spot.scheduler import Scheduler
from tests.spot.fakes import requests, saves

V0 = PolicyVersion(0, 0)
REPORT = WorkReport(denoise_s=0.5, decode_s=0.25, score_s=0.125, steps=8)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def coordinator(tmp_path, clock):
    with start(tmp_path, clock) as coordinator:
        yield coordinator


@contextmanager
def start(folder, clock, **more):
    scheduler = Scheduler(max_attempts=2)
    coordinator = Coordinator(run="run", folder=folder, scheduler=scheduler, now=clock, **more)
    yield coordinator
    coordinator.shutdown()


def join(coordinator: Coordinator, slot: int) -> str:
    member = Member("n", slot)
    coordinator.join(Joined(member, pid=70 + slot, batch_size=2, fingerprint="fake"))
    return member.name


def pass_time(coordinator: Coordinator, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now_s += 1
        coordinator.tick()


def lease_of(coordinator: Coordinator, worker: str):
    assert coordinator.pull(worker)
    return coordinator.granted.pop(worker)


def results(lease, worker: str, **more):
    return [SampleResult(r.key, worker, "sum", reward=r.key.seed, **more) for r in lease.requests]


def events(folder) -> list[dict]:
    """The event log without what is tested elsewhere."""
    rows = list(read_jsonl(folder / "events.jsonl"))
    for row in rows:
        row.pop("start_wall_s", None)
    return rows


def test_the_event_log_tells_the_whole_story(tmp_path, clock, coordinator):
    a, b = join(coordinator, 0), join(coordinator, 1)
    coordinator.publish(V0, "sum", size_bytes=12, publish_s=0.5)
    explores = requests(RequestKind.EXPLORE, 3, policy=V0, iteration=1)
    coordinator.submit(explores)
    clock.now_s += 2
    lease = lease_of(coordinator, a)
    doomed = lease_of(coordinator, b)
    clock.now_s += 0.5
    coordinator.push(a, lease.id, results(lease, a), REPORT)
    assert coordinator.leave(b, "failed")
    assert not coordinator.leave(b, "failed")
    again = lease_of(coordinator, a)
    coordinator.push(b, doomed.id, results(doomed, b, error="late and bad"), REPORT)
    coordinator.push(a, again.id, results(again, a, error="unreadable"), REPORT)
    coordinator.push(a, again.id, results(again, a), REPORT)
    assert [r.error for r in coordinator.close([r.key for r in explores])] == [None, None, "unreadable"]
    coordinator.record("phase", name="train", iteration=0, start_s=0.0, end_s=2.5)
    coordinator.stop("SIGINT")
    coordinator.stop("SIGINT")

    worker = {"node": "n", "incarnation": 0, "role": "spot", "gpus": 1, "fingerprint": "fake", "batch_size": 2}
    batch = {"request_kind": "explore", "iteration": 1}
    work = {"denoise_s": 0.5, "decode_s": 0.25, "score_s": 0.125, "steps": 8}
    assert events(tmp_path) == [
        {"time_s": 0.0, "kind": "run_started", "run": "run", "incarnation": 0, "iteration": 0},
        {"time_s": 0.0, "kind": "worker_joined", "worker": a, "slot": 0, "pid": 70, **worker},
        {"time_s": 0.0, "kind": "worker_joined", "worker": b, "slot": 1, "pid": 71, **worker},
        {
            "time_s": 0.0,
            "kind": "policy_published",
            "version": "0.0",
            "checksum": "sum",
            "bytes": 12,
            "publish_s": 0.5,
        },
        {"time_s": 0.0, "kind": "submitted", **batch, "count": 3},
        {
            "time_s": 2.0,
            "kind": "lease_granted",
            "lease": 0,
            "worker": a,
            **batch,
            "count": 2,
            "version": "0.0",
        },
        {
            "time_s": 2.0,
            "kind": "lease_granted",
            "lease": 1,
            "worker": b,
            **batch,
            "count": 1,
            "version": "0.0",
        },
        {"time_s": 2.5, "kind": "lease_done", "lease": 0, "worker": a, **batch, "count": 2, **work},
        {"time_s": 2.5, "kind": "results_accepted", "worker": a, **batch, "results": [[0, 0, 0], [0, 1, 1]]},
        {"time_s": 2.5, "kind": "worker_lost", "worker": b, "reason": "failed", "requests": 1},
        {
            "time_s": 2.5,
            "kind": "lease_lost",
            "lease": 1,
            "worker": b,
            **batch,
            "count": 1,
            "reason": "failed",
            "committed_steps": 0,
            "lost_steps": 1,
        },
        {
            "time_s": 2.5,
            "kind": "lease_granted",
            "lease": 2,
            "worker": a,
            **batch,
            "count": 1,
            "version": "0.0",
        },
        {
            "time_s": 2.5,
            "kind": "request_failed",
            **batch,
            "instance": 0,
            "seed": 2,
            "attempts": 2,
            "error": "unreadable",
        },
        {"time_s": 2.5, "kind": "lease_done", "lease": 2, "worker": a, **batch, "count": 1, **work},
        {
            "time_s": 2.5,
            "kind": "result_rejected",
            "worker": a,
            **batch,
            "instance": 0,
            "seed": 2,
            "reason": "duplicate",
        },
        {"time_s": 2.5, "kind": "closed", **batch, "accepted": 3, "dropped": 0},
        {"time_s": 2.5, "kind": "phase", "name": "train", "iteration": 0, "start_s": 0.0, "end_s": 2.5},
        {"time_s": 2.5, "kind": "stop_requested", "signal": "SIGINT"},
    ]


def test_results_are_kept_until_they_are_taken(coordinator):
    worker = join(coordinator, 0)
    coordinator.publish(V0, "sum", 1, 0.0)
    made = requests(RequestKind.ROLLOUT, 4, policy=V0)
    keys = [request.key for request in made]
    coordinator.submit(made)
    first, second = lease_of(coordinator, worker), lease_of(coordinator, worker)
    coordinator.push(worker, second.id, results(second, worker), REPORT)
    assert coordinator.complete(keys[2:])
    assert not coordinator.complete(keys)
    coordinator.push(worker, first.id, results(first, worker), REPORT)
    assert [result.reward for result in coordinator.close(keys[::-1])] == [3, 2, 1, 0]
    assert coordinator.close(keys) == []


def test_the_price_of_a_worker_is_that_of_all_its_gpus(tmp_path, clock):
    ledger = Ledger(prices=FixedPrices(reserved_usd_per_gpu_hour=10.0, spot_usd_per_gpu_hour=3.0), reserved_gpus=4)
    prompts, spec = (Prompt(0, "a red circle"),), SampleSpec(4, (0, 1, 2))
    with start(tmp_path, clock, ledger=ledger) as coordinator:
        coordinator.publish(V0, "sum", 1, 0.0)
        for iteration, gpus in ((1, 4), (2, 2)):  # a group of four, then one of two beside it
            member = Member("n", iteration, gpus=gpus)
            coordinator.join(Joined(member, pid=70, batch_size=2, fingerprint="fake"))
            coordinator.open_exploration(Exploration("run", 0, iteration, prompts, 2, V0, spec))
            coordinator.close_exploration()
    opened = [event for event in events(tmp_path) if event["kind"] == "exploration_opened"]
    assert [(e["reserved_usd_per_hour"], e["spot_usd_per_hour"]) for e in opened] == [(40.0, 12.0), (40.0, 9.0)]


def test_frozen_workers_are_reported(clock, coordinator):
    worker = join(coordinator, 0)
    pass_time(coordinator, clock, 11)
    assert [(lost.worker, lost.reason) for lost in coordinator.lost] == [(worker, "frozen")]
    assert coordinator.workers() == 0
    assert not coordinator.pull(worker)


def test_after_standing_still_it_hears_everybody_before_it_calls_anybody_frozen(clock, coordinator):
    alive, frozen = join(coordinator, 0), join(coordinator, 1)
    coordinator.tick()
    clock.now_s += 60
    coordinator.tick()
    assert not coordinator.lost
    coordinator.heartbeat(alive)  # it waited to be heard
    pass_time(coordinator, clock, 9)
    assert not coordinator.lost
    coordinator.heartbeat(alive)
    pass_time(coordinator, clock, 2)
    assert [(lost.worker, lost.reason) for lost in coordinator.lost] == [(frozen, "frozen")]


def test_who_never_joins_is_lost(tmp_path, clock, coordinator):
    coordinator.expect("spot-n-7.0", 100)
    coordinator.expect("spot-n-8.0", 5)
    coordinator.expect("spot-n-9.0", 5)
    coordinator.expect(Member("n", 0).name, 5)
    join(coordinator, 0)
    coordinator.enlist("team", "spot-n-8.0")  # follows another one, and is no member
    for _ in range(4):
        pass_time(coordinator, clock, 2)
        coordinator.heartbeat(Member("n", 0).name)
    assert [(lost.worker, lost.reason) for lost in coordinator.lost] == [("spot-n-9.0", "absent")]
    coordinator.leave("spot-n-7.0", "left")
    coordinator.leave("spot-n-9.0", "killed")
    pass_time(coordinator, clock, 200)
    assert [lost.worker for lost in coordinator.lost if lost.reason == "absent"] == ["spot-n-9.0"]
    failed = [event["worker"] for event in events(tmp_path) if event["kind"] == "worker_failed"]
    assert failed == ["spot-n-9.0"]


def test_a_lease_that_was_not_fetched_is_void_with_its_worker(coordinator):
    a, b = join(coordinator, 0), join(coordinator, 1)
    coordinator.publish(V0, "sum", 1, 0.0)
    coordinator.submit(requests(RequestKind.ROLLOUT, 2, policy=V0))
    coordinator.pull(a), coordinator.pull(b)
    coordinator.leave(a, "killed")
    assert list(coordinator.granted) == [b]


def test_a_restarted_run_goes_on_in_its_logs(tmp_path, clock, coordinator):
    for step in range(4):
        coordinator.log.log_metrics(step, {"train/reward": step / 10, "nan": float("nan")})
    clock.now_s += 60
    coordinator.record("phase", name="train", iteration=3, start_s=0.0, end_s=60.0)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time_s": 61, "ki')  # it was killed here
    clock.now_s = 7.0  # another boot

    with start(tmp_path, clock, iteration=2) as second:
        assert second.introduce().incarnation == 1
        assert second.introduce().elapsed_s == 60.0
        clock.now_s += 1
        second.log.log_metrics(3, {"train/reward": 0.9})
    rows = [(row["step"], row["time_s"], row["train/reward"]) for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rows == [(0, 0.0, 0.0), (1, 0.0, 0.1), (2, 0.0, 0.2), (3, 61.0, 0.9)]
    started = [row for row in events(tmp_path) if row["kind"] == "run_started"]
    assert [(row["time_s"], row["incarnation"], row["iteration"]) for row in started] == [
        (0.0, 0, 0),
        (60.0, 1, 2),
    ]
    with start(tmp_path, clock) as third:
        assert third.introduce().incarnation == 2


def test_a_restarted_run_deletes_the_weights_of_its_earlier_life(tmp_path, clock, coordinator):
    weights.publish(tmp_path / "weights", V0, saves("abc"))
    with start(tmp_path, clock) as second:
        assert weights.versions(second.introduce().weights_root) == []


def test_news_is_read_from_a_cursor(coordinator):
    coordinator.log.log_metrics(0, {"a": 1.0})
    first = coordinator.log.news(0)
    assert [row["kind"] for row in first.events] == ["run_started"]
    assert [row["a"] for row in first.metrics] == [1.0]
    assert not coordinator.log.has_news(first.cursor)
    coordinator.record("evaluated", iteration=0, reward=0.5)
    second = coordinator.log.news(first.cursor)
    assert [row["kind"] for row in second.events] == ["evaluated"]
    assert second.metrics == []
    assert json.dumps(second.events)


def test_a_reader_that_lags_far_behind_misses_the_oldest_news(coordinator):
    for index in range(20_010):
        coordinator.log._tell("metrics", {"index": index})
    news = coordinator.log.news(1)
    assert [row["index"] for row in news.metrics] == list(range(10, 20_010))
    assert news.cursor == 20_011


def test_what_is_to_be_behind_rollouts_waits_for_them_and_is_forgotten_with_its_policy(tmp_path, coordinator):
    worker = join(coordinator, 0)
    coordinator.publish(V0, "sum", 1, 0.0)
    coordinator.pull(worker)
    coordinator.submit(requests(RequestKind.AUDIT, 2, policy=V0), behind_rollouts=True)
    ahead = Exploration("run", 0, 1, (Prompt(0, "a red circle"),), 2, V0, SampleSpec(4, (0, 1, 2)))
    coordinator.open_exploration(ahead, behind_rollouts=True)
    assert not coordinator.granted
    coordinator.submit(requests(RequestKind.ROLLOUT, 2, policy=V0))
    assert coordinator.granted[worker].kind is RequestKind.ROLLOUT
    kinds = [e["request_kind"] for e in events(tmp_path) if e["kind"] == "submitted"]
    assert kinds == ["rollout", "audit"]
    assert [e["kind"] for e in events(tmp_path)].count("exploration_opened") == 1

    coordinator.close(
        [r.key for kind in (RequestKind.ROLLOUT, RequestKind.AUDIT) for r in requests(kind, 2, policy=V0)]
    )
    coordinator.submit(requests(RequestKind.AUDIT, 2, policy=V0, first=9), behind_rollouts=True)
    V1 = PolicyVersion(0, 1)
    coordinator.publish(V1, "new", 1, 0.0)
    coordinator.submit(requests(RequestKind.ROLLOUT, 2, policy=V1, iteration=1))
    assert [e["request_kind"] for e in events(tmp_path) if e["kind"] == "submitted"] == [*kinds, "rollout"]


def test_a_worker_hears_with_its_commit_of_a_notice_that_others_had(tmp_path, coordinator):
    worker = join(coordinator, 0)
    coordinator.publish(V0, "sum", 1, 0.0)
    coordinator.submit(requests(RequestKind.ROLLOUT, 2, policy=V0))
    lease = lease_of(coordinator, worker)
    assert coordinator.commit(worker, lease.id, 1, ())
    coordinator.notice(worker, 20.0)
    assert not coordinator.commit(worker, lease.id, 2, ())
    coordinator.push(worker, lease.id, (), REPORT)
    assert not coordinator.pull(worker)
    assert [event["reason"] for event in events(tmp_path) if event["kind"] == "lease_lost"] == ["preempted"]


def test_a_worker_hears_with_its_commit_that_its_exploration_was_cut_off(tmp_path, coordinator):
    worker = join(coordinator, 0)
    coordinator.publish(V0, "sum", 1, 0.0)
    explores = requests(RequestKind.EXPLORE, 2, policy=V0, iteration=1)
    coordinator.submit(explores)
    coordinator.pull(worker)
    lease = coordinator.granted.pop(worker)
    assert coordinator.commit(worker, lease.id, 1, ())
    coordinator.close([request.key for request in explores])
    assert not coordinator.commit(worker, lease.id, 2, ())
    coordinator.push(worker, lease.id, (), REPORT)
    (lost,) = [event for event in events(tmp_path) if event["kind"] == "lease_lost"]
    assert (lost["reason"], lost["count"], lost["committed_steps"], lost["lost_steps"]) == ("dropped", 0, 0, 0)
    assert coordinator.commit(worker, lease.id, 3, ())  # of a lease that has ended: it may still bring a result
