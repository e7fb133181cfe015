from __future__ import annotations

from pathlib import Path

import pytest

from src.core.events import read_jsonl
from src.core.types import PolicyVersion, RequestKind
from src.sim.timeline import Timeline
from src.spot.market import Market
from src.spot.traces import Change, Trace
from tests.spot.fakes import requests

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
ROLLOUT, EVAL, AUDIT, EXPLORE = RequestKind


def log(folder: Path, *kinds: str) -> list[str]:
    """The events of some kinds in few words."""
    told = []
    for event in read_jsonl(folder / "events.jsonl"):
        if event["kind"] in kinds:
            what = [event.get(name) for name in ("worker", "node", "count", "step", "reason") if name in event]
            told.append(f"{event['time_s']:g} {event['kind']} {' '.join(map(str, what))}")
    return told


def test_the_timeline_keeps_the_order_of_what_is_due_at_once():
    timeline, happened = Timeline(), []
    for name, delay_s in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        timeline.after(delay_s, lambda name=name: happened.append((timeline(), name)))
    assert timeline.run(lambda: len(happened) == 2)
    assert happened == [(1.0, "a"), (2.0, "b")]
    timeline.advance(5.0)
    assert (happened[-1], timeline()) == ((2.0, "c"), 7.0)
    assert not timeline.run(lambda: False)
    with pytest.raises(ValueError, match="delay_s must be finite and not negative, got -1"):
        timeline.after(-1.0, happened.clear)


def test_rollouts_are_shared_and_training_and_publishing_take_their_time(tmp_path, virtual):
    cluster = virtual()
    cluster.timeline.advance(0.0)  # the node is there
    cluster.publish(V0, cluster.samples.saves("v0"))
    rollouts = requests(ROLLOUT, 16, policy=V0)
    with cluster.phase("rollout", 0):
        results = cluster.collect(rollouts)
    assert [result.key for result in results] == [request.key for request in rollouts]
    # 4 GPUs, 2 samples each at a time: loads 1 s once, then twice 4 steps of 2 s and 1 s for decoding.
    assert cluster.now() == 2.0 + 1.0 + 2 * (8.0 + 1.0)
    with cluster.phase("train", 0):
        pass
    assert cluster.now() == 61.0
    phases = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "phase"]
    assert [(e["name"], e["start_s"], e["end_s"]) for e in phases] == [("rollout", 2.0, 21.0), ("train", 21.0, 61.0)]
    # Spot GPUs waited already; training ranks ask when they need samples.
    assert log(tmp_path, "lease_granted")[:4] == [
        "2 lease_granted spot-node0-0.0 2",
        "2 lease_granted spot-node0-1.0 2",
        "2 lease_granted reserved-reserved-0.0 2",
        "2 lease_granted reserved-reserved-1.0 2",
    ]


def test_a_pass_that_is_not_full_takes_as_long_as_one_that_is(tmp_path, virtual):
    cluster = virtual(nodes=0, reserved_gpus=1)
    cluster.publish(V0, cluster.samples.saves("v0"))
    cluster.collect(requests(ROLLOUT, 3, policy=V0))
    # Passes of two: loads 1 s, then a lease of 2 and one of 1 sample, each 4 steps of 2 s and 1 s for decoding.
    assert cluster.now() == 2.0 + 1.0 + 2 * (8.0 + 1.0)
    done = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["kind"] == "lease_done"]
    fields = ("count", "steps", "denoise_s", "decode_s")
    assert [tuple(event[name] for name in fields) for event in done] == [(2, 8, 8.0, 1.0), (1, 4, 8.0, 1.0)]


def test_held_out_images_take_no_time(tmp_path, virtual):
    cluster = virtual()
    cluster.publish(V0, cluster.samples.saves("v0"))
    assert len(cluster.collect(requests(EVAL, 5, policy=V0))) == 5
    assert cluster.now() == 2.0


def test_exploration_runs_while_the_trainer_trains_and_is_cut_when_it_ends(tmp_path, virtual):
    cluster = virtual()
    cluster.timeline.advance(0.0)
    cluster.publish(V0, cluster.samples.saves("v0"))
    explores = requests(EXPLORE, 40, policy=V0, iteration=1)
    cluster.submit(explores)
    with cluster.phase("train", 0):
        pass
    explored = cluster.close(explores, wait_s=0.0)
    # Two spot GPUs make 2 samples in 9 s: 4 leases each in 40 s but for the load. The reserved ones do not explore.
    assert len(explored) == 2 * 2 * 4
    assert cluster.now() == 42.0
    assert log(tmp_path, "closed") == ["42 closed "]
    rest = requests(EXPLORE, 4, policy=V0, iteration=1, first=100)
    cluster.submit(rest)
    assert len(cluster.close(rest, wait_s=100.0)) == 4  # waits no longer than it takes
    assert cluster.now() == 43.0 + 9.0  # what was in work when exploration was cut is given back at its next step


def one_place(*changes: tuple[float, bool], duration_s: float = 1000.0) -> Market:
    """A market of one node that joins and leaves at these times."""
    trace = Trace(
        name="scripted",
        changes=tuple(Change(time_s, "n", joins) for time_s, joins in changes),
        duration_s=duration_s,
    )
    return Market(trace=trace, nodes=1, grace_s=10.0)


def test_a_node_under_notice_commits_and_gives_back_and_a_returning_one_starts_anew(tmp_path, virtual):
    cluster = virtual(market=one_place((0, True), (6, False), (100, True)), reserved_gpus=1)
    cluster.timeline.advance(0.0)
    cluster.publish(V0, cluster.samples.saves("v0"))
    cluster.submit(requests(EXPLORE, 4, policy=V0, iteration=1))
    cluster.timeline.advance(200.0)
    assert log(tmp_path, "node_came", "node_went", "notice", "worker_lost", "lease_lost", "lease_resumed") == [
        "0 node_came node0",
        "6 notice spot-node0-0.0",
        "6 notice spot-node0-1.0",
        "7 lease_lost spot-node0-0.0 2 preempted",
        "7 worker_lost spot-node0-0.0 preempted",
        "7 lease_lost spot-node0-1.0 2 preempted",
        "7 worker_lost spot-node0-1.0 preempted",
        "16 node_went node0",
        "100 node_came node0",
        "160 lease_resumed spot-node0-0.1 2 2",
        "160 lease_resumed spot-node0-1.1 2 2",
    ]
    lost = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "lease_lost"]
    assert [(e["committed_steps"], e["lost_steps"]) for e in lost] == [(4, 0), (4, 0)]
    assert len(cluster.samples.made) == 4


def test_without_commits_everything_is_made_again(tmp_path, virtual):
    market = one_place((0, True), (6, False), (100, True))
    cluster = virtual(market=market, keeps_commits=False)
    cluster.timeline.advance(0.0)
    cluster.publish(V0, cluster.samples.saves("v0"))
    cluster.submit(requests(EXPLORE, 4, policy=V0, iteration=1))
    cluster.timeline.advance(200.0)
    lost = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "lease_lost"]
    assert [(e["committed_steps"], e["lost_steps"]) for e in lost] == [(0, 4), (0, 4)]
    assert log(tmp_path, "lease_resumed") == []


def test_groups_of_sequence_parallelism_are_faster_and_serve_as_one_worker(tmp_path, virtual):
    cluster = virtual(degree=2)
    cluster.timeline.advance(0.0)
    cluster.publish(V0, cluster.samples.saves("v0"))
    cluster.collect(requests(ROLLOUT, 4, policy=V0))
    assert cluster.now() == 2.0 + 1.0 + 4 * 1.0 + 0.5
    joined = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "worker_joined"]
    assert [(e["role"], e["gpus"]) for e in joined] == [("reserved", 2), ("spot", 2)]


def test_survivors_of_a_group_across_nodes_form_a_smaller_one(tmp_path, virtual):
    trace = Trace(
        name="scripted",
        changes=(Change(0, "a", True), Change(0, "b", True), Change(6, "b", False)),
        duration_s=1000.0,
    )
    cluster = virtual(market=Market(trace=trace, nodes=2, grace_s=10.0), degree=4, across_nodes=True)
    cluster.timeline.advance(0.0)
    cluster.publish(V0, cluster.samples.saves("v0"))
    explores = requests(EXPLORE, 2, policy=V0, iteration=1, first=7)
    cluster.submit(explores)
    assert len(cluster.close(explores, wait_s=100.0)) == 2
    # Loads to 3, steps of .5 s; the notice at 6 finds it decoding: it finishes, and the two that are left regroup.
    more = requests(EXPLORE, 2, policy=V0, iteration=1, first=9)
    cluster.submit(more)
    assert len(cluster.close(more, wait_s=100.0)) == 2
    joined = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "worker_joined" and e["role"] == "spot"]
    assert [(e["gpus"], e["time_s"]) for e in joined] == [(4, 0.0), (2, 9.25)]


def test_idle_workers_take_as_long_to_form_other_groups_as_busy_ones(tmp_path, virtual):
    trace = Trace(
        name="scripted",
        changes=(Change(0, "a", True), Change(10, "b", True), Change(100, "b", False)),
        duration_s=1000.0,
    )
    cluster = virtual(market=Market(trace=trace, nodes=2, grace_s=10.0), degree=4, across_nodes=True)
    cluster.timeline.advance(200.0)
    joined = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "worker_joined" and e["role"] == "spot"]
    # b is ready at 70; then, and at its notice, groups take 3 s to form.
    assert [(e["gpus"], e["time_s"]) for e in joined] == [(2, 0.0), (4, 73.0), (2, 103.0)]


def test_a_run_is_the_same_however_fast_the_machine_is(tmp_path, virtual):
    logs = []
    for name in ("a", "b"):
        cluster = virtual(tmp_path / name, market=one_place((0, True), (6, False), (50, True)))
        cluster.publish(V0, cluster.samples.saves("v0"))
        cluster.submit(requests(EXPLORE, 30, policy=V0, iteration=1))
        cluster.collect(requests(ROLLOUT, 30, policy=V0))
        with cluster.phase("train", 0):
            pass
        logs.append((tmp_path / name / "events.jsonl").read_bytes())
    assert logs[0] == logs[1]


def trained(folder: Path) -> list[tuple[float, float, int, bool]]:
    """Updates that spot GPUs took part in."""
    events = read_jsonl(folder / "events.jsonl")
    return [(e["start_s"], e["end_s"], e["gpus"], e["lost"]) for e in events if e["kind"] == "spot_trained"]


def train(cluster, iteration: int) -> float:
    """How long an iteration's training took."""
    start_s = cluster.now()
    with cluster.phase("train", iteration):
        pass
    return cluster.now() - start_s


def test_spot_nodes_that_train_form_a_group_with_the_reserved_gpus_once(tmp_path, virtual):
    cluster = virtual(spot_trains=True)
    cluster.timeline.advance(0.0)
    assert [train(cluster, 0), train(cluster, 1)] == [3.0 + 2 * 10.0, 2 * 10.0]  # 40 s of one GPU on four
    assert trained(tmp_path) == [(3, 13, 4 - 2, False), (13, 23, 2, False), (23, 33, 2, False), (33, 43, 2, False)]


def test_a_node_that_goes_takes_the_update_in_hand_with_it_and_comes_back_for_another_iteration(tmp_path, virtual):
    cluster = virtual(spot_trains=True, market=one_place((0, True), (7, False), (20, True)))
    cluster.timeline.advance(0.0)
    # It is killed at 17 s, in the second update: 4 s of that are lost, 3 s pass till the others go on, with 20 s each.
    assert train(cluster, 0) == 17.0 + 3.0 + 20.0
    assert trained(tmp_path) == [(3, 13, 2, False), (13, 17, 2, True)]
    assert train(cluster, 1) == 2 * 20.0  # it came back at 20 s, and is ready at 80 s
    assert train(cluster, 2) == 3.0 + 2 * 10.0


def test_a_node_under_notice_does_not_begin_an_iteration(tmp_path, virtual):
    cluster = virtual(spot_trains=True, market=one_place((0, True), (7, False)))
    cluster.timeline.advance(8.0)
    assert train(cluster, 0) == 2 * 20.0
    assert trained(tmp_path) == []
