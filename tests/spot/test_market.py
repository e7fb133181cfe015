from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.spot import market as m
from src.spot.market import Kill, Market, Notice, Return, Start, Tick, play, preemption_rate, replay, statistics
from src.spot.traces import Change, Trace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
SHIPPED = sorted([*TRACES.glob("*.csv"), *TRACES.glob("*.txt")])


def trace(*changes: str, until: float) -> Trace:
    """`trace("0 +a", "10 -a", until=20)`."""
    split = [change.split() for change in changes]
    return Trace("made", until, tuple(Change(float(t), node[1:], node[0] == "+") for t, node in split))


def log(market: Market, until_s: float) -> list[str]:
    return [f"{time_s:g} {type(action).__name__} {action.node}" for time_s, action in play(market, until_s)]


TWO = trace("0 +a", "0 +b", "10 -a", "20 +c", "30 -b", "40 +d", until=50)


def test_a_node_is_noticed_killed_after_its_grace_and_comes_back_when_its_place_is_taken():
    market = Market(trace=TWO, nodes=2, grace_s=3)
    assert market.nodes == ("node0", "node1")
    assert log(market, 49) == [
        "0 Return node0",
        "0 Return node1",
        "10 Notice node0",
        "13 Kill node0",
        "20 Return node0",
        "30 Notice node1",
        "33 Kill node1",
        "40 Return node1",
    ]


def test_a_notice_says_how_long_the_grace_is():
    actions = [action for _, action in play(Market(trace=TWO, nodes=2, grace_s=3), 15)]
    assert actions[2:] == [Notice("node0", 3), Kill("node0")]


def test_time_scale_speeds_up_the_trace_but_not_the_grace():
    market = Market(trace=TWO, nodes=2, time_scale=10, grace_s=0.5)
    assert log(market, 2.9)[2:] == ["1 Notice node0", "1.5 Kill node0", "2 Return node0"]


def test_a_longer_job_sees_the_trace_again_without_a_seam():
    # c and d go on as a and b.
    market = Market(trace=TWO, nodes=2, grace_s=3)
    assert log(market, 83)[8:] == [
        "60 Notice node0",
        "63 Kill node0",
        "70 Return node0",
        "80 Notice node1",
        "83 Kill node1",
    ]


def test_at_the_seam_the_difference_of_the_numbers_leaves_or_joins():
    growing = trace("0 +a", "5 +b", until=10)
    assert log(Market(trace=growing, nodes=2, grace_s=0), 20) == [
        "0 Return node0",
        "5 Return node1",
        "10 Notice node1",
        "10 Kill node1",
        "15 Return node1",
        "20 Notice node1",
        "20 Kill node1",
    ]
    shrinking = trace("0 +a", "0 +b", "5 -a", until=10)
    assert log(Market(trace=shrinking, nodes=2, grace_s=0), 14) == [
        "0 Return node0",
        "0 Return node1",
        "5 Notice node0",
        "5 Kill node0",
        "10 Return node0",
    ]
    # In the second lap b goes on as a, which leaves next.
    assert log(Market(trace=shrinking, nodes=2, grace_s=0), 20)[5:] == [
        "15 Notice node1",
        "15 Kill node1",
        "20 Return node1",
    ]


def test_a_place_that_is_taken_during_the_grace_returns_right_after_the_kill():
    quick = trace("0 +a", "10 -a", "11 +b", until=20)
    assert log(Market(trace=quick, nodes=1, grace_s=4), 19) == [
        "0 Return node0",
        "10 Notice node0",
        "14 Kill node0",
        "14 Return node0",
    ]


def test_a_place_that_was_taken_and_lost_during_the_grace_stays_away():
    blip = trace("0 +a", "10 -a", "11 +b", "14 -b", "17 +c", until=20)
    assert log(Market(trace=blip, nodes=1, grace_s=4), 19) == [
        "0 Return node0",
        "10 Notice node0",
        "14 Kill node0",
        "17 Return node0",
    ]


def test_who_joins_takes_the_place_that_was_vacant_for_longest():
    three = trace("0 +a", "0 +b", "0 +c", "1 -b", "2 -a", "3 +d", "4 +e", until=9)
    assert log(Market(trace=three, nodes=3, grace_s=0), 8)[7:] == ["3 Return node1", "4 Return node0"]


def test_a_late_driver_cuts_no_grace_short_and_skips_no_preemption():
    market = Market(trace=TWO, nodes=2, grace_s=3)
    market.handle(0, Start())
    assert market.next_s == 10
    assert market.handle(9.99, Tick()) == []
    assert market.handle(25, Tick()) == [Notice("node0", 3)]
    assert market.next_s == 28
    assert market.handle(28, Tick()) == [Kill("node0"), Return("node0")]


def test_a_restarted_job_gets_the_nodes_of_the_moment_and_not_their_history():
    market = Market(trace=TWO, nodes=2, grace_s=3)
    assert market.handle(112, Start()) == [Return("node1")]  # node0 was noticed at 110
    assert log_from(market, 130) == ["120 Return node0", "130 Notice node1"]


def log_from(market: Market, until_s: float) -> list[str]:
    found = []
    while (now_s := market.next_s) <= until_s:
        found += [f"{now_s:g} {type(a).__name__} {a.node}" for a in market.handle(now_s, Tick())]
    return found


def test_the_seed_draws_the_places_and_nothing_else_does():
    path = TRACES / "bamboo_aws_p3.csv"
    drawn = {replay(trace=path, nodes=4, seed=seed).nodes for seed in range(10)}
    assert len(drawn) == 10
    logs = [log(replay(trace=TRACES / "parcae_aws_p3_counts.csv", nodes=4, seed=3), 40_000) for _ in range(2)]
    assert logs[0] == logs[1]


def test_the_global_generator_is_left_alone():
    random.seed(1)
    before = random.getstate()
    log(replay(trace=TRACES / "parcae_aws_p3_counts.csv", nodes=4), 3600)
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, r"nodes must be within 1..2, the places of made, got 0"),
        ({"nodes": 3}, r"nodes must be within 1..2"),
        ({"time_scale": 0}, "time_scale must be positive and finite, got 0"),
        ({"time_scale": math.nan}, "time_scale"),
        ({"grace_s": -1}, "grace_s must be finite and not negative, got -1"),
        ({"grace_s": math.inf}, "grace_s"),
    ],
)
def test_bad_numbers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Market(**{"trace": TWO, "nodes": 2, **change})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_all_places_of_a_shipped_trace_together_meet_all_of_its_preemptions(path):
    whole = read_trace(path)
    market = Market(trace=whole, nodes=whole.places, grace_s=0)
    end_s = whole.duration_s - 1e-3  # without the seam
    up, node_s = 0, 0.0
    counts = [0, 0]
    for change in whole.changes:
        if change.time_s <= end_s:
            counts[change.joins] += 1
            node_s += (1 if change.joins else -1) * (end_s - change.time_s)
    found = statistics(market, end_s)
    up = sum(
        isinstance(action, Return) for _, action in play(Market(trace=whole, nodes=whole.places, grace_s=0), end_s)
    )
    assert (found.preemptions, up) == tuple(counts)
    assert found.present_nodes == pytest.approx(node_s / end_s)
    assert found.preemptions_per_hour == pytest.approx(counts[0] / (end_s / 3600))


def test_n_of_m_places_meet_n_of_m_preemptions_on_average():
    path = TRACES / "bamboo_aws_p3.csv"
    runs = [statistics(replay(trace=path, nodes=4, seed=seed, grace_s=0), 40_919) for seed in range(200)]
    counts = [run.preemptions for run in runs]
    mean = sum(counts) / len(counts)
    assert mean == pytest.approx(166 * 4 / 32, rel=0.03)  # 166: one leaves at the very end
    assert min(counts) >= 10


def test_statistics_need_a_duration():
    with pytest.raises(ValueError, match="duration_s must be positive and finite, got 0"):
        statistics(Market(trace=TWO, nodes=2), 0)


def test_the_command_prints_a_line_per_trace(capsys):
    m.main(["--nodes", "2", "100", "--seeds", "2"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("trace ")
    assert [line.split()[0] for line in lines] == [path.name for path in SHIPPED]
    assert all(line.endswith(" -") for line in lines)
    m.main([str(TRACES / "bamboo_aws_p3.csv"), "--nodes", "32", "--seeds", "1"])
    assert capsys.readouterr().out.splitlines()[1].split()[1:5] == ["11.37", "32", "167", "167.00"]


@st.composite
def traces(draw) -> Trace:
    """Any trace of up to five nodes, also with several changes at once."""
    present: list[str] = []
    changes, time_s = [], 0.0
    for index in range(draw(st.integers(1, 25))):
        time_s += draw(st.sampled_from([0.0, 0.5, 1.0, 7.0]))
        if present and (len(present) == 5 or draw(st.booleans())):
            changes.append(Change(time_s, present.pop(draw(st.integers(0, len(present) - 1))), joins=False))
        else:
            present.append(f"n{index}")
            changes.append(Change(time_s, present[-1], joins=True))
    return Trace("drawn", time_s + draw(st.sampled_from([0.25, 3.0])), tuple(changes))


@st.composite
def markets(draw) -> Market:
    made = draw(traces())
    return Market(
        trace=made,
        nodes=draw(st.integers(1, made.places)),
        seed=draw(st.integers(0, 3)),
        time_scale=draw(st.sampled_from([0.5, 1.0, 4.0])),
        grace_s=draw(st.sampled_from([0.0, 0.25, 2.0, 100.0])),
    )


def check_lives(market: Market, actions: list[tuple[float, m.Action]], *, exact: bool) -> None:
    """Every node lives Return, Notice, Kill, Return, ..., and has its grace."""
    assert [time_s for time_s, _ in actions] == sorted(time_s for time_s, _ in actions)
    follows = {Return: Notice, Notice: Kill, Kill: Return}
    for node in market.nodes:
        life = [(time_s, action) for time_s, action in actions if action.node == node]
        assert not life or isinstance(life[0][1], Return)
        for (before_s, before), (time_s, action) in pairwise(life):
            assert isinstance(action, follows[type(before)])
            if isinstance(before, Notice):
                assert time_s - before_s >= before.grace_s - 1e-9
                assert not exact or time_s == before_s + before.grace_s
    assert {action.node for _, action in actions} <= set(market.nodes)


@given(markets(), st.floats(0, 200))
def test_nodes_live_from_return_over_notice_to_kill(market, until_s):
    check_lives(market, list(play(market, until_s)), exact=True)


@given(markets(), st.lists(st.floats(0, 30), max_size=20))
def test_nodes_do_so_whenever_the_driver_looks(market, pauses):
    now_s = 0.0
    actions = [(now_s, action) for action in market.handle(now_s, Start())]
    for pause_s in pauses:
        now_s += pause_s
        actions += [(now_s, action) for action in market.handle(now_s, Tick())]
        assert market.next_s > now_s
    check_lives(market, actions, exact=False)


@given(traces())
def test_without_grace_as_many_nodes_are_up_as_the_trace_has(made):
    market = Market(trace=made, nodes=made.places, grace_s=0)
    up = 0
    balance = {0.0: 0}
    for time_s, action in play(market, made.duration_s - 0.1):
        up += {Return: 1, Notice: 0, Kill: -1}[type(action)]
        balance[time_s] = up
    present = 0
    expected = {0.0: 0}
    for change in made.changes:
        present += 1 if change.joins else -1
        expected[change.time_s] = present
    assert balance == expected


@given(traces(), st.integers(0, 3))
def test_every_place_is_followed_by_one_node_of_one_share(made, seed):
    """Each node's life depends on its place alone, not on which other places the job follows."""
    whole = list(play(Market(trace=made, nodes=made.places, grace_s=1), 100))
    part = Market(trace=made, nodes=(made.places + 1) // 2, seed=seed, grace_s=1)
    assert list(play(part, 100)) == [(t, action) for t, action in whole if action.node in part.nodes]


@given(markets(), st.floats(0, 100))
def test_a_start_offers_whom_the_trace_has_then(market, now_s):
    returned = market.handle(now_s, Start())
    assert all(isinstance(action, Return) for action in returned)
    assert len({action.node for action in returned}) == len(returned)
    assert market.handle(now_s, Start()) == returned


def test_preemptions_are_told_per_iterations_of_a_job(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text("0,add,a\n0,add,b\n10000,remove,a\n20000,add,c\n30000,remove,b\n40000,add,d\n50000,remove,c\n")
    # Kills at 10, 30 and 50, where the trace ends and starts again with d and a returning c; then at 60 and 80.
    common = {"nodes": 2, "seed": 0, "iteration_s": 4.0}
    assert preemption_rate(path, horizon_s=49.0, **common) == pytest.approx(2 * 20 / 49)
    assert preemption_rate(path, horizon_s=49.0, iterations=1, **common) == pytest.approx(2 * 4 / 49)
    assert preemption_rate(path, horizon_s=99.0, **common) == pytest.approx(5 * 20 / 99)
