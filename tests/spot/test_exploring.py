"""What the planner is told of a run, and what becomes of its decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from src.core.events import read_jsonl
from src.core.seeds import sample_seed
from src.core.types import Exploration, Lease, Member, PolicyVersion, Prompt, SampleResult, SampleSpec, WorkReport
from src.spot.coordinator import Coordinator
from src.spot.cost import Ledger
from src.spot.exploring import OpenExploration, PlannerFeed, asked_rows
from src.spot.inline import InlineCluster
from src.spot.members import Joined
from src.spot.planning.bandit import Bandit
from src.spot.planning.protocol import (
    Action,
    Audited,
    Closed,
    Event,
    Explore,
    KeptRegenerated,
    LeaseServed,
    Opened,
    Pair,
    SeedsExplored,
    StopExploring,
    TrainingEnded,
    TrainingStarted,
    Worker,
    WorkersChanged,
)
from src.spot.planning.simple import Fixed, LargestFeasible, NoExploration
from src.spot.prices import FixedPrices
from src.spot.scheduler import Scheduler
from tests.spot.fakes import FakeEngine, saves

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
SPEC, PREVIEW = SampleSpec(4, (1, 2)), SampleSpec(2, (1,))
PROMPTS = (Prompt(0, "a red circle"), Prompt(1, "a blue square"))


def exploration(iteration: int = 1, policy: PolicyVersion = V0) -> Exploration:
    return Exploration("run", 7, iteration, PROMPTS, 2, policy, SPEC, (PREVIEW,))


class Scripted:
    """Keeps what it is told, and answers the first event of a kind as the script says."""

    def __init__(self, **script: list[Action]) -> None:
        self.told: list[tuple[float, Event]] = []
        self.training_s: float | None = None
        self._script = script

    def handle(self, now_s: float, event: Event) -> list[Action]:
        self.told.append((now_s, event))
        return self._script.pop(type(event).__name__, [])

    def state_dict(self) -> dict[str, Any]:
        return {"told": len(self.told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.training_s = float(state["told"])


# What the planner is told


def told(*rows: tuple[str, dict[str, Any]], planner: Scripted | None = None) -> list[tuple[float, Event]]:
    """The planner's events for rows that are one second apart, the first one at 1 s."""
    planner = planner or Scripted()
    feed = PlannerFeed(planner)
    for time_s, (kind, fields) in enumerate(rows, start=1):
        feed.add({"time_s": time_s, "kind": kind, **fields})
    return planner.told


def joined(worker: str, role: str = "spot", batch_size: int = 4) -> tuple[str, dict[str, Any]]:
    return "worker_joined", {"worker": worker, "role": role, "batch_size": batch_size}


def granted(lease: int, worker: str) -> tuple[str, dict[str, Any]]:
    return "lease_granted", {"lease": lease, "worker": worker}


def done(lease: int, count: int, steps: int) -> tuple[str, dict[str, Any]]:
    return "lease_done", {"lease": lease, "count": count, "steps": steps}


A, B = Worker("a", 4), Worker("b", 4)


def test_workers_that_may_get_leases_are_told() -> None:
    rows = (
        joined("rank", role="reserved"),
        joined("a"),
        joined("b"),
        ("notice", {"worker": "a"}),
        ("worker_lost", {"worker": "a"}),
        ("worker_lost", {"worker": "rank"}),
        ("worker_lost", {"worker": "b"}),
    )
    workers = [(2, (A,)), (3, (A, B)), (4, (B,)), (7, ())]
    assert told(*rows) == [(time_s, WorkersChanged(there)) for time_s, there in workers]


def test_a_lease_of_several_passes_is_told_as_one_of_them() -> None:
    rows = (
        joined("a"),
        granted(0, "a"),
        done(0, 4, 24),  # it warms up
        granted(1, "a"),
        granted(9, "rank"),
        done(1, 10, 60),  # three passes of six steps in 2 s
        done(9, 4, 24),
        granted(2, "a"),
        done(2, 3, 6),  # two steps were left
        granted(3, "a"),
        done(3, 3, 0),  # only decoding was
        granted(4, "a"),
        ("lease_lost", {"lease": 4}),
        done(4, 3, 18),
    )
    assert told(*rows)[1:] == [(6, LeaseServed("a", 6, pytest.approx(2 / 3))), (9, LeaseServed("a", 2, 1.0))]


def test_a_worker_under_notice_still_shows_its_speed() -> None:
    rows = (joined("a"), granted(0, "a"), done(0, 4, 24), granted(1, "a"), ("notice", {"worker": "a"}), done(1, 4, 24))
    assert told(*rows)[2:] == [(6, LeaseServed("a", 6, 2.0))]


def accepted(kind: str, iteration: int, *results: tuple[int, int, float | None]) -> tuple[str, dict[str, Any]]:
    return "results_accepted", {"request_kind": kind, "iteration": iteration, "results": results}


def test_an_iteration_as_the_planner_sees_it() -> None:
    opened = {"iteration": 4, "prompts": 2, "keep": 3, "steps": 6, "previews": [3]}
    prices = {"reserved_usd_per_hour": 8.0, "spot_usd_per_hour": 1.0}
    pair = {"instance": 1, "seed": 5, "stale": 0.25, "fresh": 0.5}
    rows = (
        joined("a"),
        ("exploration_opened", {**opened, **prices}),
        ("phase_started", {"name": "rollout", "iteration": 3}),
        accepted("rollout", 3, (1, 8, 0.75), (0, 9, 1.0)),
        accepted("explore", 4, (0, 3, 0.5), (1, 3, None)),
        accepted("rollout", 3, (0, 2, 0.5), (0, 3, None)),
        accepted("audit", 3, (0, 7, 0.5)),
        ("phase_started", {"name": "train", "iteration": 3}),
        ("request_failed", {"request_kind": "explore", "iteration": 4, "instance": 1}),
        ("request_failed", {"request_kind": "rollout", "iteration": 3, "instance": 1}),
        ("phase", {"name": "train", "iteration": 3, "start_s": 0.5, "end_s": 4.5}),
        ("exploration_closed", {"iteration": 4, "asked": 3, "came": 3}),
        ("audited", {"iteration": 3, "pairs": [pair]}),
        ("phase_started", {"name": "evaluate", "iteration": 4}),
    )
    assert told(*rows)[1:] == [
        (2, Opened(4, 2, 3, 6, (A,), (3,), reserved_usd_per_hour=8.0, spot_usd_per_hour=1.0)),
        (5, SeedsExplored(4, ((0, 0.5), (1, None)))),
        (8, KeptRegenerated(3, ((0.5, 1.0), (0.75,)))),
        (8, TrainingStarted()),
        (9, SeedsExplored(4, ((1, None),))),
        (11, TrainingEnded(4.0)),
        (12, Closed()),
        (13, Audited(3, (Pair(1, 0.25, 0.5),))),
    ]


def test_the_forecast_of_the_training_time_is_judged_by_what_it_took() -> None:
    planner = Scripted()
    feed = PlannerFeed(planner)
    start = {"time_s": 1.0, "kind": "phase_started", "name": "train", "iteration": 0}
    end = {"time_s": 5.0, "kind": "phase", "name": "train", "iteration": 0, "start_s": 1.0, "end_s": 5.0}
    feed.add(start)
    feed.add(end)
    assert feed.metrics == {}
    planner.training_s = 2.0
    feed.add(start)
    feed.add(end)
    assert feed.metrics == {"time/train_forecast_s": 2.0, "time/train_forecast_error": pytest.approx(0.693147)}


# What becomes of its decisions


def test_the_request_of_a_candidate_is_a_function_of_its_index() -> None:
    opened = OpenExploration(exploration())
    first = opened.ask([Explore(1, 2, 4), Explore(0, 1, 2)])
    second = opened.ask([Explore(1, 1, 4)])
    assert [request.key for request in (*first, *second)] == opened.keys
    assert [(key.instance, key.seed, key.steps) for key in opened.keys] == [
        (1, sample_seed(7, 1, 1, 0), 4),
        (1, sample_seed(7, 1, 1, 1), 4),
        (0, sample_seed(7, 1, 0, 0), 2),
        (1, sample_seed(7, 1, 1, 2), 4),
    ]
    assert [(request.prompt, request.spec) for request in first] == [
        (PROMPTS[1], SPEC),
        (PROMPTS[1], SPEC),
        (PROMPTS[0], PREVIEW),
    ]


def test_neighbouring_portions_are_logged_as_one() -> None:
    actions = [Explore(0, 4, 6), Explore(0, 4, 6), Explore(1, 4, 6), Explore(1, 2, 3), Explore(0, 1, 6)]
    assert asked_rows(actions) == [[0, 8, 6], [1, 4, 6], [1, 2, 3], [0, 1, 6]]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


PRICES = FixedPrices(reserved_usd_per_gpu_hour=4.0, spot_usd_per_gpu_hour=1.0)


@pytest.fixture
def planner() -> Scripted:
    return Scripted(
        Opened=[Explore(0, 1, 4), Explore(1, 1, 4)],
        SeedsExplored=[Explore(0, 1, 2), StopExploring("that is enough")],
        Closed=[Explore(0, 1, 4)],
    )


@pytest.fixture
def coordinator(tmp_path: Path, planner: Scripted) -> Iterator[Coordinator]:
    coordinator = Coordinator(
        run="run",
        folder=tmp_path,
        scheduler=Scheduler(max_attempts=1),
        planner=planner,
        ledger=Ledger(prices=PRICES, reserved_gpus=2),
        now=Clock(),
    )
    coordinator.join(Joined(Member("n", 0), pid=1, batch_size=2, fingerprint="fake"))
    coordinator.publish(V0, "sum", size_bytes=1, publish_s=0.0)
    yield coordinator
    coordinator.shutdown()


def serve(coordinator: Coordinator, **how: Any) -> Lease:
    worker = "spot-n-0.0"
    coordinator.pull(worker)
    lease = coordinator.granted.pop(worker)
    results = [SampleResult(r.key, worker, "sum", **{"reward": 0.5, **how}) for r in lease.requests]
    coordinator.push(worker, lease.id, results, WorkReport(0.0, 0.0, 0.0, 4 * len(results)))
    return lease


def log_of(folder: Path, first: str) -> list[dict[str, Any]]:
    """The event log from the first row of a kind on, without times."""
    rows = [{name: row[name] for name in row if name != "time_s"} for row in read_jsonl(folder / "events.jsonl")]
    return rows[[row["kind"] for row in rows].index(first) :]


def test_decisions_are_submitted_and_logged(coordinator: Coordinator, planner: Scripted, tmp_path: Path) -> None:
    coordinator.open_exploration(exploration())
    assert len(coordinator.explores) == 2
    lease = serve(coordinator)
    assert [request.key for request in lease.requests] == coordinator.explores[:2]
    (late,) = coordinator.explores[2:]
    assert (late.instance, late.seed, late.steps) == (0, sample_seed(7, 1, 0, 1), 2)
    assert [result.key for result in coordinator.close_exploration()] == [r.key for r in lease.requests]
    assert coordinator.explores == ()
    assert coordinator.close_exploration() == []

    batch = {"request_kind": "explore", "iteration": 1}
    opened = {"iteration": 1, "version": "0.0", "prompts": 2, "keep": 2, "steps": 4, "previews": [2]}
    prices = {"reserved_usd_per_hour": 8.0, "spot_usd_per_hour": 1.0}
    of_worker = {"worker": "spot-n-0.0", **batch}
    work = {"denoise_s": 0.0, "decode_s": 0.0, "score_s": 0.0, "steps": 8}
    rewards = [[instance, sample_seed(7, 1, instance, 0), 0.5] for instance in (0, 1)]
    assert log_of(tmp_path, "exploration_opened") == [
        {"kind": "exploration_opened", **opened, **prices},
        {"kind": "explore_asked", "iteration": 1, "seeds": [[0, 1, 4], [1, 1, 4]]},
        {"kind": "submitted", **batch, "count": 2},
        {"kind": "lease_granted", "lease": 0, **of_worker, "count": 2, "version": "0.0"},
        {"kind": "lease_done", "lease": 0, **of_worker, "count": 2, **work},
        {"kind": "results_accepted", **of_worker, "results": rewards},
        {"kind": "explore_asked", "iteration": 1, "seeds": [[0, 1, 2]]},
        {"kind": "submitted", **batch, "count": 1},
        {"kind": "explore_stopped", "iteration": 1, "reason": "that is enough"},
        {"kind": "closed", **batch, "accepted": 2, "dropped": 1},
        {"kind": "exploration_closed", "iteration": 1, "asked": 3, "came": 2},
    ]
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    explore = {name: value for name, value in row.items() if name.startswith("explore/")}
    assert explore == {"explore/requested": 3.0, "explore/late": 1.0, "explore/steps": 2.0}
    assert [type(event) for _, event in planner.told] == [WorkersChanged, Opened, SeedsExplored, Closed]


def test_a_reward_that_is_no_number_is_none(coordinator: Coordinator, planner: Scripted) -> None:
    coordinator.open_exploration(exploration())
    serve(coordinator, reward=float("nan"))
    assert planner.told[-1][1] == SeedsExplored(1, ((0, None), (1, None)))


def test_samples_that_fail_are_told_one_by_one(coordinator: Coordinator, planner: Scripted) -> None:
    coordinator.open_exploration(exploration())
    serve(coordinator, error="unreadable")
    told_of = [event for _, event in planner.told if isinstance(event, SeedsExplored)]
    assert told_of == [SeedsExplored(1, ((0, None),)), SeedsExplored(1, ((1, None),))]
    assert [result.error for result in coordinator.close_exploration()] == ["unreadable"] * 2


def test_one_exploration_is_open_at_a_time(coordinator: Coordinator) -> None:
    coordinator.open_exploration(exploration())
    with pytest.raises(ValueError, match="exploration for iteration 1 is still open"):
        coordinator.open_exploration(exploration(2))


# State


def test_a_planner_s_state_survives_json() -> None:
    feed = PlannerFeed(Scripted(Opened=[]))
    feed.add({"time_s": 1.0, "kind": "exploration_closed"})
    state = json.loads(json.dumps(feed.state_dict()))
    assert state == {"planner": "Scripted", "state": {"told": 1}}
    other = Scripted()
    PlannerFeed(other).load_state_dict(state)
    assert other.training_s == 1.0


def test_a_planner_of_another_kind_begins_anew() -> None:
    planner = LargestFeasible()
    before = planner.state_dict()
    PlannerFeed(planner).load_state_dict(PlannerFeed(Fixed(seeds_per_prompt=4)).state_dict())
    assert planner.state_dict() == before


# A cluster in one process


def run(folder: Path, planner: Any, iterations: int = 3) -> list[int]:
    """How many seeds were explored for each iteration."""
    coordinator = Coordinator(run="run", folder=folder, scheduler=Scheduler(), planner=planner)
    spot = [FakeEngine(batch_size=2) for _ in range(2)]
    cluster = InlineCluster(coordinator=coordinator, engine=FakeEngine(weights="w"), spot_engines=spot)
    explored = []
    for iteration in range(iterations):
        policy = PolicyVersion(0, iteration)
        cluster.publish(policy, saves("w"))
        cluster.open_exploration(exploration(iteration + 1, policy))
        with cluster.phase("rollout", iteration):
            pass
        with cluster.phase("train", iteration):
            pass
        explored.append(len(cluster.close_exploration(wait_s=0.0)))
    coordinator.shutdown()
    return explored


def test_fixed_explores_all_it_asks_for_and_none_explores_nothing(tmp_path: Path) -> None:
    assert run(tmp_path / "fixed", Fixed(seeds_per_prompt=3)) == [6, 6, 6]
    assert run(tmp_path / "none", NoExploration()) == [0, 0, 0]


@pytest.mark.parametrize("make", [lambda: Bandit(seed=0), LargestFeasible], ids=["bandit", "largest_feasible"])
def test_a_recorded_log_gives_the_recorded_decisions_again(tmp_path: Path, make: Any) -> None:
    assert run(tmp_path, make())[0] == 8  # two passes for each worker, before it is known how much time there is
    assert_decisions_repeat(tmp_path / "events.jsonl", make())


def assert_decisions_repeat(log: Path, planner: Any) -> None:
    """A planner that is fed a recorded log decides what was decided then."""
    feed, decided = PlannerFeed(planner), []
    recorded: list[Any] = []
    for row in read_jsonl(log):
        actions = feed.add(row)
        decided += [(a.prompt, a.steps) for a in actions if isinstance(a, Explore) for _ in range(a.count)]
        decided += [a.reason for a in actions if isinstance(a, StopExploring)]
        if row["kind"] == "explore_asked":
            recorded += [(prompt, steps) for prompt, count, steps in row["seeds"] for _ in range(count)]
        elif row["kind"] == "explore_stopped":
            recorded.append(row["reason"])
    assert recorded
    assert decided == recorded
