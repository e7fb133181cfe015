import pytest

from src.core.clock import RunClock, Stopwatch


class FakeTime:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def test_run_clock_continues_where_an_earlier_start_ended():
    time = FakeTime()
    clock = RunClock(elapsed_s=40.0, now=time)
    time.pass_s(2.5)
    assert clock() == 42.5


def test_stopwatch_adds_up_phases_nested_and_repeated():
    time = FakeTime()
    watch = Stopwatch(now=time)
    with watch.phase("train"):
        time.pass_s(1.0)
        with watch.phase("recompute"):
            time.pass_s(2.0)
    with watch.phase("train"):
        time.pass_s(4.0)
    assert watch.seconds == {"recompute": 2.0, "train": 7.0}


def test_stopwatch_counts_a_phase_that_raises():
    time = FakeTime()
    watch = Stopwatch(now=time)
    with pytest.raises(RuntimeError, match="broken"):
        fail_after_s(3.0, watch, time)
    assert watch.seconds == {"train": 3.0}


def fail_after_s(seconds: float, watch: Stopwatch, time: FakeTime) -> None:
    with watch.phase("train"):
        time.pass_s(seconds)
        raise RuntimeError("broken")
