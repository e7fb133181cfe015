"""The options of the algorithm, each in a run of a few iterations."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from src.app.build import trusts
from src.core.types import RequestKind, SampleRequest
from src.models.blobs import from_blob, to_blob
from tests.app.runs import EXPLORED, Run, assert_same_run

CHUNKS = "algo.micro_batch=5"


@pytest.mark.parametrize("updates", [1, 2])
def test_steps_count_iterations_and_not_optimizer_updates(inline, updates):
    run = inline("trainer.max_steps=3", f"algo.updates={updates}", "algo.warmup_updates=0")
    assert [row["step"] for row in run.metrics if "train/reward" in row] == [1, 2, 3]
    assert [row["step"] for row in run.metrics if "eval/reward" in row] == [0, 1, 2, 3]
    assert run.metric("train/updates") == [updates] * 3
    assert run.checkpoint.state["iteration"] == 3
    (steps,) = {float(value) for name, value in run.checkpoint.tensors["optimizer"].items() if "step/" in name}
    assert steps == 3 * updates


def test_a_run_learns_what_is_rewarded(inline):
    """The digits become brighter; a twelfth of the way in six iterations, where the sign of the gradient is right."""
    run = inline(*brightness(0.0), "trainer.max_steps=6", "algo.optimizer.lr=2.0e-3", "algo.warmup_updates=0")
    before, *_, after = run.metric("eval/reward")
    assert after > before + 0.1
    assert run.metric("train/reward")[-1] > run.metric("train/reward")[0] + 0.1
    assert all(norm > 0 for norm in run.metric("train/grad_norm"))


def test_the_ratio_before_the_first_update_is_one(plain: Run):
    assert plain.metric("train/ratio_first") == pytest.approx([1.0] * 4, abs=1e-6)
    assert plain.metric("train/ratio_rollout") == [1.0] * 4
    assert plain.metric("train/recomputed") == [0.0] * 4
    assert max(plain.metric("train/ratio")) != 1.0


def test_micro_batches_change_no_gradient(inline, plain: Run):
    run = inline("trainer.max_steps=4", CHUNKS)
    assert run.metric("train/grad_norm")[0] == pytest.approx(plain.metric("train/grad_norm")[0], rel=1e-4)


# ---------------------------------------------------------------- old log-probabilities


class Foreign:
    """An engine of other arithmetic, whose log-probabilities are off by 0.1."""

    fingerprint = "foreign"

    def __init__(self, engine) -> None:
        self._engine = engine
        self.batch_size = engine.batch_size
        self.load_weights = engine.load_weights

    def serve(self, requests, worker, **how):
        results, report = self._engine.serve(requests, worker, **how)
        return [self._foreign(result) for result in results], report

    def _foreign(self, result):
        if result.trajectory is None:
            return result
        log_probs_S = to_blob(from_blob(result.trajectory.log_probs_S) + 0.1)
        trajectory = replace(result.trajectory, log_probs_S=log_probs_S, fingerprint="foreign")
        return replace(result, trajectory=trajectory)


def test_foreign_log_probs_are_recomputed(inline, plain: Run):
    run = inline("trainer.max_steps=4", "algo.old_logprob=auto", trainer_engine=Foreign)
    assert run.metric("train/recomputed") == [12.0] * 4
    assert run.metric("train/ratio_rollout") == pytest.approx([np.exp(-0.1)] * 4, rel=1e-5)
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 4, abs=1e-6)
    assert run.metric("train/reward")[0] == plain.metric("train/reward")[0]


def test_rollout_trusts_all_log_probs(inline):
    run = inline("algo.old_logprob=rollout", trainer_engine=Foreign)
    assert run.metric("train/recomputed") == [0.0] * 2
    assert run.metric("train/ratio_rollout") == [1.0] * 2
    assert run.metric("train/ratio_first") == pytest.approx([np.exp(-0.1)] * 2, rel=1e-5)


def test_recompute_trusts_none(inline):
    run = inline("algo.old_logprob=recompute")
    assert run.metric("train/recomputed") == [12.0] * 2
    assert run.metric("train/ratio_rollout") == pytest.approx([1.0] * 2, abs=1e-6)
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=1e-6)


def test_in_half_precision_passes_of_other_shapes_are_not_trusted():
    assert trusts("auto", "here", replays_alike=True)("here")
    assert not trusts("auto", "here", replays_alike=True)("there")
    assert not trusts("auto", "here", replays_alike=False)("here")
    assert trusts("rollout", "here", replays_alike=False)("there")


# ---------------------------------------------------------------- rewards


def test_the_terms_of_a_sum_and_the_judge_are_told(inline):
    bright = "{_target_: src.rl.rewards.combine.Term, weight: 2.0, offset: 0.5, reward: {_target_: %s}}"
    terms = bright % "src.rl.rewards.brightness.BrightnessReward"
    weighted = f"+reward.reward={{_target_: src.rl.rewards.combine.WeightedSum, terms: {{bright: {terms}}}}}"
    run = inline("~reward.reward", weighted)
    for phase in ("train", "eval"):
        told = run.metric(f"{phase}/reward/bright")
        assert run.metric(f"{phase}/reward") == pytest.approx([2 * (score - 0.5) for score in told], abs=1e-6)
        assert len(run.metric(f"{phase}/judge")) == len(told) >= 2


# ---------------------------------------------------------------- sampling


def test_guidance(inline, plain: Run):
    run = inline("algo.guidance_scale=2", "algo.micro_batch=7")
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=1e-6)
    assert run.metric("eval/reward")[0] != plain.metric("eval/reward")[0]
    assert run.metric("train/grad_norm")[0] > 0


def test_cps(inline, plain: Run):
    run = inline("algo=flow_cps")
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=1e-6)
    assert run.metric("train/reward") != plain.metric("train/reward")[:2]
    assert run.metric("eval/reward")[0] == plain.metric("eval/reward")[0]  # held-out images take no noise


def test_a_random_window_is_shared_and_moves(inline):
    Recorder.served.clear()
    run = inline(
        "algo=flow_grpo_fast",
        "algo.steps=6",
        "algo.window.size=2",
        "algo.window.high=5",
        "trainer.max_steps=4",
        trainer_engine=Recorder,
        worker_engine=Recorder,
    )
    windows = [set() for _ in range(4)]
    for request in Recorder.served:
        if request.key.kind is not RequestKind.EVAL:
            windows[request.key.iteration].add(request.spec.stochastic_steps)
    assert [len(window) for window in windows] == [1] * 4  # rollouts, audits and explorations alike
    assert len(set().union(*windows)) > 1
    trained = {name for row in run.metrics for name in row if name.startswith("train/delta_log_prob/")}
    assert len(trained) > 2
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 4, abs=1e-6)


class Recorder:
    """Remembers what it was asked for."""

    served: ClassVar[list[SampleRequest]] = []

    def __init__(self, engine) -> None:
        self._engine = engine
        self.batch_size = engine.batch_size
        self.fingerprint = engine.fingerprint
        self.load_weights = engine.load_weights

    def serve(self, requests, worker, **how):
        Recorder.served += requests
        return self._engine.serve(requests, worker, **how)


# ---------------------------------------------------------------- advantages

BATCH_STD = "algo.advantage.spread.path=src.rl.advantages.batch_std"


@pytest.mark.parametrize("option", ["algo.advantage.before_selection=true", BATCH_STD], ids=["before", "batch"])
def test_options_of_the_advantage(inline, plain: Run, option):
    run = inline("trainer.max_steps=2", option)
    assert run.metric("train/reward")[0] == plain.metric("train/reward")[0]
    assert any(not run.policy[name].equal(tensor) for name, tensor in inline().policy.items())
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=1e-6)


# ---------------------------------------------------------------- samples that fail


def brightness(darkest: float) -> tuple[str, ...]:
    reward = f"{{_target_: tests.app.rewards.Brightness, darkest: {darkest}}}"
    return ("~reward.reward", f"+reward.reward={reward}")


def test_samples_that_cannot_be_scored_leave_their_group(inline):
    every = inline(*brightness(0.0), "trainer.max_steps=3")
    assert every.metric("train/failed_samples") == [0.0] * 3
    rewards = sorted(row["reward"] for event in every.events("explored") for row in event["results"])
    darkest = rewards[len(rewards) // 4] - 1 + 1e-6
    run = inline(*brightness(darkest), "trainer.max_steps=3")
    failed = run.metric("train/failed_samples")
    assert sum(failed) > 0
    assert run.metric("train/samples") == [12 - count for count in failed]
    assert min(run.metric("train/reward")) >= 1 + darkest
    explored = [row["reward"] for event in run.events("explored") for row in event["results"]]
    assert min(explored) >= 1 + darkest  # never a reward of 0
    assert run.metric("explore/explored")[0] < run.metric("explore/requested")[0] == 24
    failures = run.events("request_failed")
    assert {event["request_kind"] for event in failures} >= {"rollout", "explore"}
    assert all("too dark" in event["error"] for event in failures)
    assert sum(run.metric("eval/failed")) == sum(event["request_kind"] == "eval" for event in failures)


def test_a_scorer_that_is_down_ends_the_run(inline):
    with pytest.raises(RuntimeError, match=r"all 8 held-out samples failed.*too dark"):
        inline(*brightness(2.0))


# ---------------------------------------------------------------- images


def test_held_out_images_are_in_the_folder(plain: Run):
    manifest = json.loads((plain.folder / "images" / "manifest.json").read_text())
    assert {(entry["iteration"], entry["index"]) for entry in manifest} == {
        (iteration, index) for iteration in range(5) for index in range(4)
    }
    for entry in manifest:
        assert (plain.folder / "images" / entry["file"]).is_file()
        assert 0 <= entry["reward"] <= 1
        assert entry["prompt"].isdigit()


def test_kl_is_measured_from_where_the_run_began(inline, plain: Run):
    assert plain.metric("train/kl") == []  # without weight nobody measures it
    run = inline("algo.loss.kl_weight=0.04", "trainer.max_steps=2", "algo.updates=1")
    first, second = run.metric("train/kl")
    assert first == pytest.approx(0.0, abs=1e-12)
    assert second > 1e-9


# ---------------------------------------------------------------- the family of algorithms


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo=grpo_guard",),
        ("algo=dance_grpo", "algo.steps=4", "algo.eval_steps=4"),
        ("algo=mix_grpo", "algo.window.high=2", "algo.window.size=1", "algo.window.every=1", "algo.trained_steps=1"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_algorithm_trains_and_starts_at_ratio_one(inline, overrides):
    trained = () if any("trained_steps" in text for text in overrides) else ("algo.trained_steps=2",)
    run = inline(*overrides, "algo.steps=3", "algo.eval_steps=3", *trained, *overrides[1:], "trainer.max_steps=2")
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=1e-6)
    assert all(norm > 0 for norm in run.metric("train/grad_norm"))


def test_the_running_average_of_the_weights_survives_a_resume(inline):
    ema = "algo.ema={_target_: src.rl.ema.EMA, decay: 0.5, every: 1}"
    whole = inline("trainer.max_steps=4", ema)
    average, policy = whole.checkpoint.tensors["ema"], whole.policy
    assert average.keys() == policy.keys()
    assert any(not average[name].equal(policy[name]) for name in policy)
    halves = inline("trainer.max_steps=4", ema, stop_after=2)
    halves = inline("trainer.max_steps=4", ema, folder=halves.folder, ckpt_path="last")
    assert_same_run(halves, whole)


# ---------------------------------------------------------------- down-sampling


def test_keeping_some_of_the_rollouts_learns_what_exploring_with_the_same_weights_does(inline):
    """PODS: the seeds that fresh weights would choose, but none of them is made twice."""
    steps = "trainer.max_steps=3"
    fresh = inline(steps, EXPLORED, "callbacks.explore._target_=src.spot.callback.FreshExploration")
    kept = inline(steps, "planner=none", "algo.rollouts_per_prompt=8")
    assert kept.metric("train/samples") == [3 * 4] * 3
    assert kept.metric("train/reward_variance") == pytest.approx(fresh.metric("train/reward_variance"))
    for name, tensor in fresh.policy.items():
        torch.testing.assert_close(kept.policy[name], tensor, rtol=0, atol=1e-5)
    assert sum(event["count"] for event in kept.events("submitted") if event["request_kind"] == "rollout") == 3 * 3 * 8
    random = inline(steps, "planner=none")
    assert kept.metric("train/reward_variance")[0] > random.metric("train/reward_variance")[0]


def test_advantages_before_selection_are_those_of_all_rollouts(inline):
    """A mean over all eight: the kept four do not have to cancel out."""
    run = inline(
        "planner=none", "trainer.max_steps=1", "algo.rollouts_per_prompt=8", "algo.advantage.before_selection=true"
    )
    assert run.metric("train/samples") == [12]
    after = inline("planner=none", "trainer.max_steps=1", "algo.rollouts_per_prompt=8")
    assert run.metric("train/grad_norm") != after.metric("train/grad_norm")
