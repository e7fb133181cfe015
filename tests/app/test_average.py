"""Evaluation of the running average of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.app.config import ConfigError, build, task
from src.app.engine import RolloutEngine
from src.app.sampling import build_rank_engine
from src.core import seeds
from src.core.stats import mean
from src.core.types import PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleSpec
from tests.app.runs import EXPLORED, TINY, Run, configuration, run_inline
from tests.app.test_ranks import ULYSSES, train

EMA = "algo.ema={_target_: src.rl.ema.EMA, decay: 0.5, every: 1}"
CHOSEN = ("trainer.max_steps=2", "callbacks.evaluate.every=1", "algo.optimizer.lr=0.002", "algo.warmup_updates=0", EMA)
AVERAGE = "callbacks.evaluate.average=true"
BRIGHTNESS = ("~reward.reward", "+reward.reward={_target_: src.rl.rewards.brightness.BrightnessReward}")
"""A reward that rounding moves by next to nothing."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same run, with its weights evaluated and with their average."""
    root = tmp_path_factory.mktemp("runs")
    plain = run_inline(root / "run", *TINY, EXPLORED, *CHOSEN)
    return plain, run_inline(root / "average" / "run", *TINY, EXPLORED, *CHOSEN, AVERAGE)


def heldout_reward(folder: Path, weights, *overrides: str) -> float:
    """The mean reward of held-out images that a model of its own makes with the given weights."""
    config = configuration(folder, *TINY, EXPLORED, *CHOSEN, *overrides)
    _, engine = build_rank_engine(config)
    sampler = engine._sampler
    sampler.adapter.load_trainable_state(weights)
    spec = SampleSpec(steps=config["algo"]["eval_steps"], guidance_scale=config["algo"]["guidance_scale"])
    requests = [
        SampleRequest(
            RequestKey("r", 0, RequestKind.EVAL, i, seeds.eval_seed(i), PolicyVersion(0, 0), spec.steps), prompt, spec
        )
        for i, prompt in enumerate(task(config).heldout_prompts[: config["data"]["eval_prompts"]])
    ]
    again = RolloutEngine(
        sampler=sampler, reward=build(config["reward"]["reward"], ""), judge=build(config["reward"]["judge"], "")
    )
    return mean([result.reward for result in again.serve(requests, "here")[0]])


def test_the_average_is_what_is_evaluated(runs: tuple[Run, Run], tmp_path: Path) -> None:
    plain, averaged = runs
    tensors = averaged.checkpoint.tensors
    assert averaged.metric("eval/reward")[-1] == pytest.approx(heldout_reward(tmp_path / "a", tensors["ema"]), abs=1e-6)
    assert plain.metric("eval/reward")[-1] == pytest.approx(heldout_reward(tmp_path / "p", tensors["policy"]), abs=1e-6)
    assert averaged.metric("eval/reward")[1:] != plain.metric("eval/reward")[1:]
    assert averaged.metric("eval/reward")[0] == plain.metric("eval/reward")[0], "they begin equal"


def test_training_is_untouched_by_it(runs: tuple[Run, Run]) -> None:
    plain, averaged = runs
    assert all((plain.policy[name] == tensor).all() for name, tensor in averaged.policy.items())
    assert len(plain.metric("train/reward")) == 2
    assert plain.metric("train/reward") == averaged.metric("train/reward")


def test_workers_know_it_as_a_version_before_the_weights(runs: tuple[Run, Run]) -> None:
    published = [event["version"] for event in runs[1].events("policy_published")]
    assert published == ["0.0.average", "0.0", "0.1.average", "0.1", "0.2.average"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ranks",
    [("parallel.sp_degree=2",), ("parallel.sp_degree=1", "parallel.strategy.stage=1")],
    ids=["shared sequences", "shared batches"],
)
def test_several_ranks_evaluate_it_and_train_on(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    """Every rank makes its part of the held-out images with the average, and has its own weights back afterwards."""
    chosen = (*CHOSEN, *BRIGHTNESS, ULYSSES, "trainer.devices=2", *ranks)
    plain = train(tmp_path / "plain", *chosen)
    averaged = train(tmp_path / "run", *chosen, AVERAGE)
    policy, average = (averaged.checkpoint.tensors[name] for name in ("policy", "ema"))
    told, of_policy = averaged.metric("eval/reward")[-1], plain.metric("eval/reward")[-1]
    assert told == pytest.approx(heldout_reward(tmp_path / "a", average, *BRIGHTNESS), abs=1e-4)
    assert of_policy == pytest.approx(heldout_reward(tmp_path / "p", plain.policy, *BRIGHTNESS), abs=1e-4)
    assert abs(told - of_policy) > 1e-3, "either would pass"
    assert averaged.metric("train/reward") == pytest.approx(plain.metric("train/reward"), abs=1e-4)
    assert all((plain.policy[name] - tensor).abs().max() < 1e-5 for name, tensor in policy.items())


def test_without_an_average_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"average=true needs a running average, got algo\.ema=null"):
        configuration(tmp_path, *TINY, AVERAGE)
