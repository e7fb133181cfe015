"""A process that stands by holds what is published, and never less than it can."""

from __future__ import annotations

import pytest

from src.core.types import PolicyVersion
from src.spot import weights
from src.spot.process import SpotProcess, WorkerSettings
from tests.spot.fakes import FakeEngine, saves

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


@pytest.fixture
def process():
    """One that has built its engine."""
    process = SpotProcess()
    process.prepare(FakeEngine, WorkerSettings(niceness=0))
    return process


def test_it_loads_one_policy_after_the_other(process, tmp_path):
    for policy in (V0, V1):
        weights.publish(tmp_path, policy, saves(str(policy)))
        process.catch_up(tmp_path, policy)
        assert (process._engine.weights, process._held) == (str(policy), policy)


@pytest.mark.parametrize("retired", [False, True])
def test_what_it_cannot_load_it_does_not_hold(process, tmp_path, retired):
    for policy in (V0, V1):
        weights.publish(tmp_path, policy, saves(str(policy)))
    process.catch_up(tmp_path, V0)
    if retired:
        weights.remove(tmp_path, [V1])
    else:
        (tmp_path / str(V1) / "weights.txt").write_text("damaged")
    process.catch_up(tmp_path, V1)
    assert process._held is None


def test_without_an_engine_it_leaves_that_to_whoever_is_told_why(tmp_path):
    def broken():
        raise MemoryError

    process = SpotProcess()
    with pytest.raises(MemoryError):
        process.prepare(broken, WorkerSettings(niceness=0))
    weights.publish(tmp_path, V0, saves("w"))
    process.catch_up(tmp_path, V0)
    assert process._held is None
