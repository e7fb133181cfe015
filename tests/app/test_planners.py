"""Planners in whole runs: what they decide, and what is left of it when the run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from src.app.config import ConfigError, build, check_resumed
from src.core.events import read_jsonl
from src.spot.exploring import PlannerFeed
from src.spot.planning.protocol import Explore, Planner
from tests.app.runs import TINY, Run, configuration
from tests.spot.test_exploring import assert_decisions_repeat

LEARNING = ["largest_feasible", "ucb", "thompson"]


def planner_of(folder: Path, name: str) -> Planner:
    planner: Planner = build(configuration(folder, *TINY, f"planner={name}")["planner"], "planner")
    return planner


def state(run: Run) -> dict:
    found: dict = run.checkpoint.state["planner"]
    return found


@pytest.mark.parametrize("name", LEARNING)
def test_a_whole_run(inline, tmp_path: Path, name: str):
    """Spot workers do their part when training is over, so all that was asked for comes, and nothing more is asked."""
    run = inline(f"planner={name}", "trainer.max_steps=3", workers=2)
    first, second = run.events("exploration_closed")
    assert first["asked"] == 48  # two passes for each worker, while it is not known how much time there is
    for event in (first, second):
        assert event["came"] == event["asked"]
    assert run.metric("explore/requested") == run.metric("explore/explored") == [48, second["asked"]]
    assert run.metric("explore/late") == [0, 0]
    assert run.metric("explore/steps")[0] == 3
    assert {prompt for prompt, _, _ in run.events("explore_asked")[0]["seeds"]} == {0, 1, 2}
    forecasts = [row for row in read_jsonl(run.folder / "metrics.jsonl") if "time/train_forecast_s" in row]
    assert [row["step"] for row in forecasts] == [2]
    assert_decisions_repeat(run.folder / "events.jsonl", planner_of(tmp_path, name))


@pytest.mark.parametrize("name", LEARNING)
def test_a_resumed_run_goes_on_with_what_the_planner_knows(inline, tmp_path: Path, name: str):
    """The checkpoint holds the very state that the log leads to, and the log that follows leads on from there."""
    first = inline(f"planner={name}", "trainer.max_steps=4", stop_after=2)
    saved = state(first)
    feed = PlannerFeed(planner_of(tmp_path, name))
    for row in read_jsonl(first.folder / "events.jsonl"):
        feed.add(row)
    assert json.loads(json.dumps(feed.state_dict())) == saved
    assert saved["state"]["training"]["level"] is not None

    resumed = inline(f"planner={name}", "trainer.max_steps=4", folder=first.folder, ckpt_path="last")
    rows = list(read_jsonl(first.folder / "events.jsonl"))
    restart = max(index for index, row in enumerate(rows) if row["kind"] == "run_started")
    feed = PlannerFeed(planner_of(tmp_path, name))
    feed.load_state_dict(saved)
    decided = [action for row in rows[restart:] for action in feed.add(row) if isinstance(action, Explore)]
    asked = [event for event in rows[restart:] if event["kind"] == "explore_asked"]
    assert sum(action.count for action in decided) == sum(n for event in asked for _, n, _ in event["seeds"])
    assert json.loads(json.dumps(feed.state_dict())) == state(resumed)


def test_a_fixed_planner_knows_nothing(plain: Run):
    assert state(plain) == {"planner": "Fixed", "state": {}}


def test_another_planner_is_refused_unless_it_is_asked_for(inline):
    first = inline("planner=ucb", stop_after=1)
    earlier = first.folder / "config.yaml"
    earlier.write_text(yaml.safe_dump(dict(configuration(first.folder, *TINY, "planner=ucb"))))
    config = configuration(first.folder, *TINY, "planner=largest_feasible")
    with pytest.raises(ConfigError, match=r"planner\._target_ is .*LargestFeasible.* made with .*Bandit"):
        check_resumed(config, earlier, ("trainer.max_steps=4",))
    warnings = check_resumed(config, earlier, ("planner=largest_feasible",))
    assert any("LargestFeasible" in warning for warning in warnings)
    other = inline("planner=largest_feasible", "trainer.max_steps=3", folder=first.folder, ckpt_path="last")
    assert state(other)["planner"] == "LargestFeasible"


def test_previews_are_explored_with_fewer_steps(inline):
    planner = ("planner=none", "planner._target_=tests.app.planners.Previewing")
    run = inline(*planner, "algo.steps=4", "explore.previews=[2]", "trainer.max_steps=3")
    assert [event["previews"] for event in run.events("exploration_opened")] == [[2], [2]]
    assert run.metric("explore/steps") == [2, 2]
    assert run.metric("explore/explored") == [15, 15]
    explored = [e for e in run.events("lease_done") if e["request_kind"] == "explore"]
    assert {event["steps"] / event["count"] for event in explored} == {2}
    assert run.metric("explore/audited") == [4, 4]  # with all steps


BAD_VALUES = {
    "planner.max_seeds_per_prompt=3": r"planner\.max_seeds_per_prompt must be 0 or .* rollouts_per_prompt=4, got 3",
    "planner.miss_rate=1": r"planner: planner\.miss_rate must be between 0 and 1, got 1",
    "planner.attitude.optimism=-1": r"planner.*planner\.attitude\.optimism must not be negative, got -1",
}


@pytest.mark.parametrize("override", BAD_VALUES)
def test_a_bad_value_is_refused(tmp_path: Path, override: str):
    with pytest.raises(ConfigError, match=BAD_VALUES[override]):
        configuration(tmp_path, *TINY, "planner=ucb", override)
