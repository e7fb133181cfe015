"""Every file under conf/ composes, and what it names can be made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf

from src.app.config import ConfigError, build, build_market, spot_places, spot_teams
from src.core.types import Prompt
from src.models import load
from src.models.schedule import ShiftedSchedule
from src.rl.rewards import clip
from tests.app.runs import EXPLORED, ROOT, TINY, composed, configuration, run_inline

GROUPS = sorted(folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir())
OPTIONS = [(file.parent.name, file.stem) for group in GROUPS for file in sorted((ROOT / "conf" / group).glob("*.yaml"))]
EXPERIMENTS = [option for group, option in OPTIONS if group == "experiment"]
DEFAULTS = " ".join(str(entry) for entry in OmegaConf.load(ROOT / "conf" / "train.yaml").defaults)
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


class Downloaded(SimpleNamespace):
    """Stands in for weights from the hub: every name is built with the arguments of the configuration."""

    def __init__(self) -> None:
        super().__init__(logit_scale=torch.zeros(()))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self


def published_schedule(path: str, *, revision: str | None = None, height: int, width: int) -> ShiftedSchedule:
    """Stands in for `load_schedule`, whose arguments it has."""
    return ShiftedSchedule(shift=3.0)


@pytest.fixture
def _hub(monkeypatch):
    monkeypatch.setattr(clip, "load_clip", lambda *args: (Downloaded(), Downloaded()))
    monkeypatch.setattr(load, "load_schedule", published_schedule)


def with_option(group: str, option: str) -> DictConfig:
    return composed("paths.output_dir=/nowhere", f"{group}={option}" if group in DEFAULTS else f"+{group}={option}")


UNFINISHED = [(group, option) for group, option in OPTIONS if OmegaConf.missing_keys(with_option(group, option))]
"""The user has to give a value."""


def test_only_options_for_the_user_s_own_data_lack_a_value():
    assert ("prices", "table") in UNFINISHED
    assert {group for group, _ in UNFINISHED} <= {"prices", "data", "experiment", "reward"}


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda value: str(value))
def test_every_option_names_a_job(group, option):
    assert callable(get_method(with_option(group, option).job))


@pytest.mark.usefixtures("_hub")
@pytest.mark.parametrize(("group", "option"), sorted({*OPTIONS} - {*UNFINISHED}), ids=lambda value: str(value))
def test_every_option_composes_and_builds(group, option):
    config = with_option(group, option)
    resolved = OmegaConf.to_container(config, resolve=True)
    built = instantiate(resolved, _convert_="all")  # finds a misspelt argument of every class, partials apart
    for waiting in partials(built):
        inspect.signature(waiting.func).bind_partial(*waiting.args, **waiting.keywords)


def trains_here(experiment: str) -> bool:
    """Pretraining and published models have tests of their own."""
    config = composed(f"experiment={experiment}")
    return config.job == "src.app.job.post_train" and not config.model.load


POST_TRAINING = [name for name in EXPERIMENTS if trains_here(name)]


@pytest.mark.parametrize("experiment", POST_TRAINING)
def test_every_experiment_runs(tmp_path, experiment):
    run = run_inline(tmp_path / "run", f"experiment={experiment}", *SMALL)
    assert [row["step"] for row in run.metrics if "train/reward" in row] == [1, 2]
    assert run.metric("explore/explored") == [8]
    assert len(run.metric("eval/reward")) == 3


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_says_how_to_run_it(experiment):
    text = (ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"python train.py experiment={experiment}" in line for line in header)


def test_a_function_can_be_named_as_the_reward():
    path = "reward.reward.function.path=tests.app.rewards.redness"
    section = OmegaConf.to_container(composed("reward=function", path, "paths.output_dir=."), resolve=True)["reward"]
    reward = build(section["reward"], "reward.reward")
    assert reward.score(np.full((2, 4, 4, 3), 255, np.uint8), [Prompt(0, ""), Prompt(1, "")]).tolist() == [1.0, 1.0]


def test_rewards_can_be_added_up_in_a_configuration():
    term = {"_target_": "src.rl.rewards.combine.Term"}
    bright = {"_target_": "src.rl.rewards.brightness.BrightnessReward"}
    small = {"_target_": "src.rl.rewards.jpeg.JPEGCompressibility"}
    terms = {"bright": {**term, "reward": bright, "weight": 2.0}, "small": {**term, "reward": small, "weight": 0.0}}
    reward = build({"_target_": "src.rl.rewards.combine.WeightedSum", "terms": terms}, "reward.reward")
    assert reward.name == "bright+small"
    assert reward.score(np.full((1, 4, 4, 3), 255, np.uint8), [Prompt(0, "")]).tolist() == [2.0]


def test_a_missing_or_misspelt_name_is_an_error():
    with pytest.raises(ConfigCompositionException, match=r"algo\.group_sise"):
        composed("algo.group_sise=3")
    with pytest.raises(ConfigError, match=r"algo\.rule: .*noise_levl"):
        build({"_target_": "src.models.steps.FlowSDE", "noise_levl": 0.7}, "algo.rule")


@pytest.mark.parametrize("override", ["system=flow_grp", "debug=fats", "sweep=seed", "market=replayed"])
def test_an_option_that_is_not_there_is_never_passed_over(override):
    with pytest.raises(MissingConfigException, match=override.replace("=", "/")):
        composed(override)


def test_a_logger_can_be_chosen_for_a_debug_run():
    assert composed("debug=fast").logger._target_ == "src.app.sinks.NoSink"
    assert composed("debug=fast", "logger=csv").logger._target_ == "src.app.sinks.CsvSink"


def test_the_sweep_s_values_reach_what_uses_them(tmp_path: Path):
    config = configuration(tmp_path, "algo.noise_level=0.5")
    assert config["algo"]["rule"]["noise_level"] == 0.5
    config = configuration(tmp_path, "algo=flow_cps", "algo.noise_level=0.5")
    assert config["algo"]["rule"] == {"_target_": "src.models.steps.CPS", "noise_level": 0.5}


BAD_VALUES = {
    "+planner.seeds=3": ["planner", "seeds"],
    "algo.group_size=64": ["planner.seeds_per_prompt", "rollouts_per_prompt=64", "got 8"],
    "algo.group_size=1": ["algo.group_size", "got 1"],
    "algo.group_size=many": ["algo.group_size", "'many'"],
    "algo.steps=2.5": ["algo.steps", "2.5"],
    "algo.trained_steps=3": ["algo.trained_steps", "1..2", "got 3"],
    "algo.updates=4": ["algo.updates", "1..3", "got 4"],
    "algo.micro_batch=0": ["algo.micro_batch", "got 0"],
    "data.prompts_per_iteration=0": ["data.prompts_per_iteration", "got 0"],
    "data.prompts_per_iteration=801": ["data.prompts_per_iteration", "1..800", "got 801"],
    "data.eval_prompts=0": ["data.eval_prompts", "got 0"],
    "trainer.devices=2": ["trainer.devices", "got 2"],
    "trainer.max_steps=0": ["trainer.max_steps", "got 0"],
    "trainer.accelerator=gpu": ["trainer.accelerator", "'cuda'", "got 'gpu'"],
    "cluster.device=tpu": ["cluster.device", "got 'tpu'"],
    "parallel.sp_degree=2": ["parallel.sp_degree", "got 2"],
    "cluster.spot_workers=-1": ["cluster.spot_workers", "got -1"],
    "cluster.workers_per_node=0": ["cluster.workers_per_node", "got 0"],
    "cluster.sp_degree=0": ["cluster.sp_degree", "got 0"],
    "cluster.sp_degree=3": ["cluster.sp_degree", "2 attention heads", "got 3"],
    "cluster.spares=1.5": ["cluster.spares", "1.5"],
    "cluster.commit_every=-1": ["cluster.commit_every", "got -1"],
    "cluster.cpus=[99999]": ["cluster.cpus", "got [99999]"],
    "cluster.cpus=1": ["cluster.cpus", "1"],
    "cluster.lease_target_s=-1": ["cluster.lease_target_s", "got -1"],
    "cluster.notices={_target_: src.spot.clouds.AwsSigns, adress: a}": ["cluster.notices", "adress"],
    "market.grace_s=soon": ["market.grace_s", "'soon'"],
    "market.spot_usd_per_gpu_hour=-1": ["prices", "spot_usd_per_gpu_hour", "got -1"],
    "prices=catalog": ["market.zone", "us-central1-a"],
    "explore.sync=foo": ["explore.sync", "'foo'"],
    "explore.sync=replay": ["explore.replay_from", "None"],
    "explore.replay_from=/nowhere": ["explore.replay_from=/nowhere", "explore.sync=await"],
    "explore.previews=[2]": ["explore.previews", "divisors of steps=3", "got (2,)"],
    "explore.previews=[0]": ["explore.previews.0", "got 0"],
    "planner.seeds_per_prompt=0": ["planner.seeds_per_prompt", "got 0"],
    "model.path=/nowhere": ["model.path=/nowhere"],
    "model.stored_dtype=float8": ["model.stored_dtype", "'float8'"],
}


def test_a_compiled_model_is_not_shared(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.compile cannot be combined with cluster\.sp_degree=2"):
        configuration(tmp_path, *TINY, EXPLORED, "cluster.sp_degree=2", "model.compile=true")


def test_places_are_grouped_inside_nodes_first_and_who_is_left_over_is_in_no_team(tmp_path):
    def teams(*overrides: str) -> dict[tuple[str, int], str]:
        return spot_teams(configuration(tmp_path, *TINY, EXPLORED, *overrides))

    assert teams("cluster.spot_workers=4") == {}
    pair = {("local", 0): "sp0", ("local", 1): "sp0"}
    assert teams("cluster.spot_workers=3", "cluster.sp_degree=2") == pair
    market = ("market=replay", "market.nodes=3", "cluster.sp_degree=2")
    replayed = build_market(configuration(tmp_path, *TINY, EXPLORED, *market))
    assert replayed is not None
    one, two, three = sorted(replayed.nodes)
    assert teams(*market) == {(one, 0): "sp0", (two, 0): "sp0"}
    assert teams(*market, "cluster.workers_per_node=3") == {
        **{(node, slot): f"sp{number}" for number, node in enumerate((one, two, three)) for slot in range(2)},
        **{(one, 2): "sp3", (two, 2): "sp3"},
    }


@pytest.mark.parametrize("override", BAD_VALUES)
def test_a_bad_value_is_refused_in_one_line_before_anything_starts(tmp_path, override):
    with pytest.raises(ConfigError) as refused:
        configuration(tmp_path, *TINY, EXPLORED, override)
    message = str(refused.value)
    assert [text for text in BAD_VALUES[override] if text not in message] == []
    assert "\n" not in message


BAD_MARKETS = {
    "market.nodes=0": ["market", "nodes must be within 1..", "got 0"],
    "market.trace=/nowhere.csv": ["market", "/nowhere.csv"],
    "market.time_scale=0": ["market", "time_scale", "got 0"],
    "market.grace_s=-1": ["market.grace_s", "got -1"],
    "market.trace=${paths.root_dir}/conf/train.yaml": ["market", "conf/train.yaml:1"],
}


@pytest.mark.parametrize("override", BAD_MARKETS)
def test_a_bad_market_is_refused_in_one_line_before_anything_starts(tmp_path, override):
    with pytest.raises(ConfigError) as refused:
        configuration(tmp_path, *TINY, EXPLORED, "market=replay", override)
    message = str(refused.value)
    assert [text for text in BAD_MARKETS[override] if text not in message] == []
    assert "\n" not in message


BAD_VIRTUAL = {
    "cluster.device=tpu": ["cluster.device", "got 'tpu'"],
    "cluster.sp_degree=8": ["cluster.sp_degree", "within 1..4", "got 8"],
    "cluster.gpus_per_node=0": ["cluster.gpus_per_node", "got 0"],
    "parallel=ulysses": ["parallel", "single"],
    "ckpt_path=last": ["ckpt_path=last", "cannot be gone on with"],
    "~workload": ["workload"],
}


@pytest.mark.parametrize("override", BAD_VIRTUAL)
def test_what_a_virtual_cluster_cannot_do_is_refused_in_one_line(tmp_path, override):
    with pytest.raises(ConfigError) as refused:
        configuration(tmp_path, *TINY, EXPLORED, "cluster=virtual", override)
    message = str(refused.value)
    assert [text for text in BAD_VIRTUAL[override] if text not in message] == []
    assert "\n" not in message


def test_the_market_decides_how_many_spot_workers_there_are(tmp_path):
    assert spot_places(configuration(tmp_path, *TINY, EXPLORED, "cluster.spot_workers=3")) == 3
    market = ("market=replay", "market.nodes=5", "cluster.workers_per_node=2")
    assert spot_places(configuration(tmp_path, *TINY, EXPLORED, *market)) == 10


def test_a_window_must_fit_the_steps(tmp_path):
    for override, named in (("algo.window.size=4", "size must be in 1..high-low=3"), ("algo.window.high=6", "high")):
        with pytest.raises(ConfigError, match=rf"algo\.window: .*{named}"):
            configuration(tmp_path, *TINY, "algo=flow_grpo_fast", "algo.steps=6", override)


LATE = {
    "+algo.optimizer.lrr=1": ["algo.optimizer", "lrr"],
    "algo.optimizer.lr=-1": ["algo.optimizer", "-1"],
    "algo.noise_level=-1": ["algo.rule", "noise_level", "got -1"],
    "algo.loss.clip_range=-1": ["algo.loss", "clip_range", "got -1"],
    "algo.old_logprob=maybe": ["algo.old_logprob", "'maybe'"],
    "callbacks.evaluate.every=0": ["callbacks.evaluate.every", "got 0"],
    "+callbacks.evaluate.evry=3": ["callbacks.evaluate", "evry"],
    "model.lora={rank: 0, alpha: 1, target_modules: [to_q]}": ["model.lora", "rank", "got 0"],
    "model.lora={rank: 1, alpha: 1, target_modules: [nothing]}": ["model.lora", "nothing"],
    "model.lora={rank: 1}": ["model.lora", "alpha"],
    "parallel.strategy.warmup_updates=-1": ["warmup_updates", "got -1"],
    "reward.reward.recogniser.folder=/nowhere": ["reward.reward", "/nowhere"],
}


@pytest.mark.parametrize("override", LATE)
def test_what_only_the_training_rank_can_refuse_names_its_key_too(inline, override):
    with pytest.raises(ValueError, match=r".") as refused:
        inline(override)
    assert [text for text in LATE[override] if text not in str(refused.value)] == []


def test_the_stand_in_for_the_hub_takes_what_it_stands_for():
    real, stand_in = (inspect.signature(each).parameters for each in (load.load_schedule, published_schedule))
    assert [*real] == [*stand_in]
