import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.events import JsonLines, explored_rows, read_explored_rows, read_jsonl
from src.core.types import Explored


def write(path: Path, *rows: dict) -> None:
    log = JsonLines(path)
    for row in rows:
        log.append(row)
    log.close()


def test_rows_are_read_back_in_order(tmp_path: Path):
    path = tmp_path / "run" / "events.jsonl"
    write(path, {"time_s": 0.1, "kind": "a"}, {"time_s": 0.2, "kind": "b", "text": "zwei\nZeilen \u2028 \r ä"})
    assert list(read_jsonl(path)) == [
        {"time_s": 0.1, "kind": "a"},
        {"time_s": 0.2, "kind": "b", "text": "zwei\nZeilen \u2028 \r ä"},
    ]


def test_a_row_is_visible_at_once(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    log = JsonLines(path)
    log.append({"kind": "a"})
    assert [row["kind"] for row in read_jsonl(path)] == ["a"]
    log.close()


def test_a_second_writer_appends(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    write(path, {"kind": "a"})
    write(path, {"kind": "b"})
    assert [row["kind"] for row in read_jsonl(path)] == ["a", "b"]


def test_a_line_torn_at_any_byte_is_left_out_and_cut_off(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    write(path, {"kind": "a"}, {"kind": "b", "n": 12})
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [row["kind"] for row in read_jsonl(path)] == ["a"]
        write(path, {"kind": "c"})
        assert [row["kind"] for row in read_jsonl(path)] == ["a", "c"]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "a"')
    assert list(read_jsonl(path)) == []
    JsonLines(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("bad", ["{torn", "12", '["kind"]', ""])
def test_anything_else_is_refused_by_file_and_line(tmp_path: Path, bad: str):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"a"}\n' + bad + '\n{"kind":"b"}\n')
    with pytest.raises(ValueError, match=rf"{path}:2: not a JSON object"):
        list(read_jsonl(path))


@given(st.dictionaries(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 2**62), st.floats(0, 1)), min_size=1)))
def test_explored_seeds_survive_json_exactly(found: dict[int, list[tuple[int, float]]]):
    explored = {i: [Explored(seed, reward, "00ff") for seed, reward in results] for i, results in found.items()}
    assert read_explored_rows(json.loads(json.dumps(explored_rows(explored)))) == explored
