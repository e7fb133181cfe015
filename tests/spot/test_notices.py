from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence

import pytest

from src.spot.market import Market, Notice
from src.spot.notices import FileSigns, NoAnswer, Polling, Replayed, Sign, Sigterm
from src.spot.traces import Change, Trace


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds


class Script:
    """Signs by the time at which they are asked."""

    def __init__(self, clock: Time, answer) -> None:
        self._clock, self._answer = clock, answer
        self.asked_s: list[float] = []

    def ask(self, within_s: float) -> Sequence[Sign]:
        self.asked_s.append(self._clock.now_s - 100)
        return self._answer(self._clock.now_s - 100)


def polling(answer, **changes):
    clock = Time()
    script = Script(clock, answer)
    source = Polling(signs=script, node="n", interval_s=5, now=clock, sleep=clock.sleep, **changes)
    return clock, script, source


def fail(now_s: float) -> Sequence[Sign]:
    raise NoAnswer("it answers with status 500")


def test_it_asks_at_its_interval_whatever_the_timeouts_are():
    clock, script, source = polling(lambda now_s: [])
    for timeout_s in (0, 0, 3, 1, 1, 12):
        assert source.wait(timeout_s) is None
    assert script.asked_s == [0, 5, 10, 15]
    assert clock.now_s == 117


def test_it_tells_each_sign_once_and_all_that_come_together():
    signs = [Sign("risk", math.inf), Sign("end", 30.0)]
    clock, _, source = polling(lambda now_s: signs if now_s >= 10 else [])
    assert [source.wait(100) for _ in range(3)] == [Notice("n", math.inf), Notice("n", 30.0), None]
    assert clock.now_s == 100 + 10 + 100


def test_it_asks_less_often_during_an_outage_and_recovers():
    _, script, source = polling(lambda now_s: fail(now_s) if now_s < 50 else [], max_interval_s=15)
    assert source.wait(80) is None
    assert script.asked_s == [0, 10, 25, 40, 55, 60, 65, 70, 75, 80]


def test_an_outage_of_any_length_raises_nothing():
    _, script, source = polling(fail, max_interval_s=15)
    assert source.wait(50_000) is None
    assert len(script.asked_s) > 3000


def test_an_outage_is_logged_once_and_without_what_an_unexpected_error_says(caplog):
    def answer(now_s: float) -> Sequence[Sign]:
        raise KeyError("token-123")

    _, _, source = polling(answer)
    with caplog.at_level(logging.WARNING):
        assert source.wait(100) is None
    assert [record.getMessage() for record in caplog.records] == ["no word on the end of n from Script: KeyError"]


def test_the_interval_is_checked():
    with pytest.raises(ValueError, match=r"interval_s must be positive and at most max_interval_s=15\.0, got 0"):
        Polling(signs=FileSigns(path="x"), node="n", interval_s=0)
    with pytest.raises(ValueError, match="max_interval_s=1, got 5"):
        Polling(signs=FileSigns(path="x"), node="n", max_interval_s=1)


def write(path, text: bytes, at_s: int) -> None:
    path.write_bytes(text)
    os.utime(path, (at_s, at_s))


def test_a_file_announces_the_end_each_time_it_is_written(tmp_path):
    path = tmp_path / "preempt"
    clock = Time()
    source = Polling(signs=FileSigns(path=path, grace_s=7), node="n", interval_s=1, now=clock, sleep=clock.sleep)
    assert source.wait(1) is None
    found = []
    for at_s, text in enumerate([b"", b" 12.5\n", b"soon", b"-3", b"nan", b"\xff", b"9" * 100], start=1):
        write(path, text, at_s)
        found.append(source.wait(1))
        assert source.wait(1) is None
    assert [notice and notice.grace_s for notice in found[:-1]] == [7, 12.5, 0, 0, 0, 0]
    path.unlink()
    assert source.wait(1) is None


def test_a_file_that_cannot_be_read_is_no_notice(tmp_path):
    (tmp_path / "folder").mkdir()
    clock = Time()
    source = Polling(signs=FileSigns(path=tmp_path / "folder"), node="n", now=clock, sleep=clock.sleep)
    assert source.wait(20) is None


@pytest.mark.timeout(20)
def test_sigterm_is_a_notice_also_while_it_is_waited_for():
    before = signal.getsignal(signal.SIGTERM)
    with Sigterm(node="n", grace_s=30) as source:
        assert source.wait(0) is None
        assert source.wait(0.01) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert source.wait(5) == Notice("n", 30)
        assert source.wait(0) is None
        kill = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        kill.start()
        started_s = time.monotonic()
        assert source.wait(15) == Notice("n", 30)
        assert time.monotonic() - started_s < 10
        kill.join()
    assert signal.getsignal(signal.SIGTERM) == before


def changes(*rows: tuple[float, str, bool]) -> Trace:
    return Trace("made", 50, tuple(Change(*row) for row in rows))


def test_a_replayed_market_tells_a_node_its_own_notices():
    trace = changes((0, "a", True), (0, "b", True), (10, "b", False), (20, "a", False), (25, "c", True))
    clock = Time()
    source = Replayed(
        market=Market(trace=trace, nodes=2, grace_s=3), node="node0", now=lambda: clock() - 100, sleep=clock.sleep
    )
    assert source.wait(15) is None
    assert clock.now_s == 115
    assert source.wait(15) == Notice("node0", 3)
    assert clock.now_s == 120
    assert source.wait(0) is None
    with pytest.raises(ValueError, match="node must be one of node0, node1, got node2"):
        Replayed(market=Market(trace=trace, nodes=2), node="node2", now=clock)
