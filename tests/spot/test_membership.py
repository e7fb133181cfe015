"""Generations from reports: exact logs of small stories, and what holds for any story."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.types import Generation
from src.spot.membership import Membership


def test_nothing_happens_while_all_is_well():
    group = Membership(["a", "b"])
    assert group.advance(5.0) is None
    assert not group.boundary(6.0, 0)
    assert group.advance(7.0) is None
    assert group.current == Generation(0, ("a", "b"), 2)


def test_survivors_of_a_crash_report_and_whoever_does_not_is_out_after_the_window():
    group = Membership(["a", "b", "c"], window_s=0.05)
    group.broken(1.00, "c", 0)
    group.broken(1.02, "a", 0)
    assert group.advance(1.04) is None, "b may still report"
    assert group.advance(1.05) == Generation(1, ("a", "c"), 2)


def test_a_death_that_is_known_need_not_be_waited_for():
    group = Membership(["a", "b", "c"])
    group.dead(1.0, "b")
    group.broken(1.01, "a", 0)
    assert group.advance(1.01) is None
    group.broken(1.02, "c", 0)
    assert group.advance(1.02) == Generation(1, ("a", "c"), 2)


def test_a_report_that_comes_too_late_is_no_error_of_the_new_generation():
    group = Membership(["a", "b", "c"])
    group.broken(1.0, "a", 0)
    assert group.advance(1.1) == Generation(1, ("a",), 1)
    group.broken(1.2, "b", 0)
    assert group.advance(1.3) is None
    group.join(1.4, "b")
    assert group.boundary(1.5, 1)
    assert group.advance(1.5) == Generation(2, ("a", "b"), 1)


def test_a_notice_waits_for_the_boundary():
    group = Membership(["a", "b", "c"])
    group.notice(1.0, "a")
    assert group.advance(9.0) is None
    assert group.boundary(9.5, 0)
    assert group.advance(9.5) == Generation(1, ("b", "c"), 2)


def test_notices_and_joins_until_the_boundary_make_one_generation():
    group = Membership(["a", "b", "c"])
    group.notice(1.0, "b")
    group.join(1.1, "d")
    group.notice(1.2, "c")
    group.join(1.3, "e")
    group.notice(1.4, "e")
    assert group.boundary(2.0, 0)
    assert group.advance(2.0) == Generation(1, ("a", "d"), 1)


def test_an_old_generation_is_told_to_leave():
    group = Membership(["a", "b"])
    group.broken(1.0, "a", 0)
    group.broken(1.0, "b", 0)
    group.advance(1.0)
    assert group.boundary(1.1, 0)
    assert group.advance(1.2) is None


def test_a_silent_member_is_frozen():
    group = Membership(["a", "b"], heartbeat_timeout_s=2.0)
    group.heartbeat(1.0, "a")
    group.heartbeat(1.0, "b")
    group.heartbeat(3.5, "a")
    assert group.silence(3.6) == ["b"]
    assert group.advance(3.6) is None, "b is out, but a is still in the collective"
    group.broken(3.62, "a", 0)
    assert group.advance(3.62) == Generation(1, ("a",), 1)


def test_a_member_that_comes_back_from_the_dead_joins_anew():
    group = Membership(["a", "b"])
    group.join(1.0, "a")
    group.broken(1.01, "b", 0)
    assert group.advance(1.01) == Generation(1, ("b", "a"), 1)


def test_nobody_is_left_and_the_next_one_starts_alone():
    group = Membership(["a"])
    group.dead(1.0, "a")
    assert group.advance(1.0) == Generation(1, ())
    group.join(2.0, "b")
    assert group.advance(2.0) == Generation(2, ("b",))


@pytest.mark.parametrize("field", ["window_s", "heartbeat_timeout_s"])
def test_settings_are_checked(field: str):
    with pytest.raises(ValueError, match=rf"Membership\.{field} must be positive, got 0"):
        Membership(["a"], **{field: 0.0})


def test_members_are_told_apart_by_their_names():
    with pytest.raises(ValueError, match="must differ"):
        Membership(["a", "a"])


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["broken", "notice", "dead", "join", "boundary", "wait"]),
        st.sampled_from(["a", "b", "c", "d"]),
        st.floats(0.0, 0.2),
    ),
    max_size=40,
)


@given(EVENTS, st.booleans())
def test_any_story(events: list[tuple[str, str, float]], hold_state: bool):
    """Numbers rise by one, nobody is in twice, nobody comes in without having joined, no error leaves it stuck. Members
    that hold state are never all gone after a boundary."""
    group, at_s, joined, seen = Membership(["a", "b", "c"], hold_state=hold_state), 0.0, {"a", "b", "c"}, 0
    for kind, member, delay_s in events:
        at_s += delay_s
        match kind:
            case "broken":
                group.broken(at_s, member, group.current.number)
            case "notice":
                group.notice(at_s, member)
            case "dead":
                group.dead(at_s, member)
            case "join":
                group.join(at_s, member)
                joined.add(member)
            case "boundary":
                group.boundary(at_s, group.current.number)
        new = group.advance(at_s)
        if new is not None:
            assert new.number == seen + 1
            seen = new.number
            assert new.stayed or not (hold_state and kind == "boundary")
        assert len(set(group.current.members)) == len(group.current.members)
        assert set(group.current.members) <= joined
    for member in group.current.members:
        group.broken(at_s, member, group.current.number)
    settled = group.advance(at_s + 1.0)
    assert settled is not None or not group.current.members


def test_who_waits_to_join_comes_in_at_a_boundary_only_if_the_team_wants_it_so():
    team = Membership(["a", "b", "c"], hold_state=True)
    team.join(1.0, "d")
    team.dead(1.1, "c")
    for member in "ab":
        team.broken(1.2, member, 0)
    assert team.advance(1.2) == Generation(1, ("a", "b"), 2)
    assert team.is_changing
    assert not team.boundary(2.0, 1, admits=False), "nobody has left, and it is no moment to join"
    assert team.advance(2.0) is None
    assert team.boundary(3.0, 1)
    assert team.advance(3.0) == Generation(2, ("a", "b", "d"), 2)


def test_a_boundary_right_after_an_error_lets_nobody_in():
    """Some members stand in the middle of a step."""
    team = Membership(["a", "b"], hold_state=True)
    team.join(1.0, "c")
    team.broken(1.1, "b", 0)
    assert team.boundary(1.2, 0)
    assert team.advance(1.2) == Generation(1, ("a", "b"), 2)
    assert team.boundary(1.3, 1)
    assert team.advance(1.3) == Generation(2, ("a", "b", "c"), 2)


def test_who_waits_finds_nobody_when_all_are_dead():
    team = Membership(["a"], hold_state=True)
    team.join(1.0, "b")
    team.dead(1.1, "a")
    assert team.advance(1.1) == Generation(1, ("b",), 0)


def test_members_that_hold_state_are_never_all_let_go():
    """They would take with them what nobody else knows: they stay until it is saved."""
    team = Membership(["a", "b"], hold_state=True)
    team.notice(1.0, "a")
    assert not team.is_ending
    team.notice(1.1, "b")
    assert team.is_ending
    assert not team.boundary(2.0, 0)
    assert team.advance(9.0) is None
    team.broken(9.1, "b", 0)
    team.broken(9.1, "a", 0)
    assert team.advance(9.1) == Generation(1, ("a", "b"), 2), "an error lets nobody go either"
    team.dead(9.2, "a")
    assert team.is_ending
    assert team.boundary(9.3, 1)
    assert team.advance(9.3) == Generation(2, ("b",), 1)


def test_they_go_when_somebody_has_come():
    team = Membership(["a", "b"], hold_state=True)
    team.notice(1.0, "a")
    team.notice(1.0, "b")
    team.join(1.1, "c")
    assert not team.is_ending
    assert team.boundary(2.0, 0)
    assert team.advance(2.0) == Generation(1, ("a", "b", "c"), 2), "c has to be told"
    assert team.boundary(3.0, 1)
    assert team.advance(3.0) == Generation(2, ("c",), 1)


def test_others_are_let_go_at_their_boundary():
    team = Membership(["a", "b"])
    team.notice(1.0, "a")
    team.notice(1.1, "b")
    assert not team.is_ending
    assert team.advance(1.2) is None, "they finish the step in hand"
    assert team.boundary(2.0, 0)
    assert team.advance(2.0) == Generation(1, ())
