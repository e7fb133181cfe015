from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from src.report.timeline import Mark, Span, coalesce, timeline


def joined(time_s: float, worker: str, slot: int, role: str = "spot") -> dict[str, Any]:
    return {
        "time_s": time_s,
        "kind": "worker_joined",
        "worker": worker,
        "role": role,
        "node": "a",
        "slot": slot,
    }


def granted(time_s: float, lease: int, worker: str, kind: str = "explore") -> dict[str, Any]:
    fields = {"lease": lease, "worker": worker, "request_kind": kind, "iteration": 3, "count": 8}
    return {"time_s": time_s, "kind": "lease_granted", **fields}


def over(time_s: float, lease: int, kind: str = "lease_done") -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, "lease": lease}


def lost(time_s: float, worker: str, reason: str) -> dict[str, Any]:
    return {"time_s": time_s, "kind": "worker_lost", "worker": worker, "reason": reason}


def test_a_worker_that_returns_continues_its_row() -> None:
    who = timeline(
        [
            joined(1, "w.0", 0),
            granted(2, 1, "w.0"),
            over(4, 1),
            granted(5, 2, "w.0"),
            {"time_s": 5.5, "kind": "notice", "worker": "w.0", "grace_s": 2.0, "requests": 8},
            {"time_s": 5.6, "kind": "notice", "worker": "somebody", "grace_s": 2.0, "requests": 0},
            over(6, 2, "lease_lost") | {"committed_steps": 16, "lost_steps": 8},
            lost(6, "w.0", "preempted"),
            joined(9, "w.1", 0),
            granted(10, 3, "w.1", "rollout"),
            over(12, 3),
            granted(13, 4, "w.1"),
            over(14, 4, "lease_lost") | {"reason": "dropped"},
        ]
    )
    (row,) = who.rows
    assert row.name == "spot a/0"
    assert row.spans == [
        Span(2, 4, "explore", "explore, iteration 3, 8 samples"),
        Span(5, 6, "explore", "explore, iteration 3, 8 samples, lost: 16 steps committed, 8 to make again", lost=True),
        Span(10, 12, "rollout", "rollout, iteration 3, 8 samples"),
        Span(13, 14, "explore", "explore, iteration 3, 8 samples, cut off: nobody waited for them any more", lost=True),
    ]
    assert row.marks == [Mark(1, "joined"), Mark(5.5, "notice"), Mark(6, "preempted"), Mark(9, "returned")]
    assert row.alive == [(1, 6), (9, 14)]
    assert (row.busy_s(), row.busy_s("explore"), row.alive_s) == (4, 2, 10)
    assert who.end_s == 14


def test_the_trainer_comes_first_and_workers_in_order() -> None:
    phase = {"kind": "phase", "name": "train", "iteration": 0, "start_s": 2.0, "end_s": 5.0, "time_s": 5.0}
    who = timeline([joined(0, "s1", 1), joined(0, "s0", 0), joined(0, "r0", 0, role="reserved"), phase])
    assert [row.name for row in who.rows] == ["trainer", "reserved a/0", "spot a/0", "spot a/1"]
    assert who.rows[0].spans == [Span(2, 5, "train", "train, iteration 0")]


def test_rows_are_in_the_order_of_their_numbers() -> None:
    who = timeline([joined(0, f"s{slot}", slot) for slot in (10, 2, 1)])
    assert [row.name for row in who.rows] == ["spot a/1", "spot a/2", "spot a/10"]


def test_a_restart_ends_what_the_crash_left_open() -> None:
    restart = {"time_s": 7.0, "kind": "run_started", "incarnation": 1}
    who = timeline([joined(1, "w.0", 0), granted(2, 1, "w.0"), restart, joined(8, "w.1", 0)])
    (row,) = who.rows
    assert row.spans == [Span(2, 7, "explore", "explore, iteration 3, 8 samples, lost", lost=True)]
    assert row.marks == [Mark(1, "joined"), Mark(7, "left"), Mark(8, "returned")]


def test_what_is_open_at_the_end_lasts_until_then() -> None:
    phase = {"kind": "phase", "name": "train", "iteration": 0, "start_s": 2.0, "end_s": 5.0, "time_s": 5.0}
    who = timeline([joined(1, "w.0", 0), granted(2, 1, "w.0"), phase])
    assert who.rows[1].spans == [Span(2, 5, "explore", "explore, iteration 3, 8 samples")]
    assert who.rows[1].alive == [(1, 5)]


def test_unknown_leases_and_workers_are_left_out() -> None:
    assert timeline([over(1, 5), lost(2, "nobody", "killed"), granted(3, 6, "nobody"), over(4, 6)]).rows == ()


def test_neighbours_merge_and_lost_work_never_does() -> None:
    spans = [
        Span(0, 1, "explore", "a"),
        Span(1.05, 2, "explore", "b"),
        Span(2, 3, "audit", "c"),
        Span(3, 4, "audit", "d", lost=True),
        Span(4, 5, "audit", "e", lost=True),
        Span(9, 10, "audit", "f"),
    ]
    assert coalesce(spans, 0.1) == [Span(0, 2, "explore", "explore, 0.0-2.0 s"), *spans[2:]]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.sampled_from(["explore", "rollout"]), st.booleans())))
def test_merging_hides_no_work(rows: list[tuple[float, float, str, bool]]) -> None:
    spans = [Span(start_s, start_s + length_s, kind, "", lost) for start_s, length_s, kind, lost in rows]
    merged = coalesce(spans, 0.5)
    assert len(merged) <= len(spans)
    for span in spans:
        assert any(
            (m.kind, m.lost) == (span.kind, span.lost) and m.start_s <= span.start_s and span.end_s <= m.end_s
            for m in merged
        )


def test_spot_rows_know_when_their_node_was_paid_for() -> None:
    def node(time_s: float, kind: str, name: str) -> dict[str, Any]:
        return {"time_s": time_s, "kind": kind, "node": name, "gpus": 2}

    who = timeline(
        [
            joined(0, "r0", 0, role="reserved"),
            node(1, "node_came", "a"),
            joined(3, "s0", 0),
            joined(3, "s1", 1),
            node(5, "node_came", "b"),
            node(7, "node_went", "a"),
            node(8, "node_went", "unheard of"),
            node(9, "node_came", "a"),
            {"time_s": 10.0, "kind": "run_ended"},
        ]
    )
    paid = {row.name: row.paid for row in who.rows}
    assert paid == {
        "reserved a/0": [],
        "spot a/0": [(1, 7), (9, 10)],
        "spot a/1": [(1, 7), (9, 10)],
        "spot b": [(5, 10)],
    }


def test_a_worker_that_goes_on_with_anothers_work_is_marked() -> None:
    resumed = {"time_s": 2.0, "kind": "lease_resumed", "lease": 2, "worker": "w.0", "step": 4, "after": [1]}
    (row,) = timeline([joined(1, "w.0", 0), granted(2, 2, "w.0"), resumed, resumed | {"worker": "nobody"}]).rows
    assert row.marks == [Mark(1, "joined"), Mark(2, "resumed", "before step 4")]


def test_updates_that_a_spot_node_took_part_in_are_on_its_rows() -> None:
    update = {"kind": "spot_trained", "iteration": 3, "nodes": ["a"], "gpus": 2}
    events = [
        joined(1, "w.0", 0),
        joined(1, "r.0", 0, role="reserved"),
        {"time_s": 5, **update, "start_s": 3.0, "end_s": 5.0, "lost": False},
        {"time_s": 6, **update, "start_s": 5.0, "end_s": 6.0, "lost": True},
    ]
    reserved, spot = timeline(events).rows
    assert reserved.spans == []
    assert spot.spans == [
        Span(3, 5, "train", "train, iteration 3"),
        Span(5, 6, "train", "train, iteration 3, lost", True),
    ]
