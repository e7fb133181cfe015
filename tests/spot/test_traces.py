from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.spot.traces import Change, TraceError, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
SHIPPED = sorted([*TRACES.glob("*.csv"), *TRACES.glob("*.txt")])


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def log(trace) -> list[str]:
    return [f"{change.time_s:g} {'+' if change.joins else '-'}{change.node}" for change in trace.changes]


def test_rows_of_nodes(write):
    trace = read_trace(write("0,add,a\n0,add,b\n60000,remove,a\n\n61500 , add , c\n"))
    assert log(trace) == ["0 +a", "0 +b", "60 -a", "61.5 +c"]
    assert (trace.name, trace.duration_s, trace.places, trace.first_nodes) == ("trace", 61.5, 2, ("a", "b"))
    assert trace.changes[2] == Change(60.0, "a", joins=False)


def test_lists_of_nodes(write):
    rows = [
        [0, "add", {"nodes": ["a", "b"], "duration": 60000, "more": [1]}],
        [60000, "no-op", {"nodes": [], "duration": 60000}],
        [120000, "remove", {"nodes": ["b", "a"], "duration": 30000}],
    ]
    trace = read_trace(write("\n".join(json.dumps(row) for row in rows)))
    assert log(trace) == ["0 +a", "0 +b", "120 -b", "120 -a"]
    assert trace.duration_s == 150


def test_counts_get_new_nodes_and_lose_nodes_that_the_seed_draws(write):
    path = write("0,3\r\n1000,1\r\n2000,1\r\n3000,2\r\n")
    first = read_trace(path, seed=1)
    assert log(first)[:3] == ["0 +node1", "0 +node2", "0 +node3"]
    assert log(first)[5] == "3 +node4"
    assert read_trace(path, seed=1) == first
    survivors = {
        ({"node1", "node2", "node3"} - {c.node for c in read_trace(path, seed=s).changes[3:5]}).pop() for s in range(20)
    }
    assert survivors == {"node1", "node2", "node3"}


def test_dated_counts_start_at_the_first_row_and_cross_midnight(write):
    trace = read_trace(write("2021-12-11, 23:59:50, 1\n2021-12-12, 00:00:10, 2\n2021-12-12, 00:01:00, 2\n"))
    assert log(trace) == ["0 +node1", "20 +node2"]
    assert trace.duration_s == 70


def test_the_later_of_two_overlapping_blocks_is_right(write):
    block = "2021-12-10, 13:07:45, 2\n2021-12-10, 13:08:45, 2\n2021-12-10, 13:09:45, 2\n"
    trace = read_trace(write(block + "2021-12-10, 13:08:45, 1\n2021-12-10, 13:09:45, 0\n2021-12-10, 13:09:45, 3\n"))
    times = [(change.time_s, change.joins) for change in trace.changes]
    assert times == [(0, True), (0, True), (60, False), (120, True), (120, True)]
    assert trace.duration_s == 120


def test_counts_at_equal_intervals(write):
    trace = read_trace(write('{"metadata": {"gap_seconds": 600, "x": 1},\n "data": [2, 2, 1, 3]}'))
    assert [(c.time_s, c.joins) for c in trace.changes] == [
        (0, True),
        (0, True),
        (1200, False),
        (1800, True),
        (1800, True),
    ]
    assert trace.duration_s == 2400


def test_flags_at_equal_intervals_mark_when_the_one_node_is_gone(write):
    trace = read_trace(write('{"metadata": {"gap_seconds": 1}, "data": [0, 1, 1, 0]}'))
    assert log(trace) == ["0 +node1", "1 -node1", "3 +node2"]
    assert (trace.duration_s, trace.places) == (4, 1)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the trace is empty"),
        ("\n\n", 2, "the trace is empty"),
        ("hello\n", 1, "no known trace format begins with 'hello'"),
        ("time,action,node\n0,add,a\n", 1, "no known trace format"),
        ("0,add,a\n5000,add,b\n4000,remove,a\n", 3, "time runs backwards, from 5 s to 4 s"),
        ("-1,add,a\n", 1, "time runs backwards, from 0 s to -0.001 s"),
        ("0,add,a\n1,add,a\n", 2, "a is added but is there already"),
        ("0,add,a\n1,remove,b\n", 2, "b is removed but is not there"),
        ("0,add,a\n1,remove,a\n2,remove,a\n", 3, "a is removed but is not there"),
        ("0,add,a\n1,explode,a\n", 2, "expected add, remove or no-op, got 'explode'"),
        ("0,add,a\n1000,rem", 2, "expected 3 fields, got '1000,rem'"),
        ("0,add,a\n1000,remove,", 2, "expected 3 fields"),
        ("0,add,a\nx,remove,a\n", 2, "invalid literal for int"),
        ("0,add,a\n" + "9" * 400 + ",add,b\n", 2, "too large"),
        ("0,add,a\n", 1, "must last longer than no time"),
        ("0,0\n1000,0\n", 2, "have at least one node"),
        ("0,1\n1000,-2\n", 2, r"a number of nodes must be within 0..100000, got -2"),
        ("0,1\n1000,1000000000\n", 2, "a number of nodes must be within"),
        ("5000,1\n1000,2\n", 2, "time runs backwards"),
        ("0,1\n1000\n", 2, "expected 2 fields"),
        ("2021-12-11, 10:00:00, 5\n2021-12-11, 09:57:59, 4\n", 2, "time runs backwards by 121 s; up to 120 s"),
        ("2021-12-11, 10:00:00, 5\n2021-12-11, 10:01:00, -4\n", 2, "a number of nodes"),
        ("2021-12-11, 10:00:00, 5\n2021-13-11, 10:01:00, 4\n", 2, "does not match format"),
        ("2021-12-11, 10:00:00, 5\n2021-12-11, 10:0", 2, "expected 3 fields"),
        ("2021-12-11, 10:00:00, 5\n2021-12-11, 10:01:00+00:00, 4\n", 2, "unconverted data remains"),
        ('[0, "add", {"nodes": ["a"]}]\n[60000, "remove", {"nodes": ["a"', 2, "delimiter"),
        ('[0, "add", {"nodes": ["a"]}]\n[60000, "remove", {"nodes": ["b"]}]', 2, "b is removed but is not there"),
        ('[0, "add", {"nodes": ["a"]}]\n[60000, "remove"]', 2, "expected"),
        ('[0, "add", {"nodes": ["a"], "duration": -1}]', 1, "duration must be a number"),
        ("[" * 100_000, 1, "recursion"),
        ('{"metadata": {"gap_seconds": 600},\n"data": [1, 2', 2, "delimiter"),
        ('{"data": [1]}', 1, "expected"),
        ('{"metadata": {"gap_seconds": 0}, "data": [2]}', 1, "gap_seconds=0 must be positive"),
        ('{"metadata": {"gap_seconds": 1}, "data": []}', 1, "must not be empty"),
        ('{"metadata": {"gap_seconds": 1e308}, "data": [2, 3]}', 1, "not for ever"),
        ('{"metadata": {"gap_seconds": 1}, "data": [2, -1]}', 1, "a number of nodes"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [2]}', 1, "gap_seconds must be a number"),
        (b"0,1\n1000,\xff\n", 2, "codec can't decode"),
    ],
)
def test_a_damaged_trace_is_one_error_that_names_file_and_line(write, text, line, message):
    path = write(text)
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}:{line}: ")


FACTS = {  # hours, most nodes at once, departures
    "bamboo_aws_g4dn.csv": (10.77, 24, 74),
    "bamboo_aws_p3.csv": (11.37, 32, 167),
    "bamboo_gcp_a100_us-east1-b.txt": (27.02, 64, 154),
    "bamboo_gcp_v100_us-east1-c.txt": (24.17, 80, 518),
    "parcae_aws_p3_counts.csv": (11.37, 32, 167),
    "parcae_segment_hh_55_65.txt": (1.0, 32, 19),
    "parcae_segment_hl_15_25.txt": (1.0, 32, 11),
    "parcae_segment_lh_80_90.txt": (1.0, 24, 18),
    "parcae_segment_ll_10_11.txt": (1.0, 18, 4),
}


def test_every_shipped_trace_is_read():
    read = {
        trace.name: (round(trace.duration_s / 3600, 2), trace.places, sum(not change.joins for change in trace.changes))
        for trace in map(read_trace, SHIPPED)
    }
    assert read == FACTS


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_trace_cut_anywhere_is_a_shorter_trace_or_the_error(path, write):
    data = path.read_bytes()
    whole = read_trace(path)
    for end in range(0, len(data), max(1, len(data) // 50)):
        try:
            cut = read_trace(write(data[:end]))
        except TraceError:
            continue
        assert cut.duration_s <= whole.duration_s


@given(st.binary(max_size=200) | st.text('0123456789,-:[]{}"adremov \n', max_size=200).map(str.encode))
def test_no_file_raises_anything_else(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    with suppress(TraceError):
        assert read_trace(path).places > 0
