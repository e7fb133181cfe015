"""What becomes of the rows of Ray's table of nodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.spot.market import Heard, Kill, Missed, Notice, Return, Start, Tick
from src.spot.ray_nodes import RayNode, RayNodes

A, B, C = (RayNode(id, f"10.0.0.{number}") for number, id in enumerate("abc"))


class Table:
    """A table of nodes that tests write to, and what was drained."""

    def __init__(self, *alive: RayNode) -> None:
        self.alive = list(alive)
        self.reads = 0
        self.drained: list[tuple[str, float]] = []
        self.leaving: dict[str, float] = {}
        self.nodes = RayNodes(
            read=self.read,
            leaving=lambda: self.leaving,
            drain=lambda id, grace_s: self.drained.append((id, grace_s)),
        )

    def read(self) -> list[RayNode]:
        self.reads += 1
        return list(self.alive)

    def tick(self, now_s: float, *alive: RayNode):
        self.alive = list(alive)
        return self.nodes.handle(now_s, Tick())


def test_nodes_come_and_go_with_the_table():
    table = Table(A)
    assert table.nodes.handle(0.0, Start()) == [Return("node0", "10.0.0.0")]
    assert table.tick(1.0, A, B) == [Return("node1", "10.0.0.1")]
    assert table.tick(2.0, A, B) == []
    assert table.tick(3.0, B) == [Kill("node0")]
    assert table.nodes.nodes == ["node1"]
    assert table.tick(4.0, B, C) == [Return("node0", "10.0.0.2")]
    assert [table.nodes.ray_id(name) for name in ("node0", "node1")] == ["c", "b"]


def test_a_name_is_free_only_after_its_node_was_seen_to_be_gone():
    table = Table(A, B)
    table.nodes.handle(0.0, Start())
    assert table.tick(1.0, C, B) == [Kill("node0"), Return("node2", "10.0.0.2")]


def test_a_raylet_that_was_started_again_is_another_node():
    table = Table(A)
    table.nodes.handle(0.0, Start())
    again = RayNode("a2", A.machine)
    assert table.tick(1.0, again) == [Kill("node0"), Return("node1", A.machine)]


def test_the_table_is_read_twice_a_second_and_whenever_a_worker_is_missed():
    table = Table(A)
    assert table.nodes.next_s == -math.inf
    table.nodes.handle(7.0, Start())
    assert table.nodes.next_s == 7.5
    assert (table.tick(7.4), table.reads) == ([], 1)
    assert (table.nodes.handle(7.4, Missed("node0")), table.reads) == ([Kill("node0")], 2)
    assert table.nodes.next_s == 7.9


def test_a_node_that_has_notice_is_drained_and_counts_no_more():
    table = Table(A, B)
    table.nodes.handle(0.0, Start())
    assert table.nodes.handle(1.0, Heard("node0", 30.0)) == [Notice("node0", 30.0)]
    assert (table.nodes.nodes, table.drained) == (["node1"], [("a", 30.0)])
    assert table.nodes.handle(1.2, Heard("node0", 29.0)) == []  # from its second worker
    assert table.tick(2.0, A, B) == []
    assert table.tick(3.0, B) == [Kill("node0")]
    assert table.nodes.handle(3.1, Heard("node0", 1.0)) == []
    assert table.drained == [("a", 30.0)]
    table.tick(4.0, B, C)
    assert sorted(table.nodes.nodes) == ["node0", "node1"]


def test_a_node_that_somebody_else_drains_has_notice():
    table = Table(A, B)
    table.nodes.handle(0.0, Start())
    table.leaving = {"b": 20.0, "c": 5.0}
    assert table.tick(1.0, A, B, C) == [Notice("node1", 20.0)], "and one that leaves already does not count"
    assert (table.nodes.nodes, table.drained) == (["node0"], [])
    table.leaving = {"b": 19.0}
    assert table.nodes.handle(1.5, Heard("node1", 18.0)) == []
    assert table.tick(2.0, A, B) == []
    assert table.tick(3.0, A) == [Kill("node1")]


def test_the_interval_is_positive():
    with pytest.raises(ValueError, match=r"interval_s must be positive and finite, got 0"):
        RayNodes(read=list, leaving=dict, drain=lambda id, grace_s: None, interval_s=0)


@given(st.lists(st.sets(st.sampled_from("abcdef"))))
def test_what_it_tells_adds_up_to_the_table(snapshots):
    table, up = Table(), dict[str, str]()
    for now_s, ids in enumerate(snapshots):
        for action in table.tick(float(now_s), *(RayNode(id, "m" + id) for id in sorted(ids))):
            match action:
                case Return(name, machine):
                    assert name not in up
                    up[name] = machine
                case Kill(name):
                    del up[name]
        assert sorted(up.values()) == sorted("m" + id for id in ids)
        assert sorted(table.nodes.nodes) == sorted(up)
