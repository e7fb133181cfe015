"""Several elastic groups at once: exact stories."""

from __future__ import annotations

import pytest

from src.core.types import Generation
from src.spot.teams import Regrouped, Teams


def teams() -> Teams:
    return Teams(heartbeat_timeout_s=2.0, window_s=0.05)


def test_the_first_who_enlists_is_alone_and_the_second_comes_at_the_next_boundary():
    made = teams()
    made.enlist(1.0, "sp0", "a")
    assert made.advance(1.0) == [Regrouped("sp0", Generation(1, ("a",)), 1.0)]
    made.enlist(2.0, "sp0", "b")
    assert made.advance(9.0) == [], "a is in the middle of a step"
    assert made.is_changing("a")
    assert made.generation("b", 0) is None
    assert made.boundary(9.5, "a", 1)
    assert made.advance(9.5) == [Regrouped("sp0", Generation(2, ("a", "b"), 1), 9.5)]
    assert made.generation("b", 0) == Generation(2, ("a", "b"), 1)
    assert made.generation("a", 2) is None


def test_who_waits_for_a_member_that_dies_goes_on_without_it_and_the_leader_hears_of_it():
    made = teams()
    made.found("sp0", ["a", "b", "c"])
    for member in ("a", "b", "c"):
        made.entered(member, 0)
    made.enlist(0.5, "sp0", "d")
    assert not made.boundary(0.9, "b", 0, admits=False), "d waits for the end of a step"
    made.dead(1.0, "c")
    assert made.boundary(1.2, "b", 0, admits=False)
    assert made.advance(1.2) == [Regrouped("sp0", Generation(1, ("a", "b", "d"), 2), 1.2)]
    assert made.is_changing("a"), "it leads a group that nobody else is in"
    assert made.boundary(1.3, "a", 0)
    made.entered("a", 1)
    assert not made.is_changing("a")


def test_what_happens_to_one_team_does_not_touch_the_other():
    made = teams()
    made.found("ranks", ["r0", "r1"])
    made.enlist(0.0, "sp0", "a")
    made.advance(0.0)
    made.broken(1.0, "r0", 0)
    assert made.due_s == pytest.approx(1.05)
    assert not made.is_changing("a")
    assert made.advance(1.05) == [Regrouped("ranks", Generation(1, ("r0",), 1), 1.0)]
    assert made.due_s == float("inf")


def test_who_was_late_may_enlist_again_and_who_is_under_notice_may_not():
    made = teams()
    made.found("ranks", ["r0", "r1", "r2"])
    made.broken(1.0, "r0", 0)
    made.broken(1.0, "r2", 0)
    made.advance(1.1)
    made.enlist(1.2, "ranks", "r1")
    made.notice(1.3, "r2")
    assert not made.is_out("r2"), "it stays until the boundary"
    assert made.boundary(2.0, "r0", 1)
    assert made.advance(2.0)[0].generation == Generation(2, ("r0", "r1"), 1)
    assert made.is_out("r2")
    assert not made.is_out("r1")
    made.enlist(2.1, "ranks", "r2")
    assert not made.is_changing("r0")


def test_a_frozen_member_is_named():
    made = teams()
    made.found("ranks", ["r0", "r1"])
    made.heartbeat(0.0, "r0")
    made.heartbeat(0.0, "r1")
    made.heartbeat(2.5, "r0")
    assert made.silence(2.5) == ["r1"]
    assert made.silence(2.5) == []
    assert made.advance(2.5) == [], "r0 waits in a collective"
    made.broken(2.6, "r0", 0)
    assert made.advance(2.6) == [Regrouped("ranks", Generation(1, ("r0",), 1), 2.6)]


def test_a_member_of_no_team_is_nobodys_business():
    made = teams()
    made.heartbeat(1.0, "x")
    made.notice(1.0, "x")
    made.dead(1.0, "x")
    assert not made.is_changing("x")
    with pytest.raises(ValueError, match="x is in no team"):
        made.broken(1.0, "x", 0)


def test_who_is_to_leave_before_it_has_come_is_not_let_in():
    teams = Teams(heartbeat_timeout_s=10.0)
    teams.found("ranks", ["a"], hold_state=True)
    teams.notice(1.0, "b")
    teams.enlist(2.0, "ranks", "b")

    assert not teams.boundary(3.0, "a", 0)
    assert teams.is_out("b")
