from pathlib import Path

import pytest

from src.core.events import JsonLines, explored_rows
from src.core.types import Explored, PolicyVersion
from src.rl.replay_log import ReplayLog

FIRST = {0: [Explored(11, 0.1 + 0.2, "aa"), Explored(12, 1.0, "ab")], 1: [Explored(13, 0.0, "ac")]}
SECOND = {1: [Explored(14, 0.5, "ad")]}


def explored_event(iteration: int, version: str, explored) -> dict:
    return {
        "time_s": 1.5,
        "kind": "explored",
        "iteration": iteration,
        "version": version,
        "results": explored_rows(explored),
    }


def log_of(path: Path, *events: dict) -> ReplayLog:
    log = JsonLines(path)
    for event in events:
        log.append(event)
    log.close()
    return ReplayLog(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_explorations_are_read_back_exactly(path: Path):
    other = {"time_s": 0.0, "kind": "lease_granted", "iteration": 1, "count": 4}
    log = log_of(path, other, explored_event(1, "0.0", FIRST), explored_event(2, "0.1", SECOND))
    assert log.explored(1, PolicyVersion(0, 0)) == FIRST
    assert log.explored(2, PolicyVersion(0, 1)) == SECOND


def test_a_resumed_run_went_on_with_what_it_explored_last(path: Path):
    """Iteration 1 was explored, the job died, and incarnation 1 explored for it again."""
    log = log_of(path, explored_event(1, "0.0", FIRST), explored_event(1, "1.0", SECOND))
    assert log.explored(1, PolicyVersion(0, 0)) == SECOND


def test_an_iteration_that_was_not_explored_is_an_error(path: Path):
    with pytest.raises(ValueError, match=rf"^{path}: nothing was explored for iteration 7"):
        log_of(path, explored_event(1, "0.0", FIRST)).explored(7, PolicyVersion(0, 6))


def test_other_weights_are_an_error(path: Path):
    log = log_of(path, explored_event(2, "0.1", FIRST))
    with pytest.raises(ValueError, match=rf"^{path}: iteration 2 .* iteration 1, this run would use .* iteration 0$"):
        log.explored(2, PolicyVersion(0, 0))


def test_a_missing_log_is_an_error(path: Path):
    with pytest.raises(ValueError, match=rf"^{path}: there is no event log"):
        ReplayLog(path)


def test_what_is_no_event_log_is_an_error(path: Path):
    path.write_text('{"reward": 0.5}\n')
    with pytest.raises(ValueError, match=rf"^{path}: an event lacks its field 'kind'"):
        ReplayLog(path)


@pytest.mark.parametrize("field", ["version", "results"])
def test_an_incomplete_event_is_an_error(path: Path, field: str):
    event = explored_event(1, "0.0", FIRST)
    del event[field]
    with pytest.raises(ValueError, match=rf"^{path}: the explored event of iteration 1 is incomplete"):
        log_of(path, event).explored(1, PolicyVersion(0, 0))
