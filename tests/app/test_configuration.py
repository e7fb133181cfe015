"""Every file under conf/ composes, and what it names can be made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException
from hydra.utils import get_method, instantiate
from omegaconf import OmegaConf

from src.app.config import ConfigError, build
from tests.app.runs import ROOT, composed, configuration, run_inline

GROUPS = sorted(folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir())
OPTIONS = [(file.parent.name, file.stem) for group in GROUPS for file in sorted((ROOT / "conf" / group).glob("*.yaml"))]
SMALL = (
    "debug=fast",
    "data.prompts_per_iteration=2",
    "data.eval_prompts=4",
    "algo.group_size=2",
    "planner.seeds_per_prompt=4",
)


def partials(value: Any) -> Iterator[functools.partial[Any]]:
    """Everything that waits for more arguments."""
    if isinstance(value, functools.partial):
        yield value
        yield from partials(value.keywords)
    elif isinstance(value, dict):
        for item in value.values():
            yield from partials(item)


def test_there_is_an_option_for_every_group_of_the_interface():
    interface = "model data reward algo explore planner cluster market parallel trainer callbacks logger paths"
    assert set(interface.split()) <= {group for group, _ in OPTIONS}


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda value: str(value))
def test_every_option_composes_and_builds(tmp_path, group, option):
    name = f"hydra={option}" if group == "hydra" else f"{group}={option}"
    config = composed(f"paths.output_dir={tmp_path}", name)
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    built = instantiate(resolved)  # finds a misspelt argument of every class, partials apart
    for waiting in partials(OmegaConf.to_container(built) if OmegaConf.is_config(built) else built):
        inspect.signature(waiting.func).bind_partial(*waiting.args, **waiting.keywords)
    assert callable(get_method(config.job))


@pytest.mark.parametrize("experiment", [option for group, option in OPTIONS if group == "experiment"])
def test_every_experiment_runs(tmp_path, experiment):
    config = composed(f"experiment={experiment}")
    if config.job != "src.app.job.post_train" or config.model.load:
        return  # composed and built above; pretraining and published models have tests of their own
    run = run_inline(tmp_path / "run", f"experiment={experiment}", *SMALL)
    assert [row["step"] for row in run.metrics if "train/reward" in row] == [1, 2]
    assert run.metric("explore/explored") == [8]
    assert len(run.metric("eval/reward")) == 3


@pytest.mark.parametrize("experiment", [option for group, option in OPTIONS if group == "experiment"])
def test_every_experiment_says_how_to_run_it(experiment):
    text = (ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"python train.py experiment={experiment}" in line for line in header)


def test_a_missing_or_misspelt_name_is_an_error():
    with pytest.raises(ConfigCompositionException, match=r"algo\.group_sise"):
        composed("algo.group_sise=3")
    with pytest.raises(ConfigError, match=r"algo\.rule: .*noise_levl"):
        build({"_target_": "src.models.steps.FlowSDE", "noise_levl": 0.7}, "algo.rule")


def test_a_logger_can_be_chosen_for_a_debug_run():
    assert composed("debug=fast").logger._target_ == "src.app.sinks.NoSink"
    assert composed("debug=fast", "logger=csv").logger._target_ == "src.app.sinks.CsvSink"


def test_the_sweep_s_values_reach_what_uses_them(tmp_path: Path):
    config = configuration(tmp_path, "algo.noise_level=0.5")
    assert config["algo"]["rule"]["noise_level"] == 0.5
    config = configuration(tmp_path, "algo=flow_cps", "algo.noise_level=0.5")
    assert config["algo"]["rule"] == {"_target_": "src.models.steps.CPS", "noise_level": 0.5}
