"""What planners ask for: exact logs of small scripts, and what holds for all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.core.seeds import generator
from src.spot.planning.attitudes import Thompson, Ucb
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
    Planner,
    SeedsExplored,
    StopExploring,
    TrainingEnded,
    TrainingStarted,
    Worker,
    WorkersChanged,
)
from src.spot.planning.simple import Fixed, LargestFeasible, NoExploration
from src.spot.planning.value import LearningValue
from tests.spot.planning.scripts import TWO, Driver, asked, opened

MAKERS: dict[str, Callable[[int], Planner]] = {
    "none": lambda most: NoExploration(),
    "fixed": lambda most: Fixed(seeds_per_prompt=most),
    "largest_feasible": lambda most: LargestFeasible(max_seeds_per_prompt=most),
    "ucb": lambda most: Bandit(seed=3, attitude=Ucb(), max_seeds_per_prompt=most),
    "thompson": lambda most: Bandit(seed=3, attitude=Thompson(), max_seeds_per_prompt=most),
}
"""Planners that ask for at most so many seeds per prompt."""
every_planner = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
anytime_planner = pytest.mark.parametrize(
    "make",
    [MAKERS[name] for name in ("largest_feasible", "ucb", "thompson")],
    ids=["largest_feasible", "ucb", "thompson"],
)


def normal(prompt: int, index: int) -> float:
    return generator("reward", prompt, index).gauss(0.5, 0.2)


# Planners that do not learn


def test_no_exploration_says_so_and_nothing_else() -> None:
    assert NoExploration().handle(0.0, opened(1)) == [StopExploring("exploration is off")]
    assert NoExploration().handle(0.0, WorkersChanged(TWO)) == []


def test_fixed_asks_in_rounds_of_one_seed_per_prompt() -> None:
    log = Fixed(seeds_per_prompt=2).handle(0.0, opened(1, prompts=3))
    assert log == [
        Explore(0, 1, 10),
        Explore(1, 1, 10),
        Explore(2, 1, 10),
        Explore(0, 1, 10),
        Explore(1, 1, 10),
        Explore(2, 1, 10),
        StopExploring("everything is asked for"),
    ]


def test_fixed_asks_once_whether_there_are_workers_or_not() -> None:
    planner = Fixed(seeds_per_prompt=1)
    assert asked(planner.handle(0.0, opened(1, prompts=2, workers=()))) == [(0, 1), (1, 1)]
    assert planner.handle(1.0, WorkersChanged(TWO)) == []


def test_largest_feasible_fills_the_time_equally() -> None:
    driver = warmed(LargestFeasible(max_seeds_per_prompt=64))
    came = driver.iteration(opened(11))
    assert driver.late == 0
    assert came == [18, 18, 18, 18]  # 9 of 10 passes: less than one is left for errors of time and speed


def test_largest_feasible_does_without_if_there_is_no_choice() -> None:
    driver = Driver(LargestFeasible(max_seeds_per_prompt=16), normal)
    driver.iteration(opened(1))
    assert driver.iteration(opened(2, prompts=20)) == [0] * 20  # 80 seeds at most, 4 per prompt
    assert driver.log[-1][1] == StopExploring("too little time to choose among seeds")


def test_it_goes_on_when_workers_come() -> None:
    planner = LargestFeasible(max_seeds_per_prompt=16)
    driver = Driver(planner, normal)
    driver.iteration(opened(1))
    few = planner.handle(driver.now_s, opened(2, prompts=16, workers=TWO[:1]))
    assert few == [StopExploring("too little time to choose among seeds")]
    more = planner.handle(driver.now_s, WorkersChanged(tuple(Worker(name, 4) for name in "abcd")))
    assert asked(more)[:3] == [(0, 1), (1, 1), (2, 1)]


# The bandit


def warmed(
    planner: Planner, reward: Callable[[int, int], float] = normal, iterations: int = 10, **how: float
) -> Driver:
    driver = Driver(planner, reward)
    for iteration in range(1, iterations + 1):
        driver.iteration(opened(iteration, **how))  # type: ignore[arg-type]
    return driver


def test_it_leaves_prompts_that_do_not_vary() -> None:
    def reward(prompt: int, index: int) -> float:
        return 1.0 if prompt < 4 else normal(prompt, index)

    driver = warmed(Bandit(seed=0, max_seeds_per_prompt=32), reward, prompts=8)
    came = driver.iteration(opened(11, prompts=8))
    assert max(came[:4]) <= 4  # one portion each, and no more
    assert sum(came[4:]) >= 48


def test_a_short_time_goes_to_few_prompts() -> None:
    driver = warmed(Bandit(max_seeds_per_prompt=16, seed=0))
    came = driver.iteration(opened(11, prompts=16), training_s=100.0)
    assert sum(came) > 0
    assert sum(count > 4 for count in came) >= sum(came) / 16  # those who get some, get more than G
    assert sum(count == 0 for count in came) >= 8


def audit(iteration: int, correlation: float, pairs: int = 64) -> Audited:
    draw = generator("audit", iteration)
    drawn = []
    for index in range(pairs):
        stale, noise = draw.gauss(0, 0.2), draw.gauss(0, 0.2)
        drawn.append(Pair(index % 4, stale, correlation * stale + math.sqrt(1 - correlation**2) * noise))
    return Audited(iteration, tuple(drawn))


def explored_after(correlation: float, spot_usd_per_hour: float) -> int:
    """Seeds of iteration 7 after six whose audits and payoffs showed the correlation."""
    learning = LearningValue(gain=0.8, saturation=50.0)
    driver = Driver(Bandit(seed=0, learning=learning, max_seeds_per_prompt=24), normal)
    for iteration in range(1, 8):
        came = driver.iteration(opened(iteration, spot_usd_per_hour=spot_usd_per_hour))
        driver.tell(audit(iteration, correlation))
        contrast = 1 + correlation**2 * 1.4
        rewards = tuple(0.5 + sign * 0.2 * math.sqrt(contrast * 3 / 4) for sign in (1, 1, -1, -1))
        driver.tell(KeptRegenerated(iteration, (rewards,) * 4))
    return sum(came)


def test_it_explores_less_if_exploration_ranks_poorly() -> None:
    assert [explored_after(correlation, 14.0) for correlation in (0.95, 0.5, 0.3, 0.0)] == [72, 64, 0, 0]


def test_it_explores_whatever_the_correlation_if_it_costs_nothing() -> None:
    assert explored_after(0.3, 0.0) == explored_after(0.95, 0.0) > 0


def test_it_explores_nothing_that_does_not_pay() -> None:
    driver = warmed(Bandit(max_seeds_per_prompt=16, seed=0))
    # 36 usd per hour make 1 usd per iteration of 100 s. The best rate of a prompt is about .1 of its variance per
    # seed, so a seed adds .8 x .7 x .1 / 4 = .014 iterations: worth it at a price per seed (2.5 s) of .0001, not of 1.
    assert sum(driver.iteration(opened(11, spot_usd_per_hour=0.144))) > 0
    assert sum(driver.iteration(opened(12, spot_usd_per_hour=1440.0))) == 0
    assert driver.log[-1][1] == StopExploring("the learning gained is worth less than the spot time")


def test_it_stops_when_more_contrast_would_teach_no_more() -> None:
    driver = warmed(Bandit(max_seeds_per_prompt=16, seed=0, learning=LearningValue(saturation=1.5)))
    came = driver.iteration(opened(11))
    assert 0 < sum(came) < 40
    assert driver.log[-1][1] == StopExploring("more contrast would teach no more")


@pytest.mark.parametrize(("correlation", "steps"), [(0.95, 5), (0.2, 10)])
def test_previews_are_used_if_they_rank_well(correlation: float, steps: int) -> None:
    driver = Driver(Bandit(max_seeds_per_prompt=16, seed=0, attitude=Ucb(optimism=0.0)), normal)
    for iteration in range(1, 9):
        driver.iteration(opened(iteration, prompts=16, previews=(5,)))
        chosen = {a.steps for _, a in driver.log[-20:] if isinstance(a, Explore)}
        driver.tell(audit(iteration, correlation if chosen == {5} else 0.9))
    assert chosen == {steps}


# What holds for all


@anytime_planner
def test_nothing_is_asked_for_without_workers(make: Callable[[int], Planner]) -> None:
    driver = warmed(make(16))
    assert asked(driver.tell(opened(11, workers=()))) == []
    assert asked(driver.tell(TrainingStarted())) == []


@every_planner
def test_the_largest_n_is_the_limit(make: Callable[[int], Planner]) -> None:
    driver = warmed(make(5), prompts=2)
    came = driver.iteration(opened(11, prompts=2), training_s=100.0)
    assert max(came) <= 5
    assert driver.late == 0


@anytime_planner
def test_deadlines_are_kept_when_training_time_varies(make: Callable[[int], Planner]) -> None:
    draw, driver, missed = generator("times"), Driver(make(16), normal), 0
    for iteration in range(1, 101):
        driver.iteration(opened(iteration, prompts=8), training_s=100 * math.exp(0.05 * draw.gauss(0, 1)))
        missed += iteration > 1 and driver.late > 0
    assert missed <= 2


def test_results_of_another_time_change_nothing() -> None:
    planner = Bandit(max_seeds_per_prompt=16, seed=0)
    driver = warmed(planner)
    driver.tell(opened(11))
    before = json.dumps(planner.state_dict())
    assert driver.planner.handle(driver.now_s, SeedsExplored(10, ((0, 0.5),))) == []
    assert json.dumps(planner.state_dict()) == before


def test_groups_of_which_one_sample_survived_say_nothing() -> None:
    planner = Bandit(max_seeds_per_prompt=32, seed=0)
    driver = warmed(planner)
    driver.iteration(opened(11), training_s=100)
    before = json.dumps(planner.state_dict())
    assert driver.planner.handle(driver.now_s, KeptRegenerated(11, ((0.5,), (), (0.25,), (0.5,)))) == []
    assert json.dumps(planner.state_dict()) == before
    survivors, alone = [(0.0, 1.0, 0.5, 0.25)] * 3, (0.5,)
    states = []
    for groups in (survivors, [*survivors, alone]):
        planner.load_state_dict(json.loads(before))
        planner.handle(driver.now_s, KeptRegenerated(11, tuple(groups)))
        states.append(json.dumps(planner.state_dict()))
    assert states[0] == states[1] != before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(seeds_per_prompt=0), "planner.seeds_per_prompt must be at least 1, got 0"),
        (lambda: LargestFeasible(max_seeds_per_prompt=0), "planner.max_seeds_per_prompt must be at least 1, got 0"),
        (lambda: LargestFeasible(miss_rate=0), "planner.miss_rate must be between 0 and 1, got 0"),
        (lambda: Bandit(seed=0, discount=1.0), "planner.discount must be between 0 and 1, got 1.0"),
        (lambda: Bandit(seed=0, portion=0), "planner.portion must be at least 1, got 0"),
        (lambda: Ucb(optimism=-1), "planner.attitude.optimism must not be negative, got -1"),
        (lambda: opened(1, prompts=0), "Opened.prompts must be at least 1, got 0"),
        (lambda: opened(1, previews=(10,)), r"Opened.previews must be in 1..steps-1=9, got \(10,\)"),
    ],
)
def test_impossible_values_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Any order of events

names = st.sampled_from("abcd")
worker_sets = st.lists(st.tuples(names, st.integers(1, 6)), max_size=4, unique_by=lambda worker: worker[0]).map(
    lambda rows: tuple(Worker(name, size) for name, size in rows)
)
rewards = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2))
steps = st.one_of(
    st.tuples(st.just("open"), worker_sets, st.integers(1, 5), st.integers(2, 5)),
    st.tuples(
        st.just("serve"), st.integers(1, 8), st.lists(rewards, min_size=8, max_size=8), names, st.floats(0.5, 20)
    ),
    st.tuples(st.just("workers"), worker_sets),
    st.tuples(st.just("start")),
    st.tuples(st.just("end"), st.floats(10, 200)),
    st.tuples(st.just("close")),
    st.tuples(st.just("learn"), st.lists(st.floats(-1, 1), min_size=8, max_size=8)),
)


class Play:
    """Turns steps into events that may really happen, and follows what is open."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.iteration = 0
        self.opened: Opened | None = None
        self.workers: tuple[Worker, ...] = ()
        self.queue: list[int] = []
        self.counts: dict[int, int] = {}

    def events(self, step: tuple) -> list[Event]:  # type: ignore[type-arg]
        match step:
            case ("open", workers, prompts, keep) if self.opened is None:
                self.iteration += 1
                self.queue, self.counts, self.workers = [], {}, workers
                self.opened = replace(
                    opened(self.iteration, prompts=prompts, workers=workers, previews=(5,), spot_usd_per_hour=1.0),
                    keep=keep,
                )
                return [self.opened]
            case ("serve", count, values, name, seconds):
                lease, self.queue = self.queue[:count], self.queue[count:]
                results = tuple(zip(lease, values, strict=False))
                return [LeaseServed(name, 10, seconds), SeedsExplored(self.iteration, results)]
            case ("workers", workers):
                self.workers = workers
                return [WorkersChanged(workers)]
            case ("start",):
                return [TrainingStarted()]
            case ("end", seconds):
                return [TrainingEnded(seconds)]
            case ("close",):
                self.opened, self.queue = None, []
                return [Closed()]
            case ("learn", values):
                pairs = tuple(Pair(k // 2, values[k], values[-1 - k]) for k in range(8))
                return [KeptRegenerated(self.iteration, (tuple(values),)), Audited(self.iteration, pairs)]
        return []

    def check(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Explore):
                assert self.opened is not None
                assert action.count > 0
                assert 0 <= action.prompt < self.opened.prompts
                self.counts[action.prompt] = self.counts.get(action.prompt, 0) + action.count
                assert self.counts[action.prompt] <= self.most
                self.queue += [action.prompt] * action.count


@every_planner
@settings(max_examples=60, deadline=None)
@given(script=st.lists(steps, max_size=40), saved=st.integers(0, 40), most=st.integers(1, 20))
def test_any_script_is_answered_within_bounds_and_survives_a_resume(
    make: Callable[[int], Planner],
    script: list[tuple],  # type: ignore[type-arg]
    saved: int,
    most: int,
) -> None:
    planner, play = make(most), Play(most)
    other: Planner | None = None
    for number, step in enumerate(script):
        if number == saved:
            other = make(most)
            other.load_state_dict(json.loads(json.dumps(planner.state_dict())))
        for event in play.events(step):
            actions = planner.handle(number * 7.0, event)
            play.check(actions)
            if other is not None:
                assert other.handle(number * 7.0, event) == actions
    if other is not None:
        assert other.state_dict() == planner.state_dict()


@every_planner
@settings(max_examples=40, deadline=None)
@given(script=st.lists(steps, max_size=30), order=st.permutations("abcd"), most=st.integers(1, 20))
def test_the_names_and_order_of_workers_do_not_matter(
    make: Callable[[int], Planner],
    script: list[tuple],  # type: ignore[type-arg]
    order: list[str],
    most: int,
) -> None:
    renamed = dict(zip("abcd", order, strict=True))

    def other(event: Event) -> Event:
        match event:
            case Opened() | WorkersChanged():
                workers = tuple(replace(worker, name=renamed[worker.name]) for worker in event.workers)
                return replace(event, workers=tuple(reversed(workers)))
            case LeaseServed():
                return replace(event, worker=renamed[event.worker])
        return event

    one, two, play = make(most), make(most), Play(most)
    for number, step in enumerate(script):
        for event in play.events(step):
            actions = one.handle(number * 7.0, event)
            play.check(actions)
            assert two.handle(number * 7.0, other(event)) == actions
