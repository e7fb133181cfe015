from collections.abc import Mapping
from dataclasses import replace

import pytest

from src.report.groups import Group, grouped, spread
from src.report.measure import Evaluation, Measured, measure
from src.report.read import read_run
from tests.report.synthetic import write_run

FIXED = {"planner._target_": "src.spot.planning.simple.Fixed", "planner.seeds_per_prompt": "32"}
NONE = {"planner._target_": "src.spot.planning.simple.NoExploration"}
TRACE = {"market.trace": "/a/data/traces/aws.csv", "market.decider._target_": "src.spot.market.replay"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure(read_run(write_run(tmp_path_factory.mktemp("runs") / "run", iterations=1, images=False)))


def names(run: Measured, *settings: Mapping[str, str]) -> list[str]:
    return [group.name for group in grouped([replace(run, settings=one) for one in settings])]


def test_runs_that_differ_in_seeds_and_paths_alone_are_a_group(run: Measured) -> None:
    runs = [
        replace(run, settings={"seed": seed, "market.seed": seed, "paths.output_dir": seed, "name": "text", **FIXED})
        for seed in ("2", "10", "1")
    ]
    (group,) = grouped(runs)
    assert (group.key, group.name, group.runs) == ("A", "text", tuple(runs))
    assert group.seeds == ("2", "10", "1")


def test_equal_files_of_different_checkouts_are_equal(run: Measured) -> None:
    settings = ({"paths.root_dir": root, "model.path": f"{root}/assets/tiny"} for root in ("/a", "/b"))
    assert len(grouped([replace(run, settings=one) for one in settings])) == 1


def test_the_fewest_and_most_telling_settings_name_the_groups(run: Measured) -> None:
    steps = {"trainer.max_steps": "3"}
    assert names(run, NONE | steps, FIXED, NONE | TRACE, FIXED | TRACE) == [
        "no trace, planner no exploration",
        "no trace, planner fixed",
        "trace aws, planner no exploration",
        "trace aws, planner fixed",
    ]


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("cluster.reserved_gpus", ("4", "12"), ["4 reserved GPUs", "12 reserved GPUs"]),
        ("cluster.elastic", ("true", "false"), ["elastic", "no elastic"]),
        ("explore.select.path", ("src.core.selection.max_variance", "null"), ["select max variance", "no select"]),
        ("algo.optimizer.lr", ("0.0003", "0.001"), ["lr 0.0003", "lr 0.001"]),
        ("system", ("spotlight", "sol_rl"), ["spotlight", "sol_rl"]),
        ("algo.group_size", ("8", "32"), ["group size 8", "group size 32"]),
        ("explore.previews", ("[1, 3]", "[]"), ["previews [1, 3]", "previews []"]),
    ],
)
def test_settings_are_said_in_words(run: Measured, key: str, values: tuple[str, str], expected: list[str]) -> None:
    assert names(run, *({key: value} for value in values)) == expected


def test_letters_never_run_out(run: Measured) -> None:
    groups = grouped([replace(run, settings={"algo.steps": str(steps)}) for steps in range(60)])
    assert [groups[index].key for index in (0, 25, 26, 51, 52)] == ["A", "Z", "AA", "AZ", "BA"]


def test_a_spread_goes_as_far_as_all_runs_have_come(run: Measured) -> None:
    nan = float("nan")
    first = (Evaluation(0, 0.0, 1.0, 0.25, nan), Evaluation(4, 1.0, 2.0, 0.5, nan), Evaluation(8, 2.0, 3.0, 1.0, nan))
    second = (Evaluation(0, 0.5, 1.0, 0.75, nan), Evaluation(4, 2.0, 4.0, 0.0, nan))
    group = Group("A", "a", tuple(replace(run, evaluations=points) for points in (first, second)))
    curve = spread(group, lambda evaluation: evaluation.hours, lambda evaluation: evaluation.reward)
    assert curve.mean == ((0.25, 0.5), (1.5, 0.25))
    assert curve.low == ((0.25, 0.25), (1.5, 0.0))
    assert curve.high == ((0.25, 0.75), (1.5, 0.5))
    assert spread(group, lambda evaluation: evaluation.hours, lambda evaluation: evaluation.judge).mean == ()


def test_figures_that_were_not_measured_are_left_out(run: Measured) -> None:
    group = Group("A", "a", (replace(run, preemptions=2.0), replace(run, preemptions=float("nan"))))
    assert group.numbers(lambda member: member.preemptions) == [2.0]
