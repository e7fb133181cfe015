"""The experiments of published models, two iterations each, with tiny random weights in their place.

First in one process; then, for each family, as a whole job whose two ranks share every sequence.
"""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from src.app import generate
from src.app.config import ConfigError, check_resumed
from src.app.export import reward_name
from tests.app import processes
from tests.app.runs import ROOT, Run, run_inline
from tests.models import published
from tests.rewards.tiny_weights import save_clip, save_detector

FAMILY = {
    "qwen_image_ocr": "qwen_image",
    "qwen_image_geneval": "qwen_image",
    "sd3_ocr": "sd3",
    "sd3_geneval": "sd3",
    "flux_pickscore": "flux",
}
SMALL = (
    "debug=fast",
    "trainer.accelerator=cpu",
    "data.prompts_per_iteration=2",
    "data.eval_prompts=2",
    "algo.group_size=2",
    "algo.eval_steps=2",
    "algo.ema.every=1",
    "planner.seeds_per_prompt=3",
    "model.load.height=32",
    "model.load.width=48",
    "model.load.prompt_tokens=160",
    "model.lora.rank=4",
    "model.lora.alpha=8",
    "model.batch_size=3",
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models that the experiments name, tiny."""
    root = tmp_path_factory.mktemp("weights")
    for family in published.FAMILIES:
        published.save(family, root / family)
    save_clip(root / "clip", list(published.PROMPTS))
    save_detector(root / "detector", classes=80)
    (root / "train.txt").write_text("\n".join(published.PROMPTS))
    return root


def overrides(experiment: str, weights: Path) -> list[str]:
    """The experiment with tiny weights."""
    chosen = [f"model.path={weights / FAMILY[experiment]}", f"+reward.judge.model={weights / 'clip'}"]
    if experiment.endswith("geneval"):
        chosen += [
            f"+reward.reward.reward.detector={weights / 'detector'}",
            f"+reward.reward.reward.colors={weights / 'clip'}",
        ]
    if experiment.endswith("ocr"):
        chosen += ["reward.reward.processes=1", f"+reward.judge.processor={weights / 'clip'}"]
    if experiment.endswith("geneval"):
        chosen += [f"+reward.judge.processor={weights / 'clip'}"]
    if experiment == "flux_pickscore":
        chosen += [f"+reward.reward.model={weights / 'clip'}", f"+reward.reward.processor={weights / 'clip'}"]
        chosen += [f"data.task.{which}={weights / 'train.txt'}" for which in ("train", "heldout")]
    return chosen


def test_these_are_all_experiments_of_published_models() -> None:
    """Whatever trains a published model is run below."""
    families = {f"/model: {family}\n" for family in published.FAMILIES}
    files = (ROOT / "conf" / "experiment").glob("*.yaml")
    assert {file.stem for file in files if any(family in file.read_text() for family in families)} == set(FAMILY)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["reward=ocr"], "ocr"),
        (["reward=pickscore"], "pick_score"),
        (["reward=ocr_and_pickscore"], "ocr + pick_score"),
        (["reward=function", "reward.reward.function.path=my_rewards.score"], "my_rewards.score"),
    ],
)
def test_the_card_calls_the_reward_by_its_name(overrides: list[str], name: str) -> None:
    assert reward_name(generate.composed(["experiment=sd3_ocr", *overrides])["reward"]["reward"]) == name


def test_a_run_goes_on_with_a_model_that_was_moved_and_not_with_other_images(tmp_path: Path) -> None:
    earlier = tmp_path / "config.yaml"
    earlier.write_text(yaml.safe_dump(generate.composed(["experiment=sd3_ocr", "model.path=here/sd3"])))
    assert check_resumed(generate.composed(["experiment=sd3_ocr", "model.path=there/sd3"]), earlier, ()) == ()
    with pytest.raises(ConfigError, match=r"model\.load\.height is 1280, the checkpoint was made with 512"):
        check_resumed(generate.composed(["experiment=sd3_ocr", "model.load.height=1280"]), earlier, ())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("experiment", FAMILY)
def test_an_experiment_runs_and_its_adapter_loads_in_plain_diffusers(
    tmp_path: Path, weights: Path, experiment: str
) -> None:
    run = run_inline(tmp_path / "run", f"experiment={experiment}", *SMALL, *overrides(experiment, weights))
    assert [row["step"] for row in run.metrics if "train/reward" in row] == [1, 2]
    assert run.metric("explore/explored") == [6]
    assert run.metric("train/failed_samples") == [0, 0]
    first = run.metric("train/ratio_first")
    assert first or experiment.startswith("qwen")  # random images all read as nothing: equal rewards teach nothing
    assert first == pytest.approx([1.0] * len(first), abs=1e-5)
    check_export(run, weights / FAMILY[experiment])


def preferring(weights: Path, reward: str, section: str) -> list[str]:
    """A reward that differs between images of random weights, which all read as nothing: PickScore."""
    clip, judge = weights / "clip", f"+reward.judge.model={weights / 'clip'}"
    return [f"reward={reward}", f"+{section}.model={clip}", f"+{section}.processor={clip}", judge]


SHARED = {
    "qwen_image_ocr": ("ocr_and_pickscore", "reward.reward.terms.pick_score.reward"),
    "sd3_geneval": ("pickscore", "reward.reward"),
    "flux_pickscore": ("pickscore", "reward.reward"),
}
"""An experiment of each family, and what it is rewarded for here."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("experiment", SHARED)
def test_two_ranks_that_share_sequences_train_each_family(tmp_path: Path, weights: Path, experiment: str) -> None:
    """A job with a spot worker that explores, an adapter that plain diffusers loads, and images before and after."""
    base = weights / FAMILY[experiment]
    chosen = [f"model.path={base}", *preferring(weights, *SHARED[experiment])]
    if experiment.endswith("ocr"):
        chosen += ["reward.reward.terms.ocr.reward.processes=1"]
    if experiment == "flux_pickscore":
        chosen += [f"data.task.{which}={weights / 'train.txt'}" for which in ("train", "heldout")]
    ranks = ("parallel=ulysses", "trainer.devices=2", "parallel.sp_degree=2")
    workers = ("cluster.spot_workers=1", "cluster.spares=0", processes.EAGER)
    folder = tmp_path / "run"
    done = processes.train(folder, f"experiment={experiment}", *SMALL, *chosen, *ranks, *workers, timeout_s=800)
    assert done.returncode == 0, done.stderr
    run = Run(folder)
    reserved = [event for event in run.events("worker_joined") if event["role"] == "reserved"]
    assert [" sp2 " in event["fingerprint"] for event in reserved] == [True], "two ranks are one worker"
    assert run.metric("explore/explored") == [6]
    assert run.metric("train/failed_samples") == [0, 0]
    if experiment == "qwen_image_ocr":
        assert all(len(run.metric(f"train/reward/{term}")) == 2 for term in ("ocr", "pick_score"))
    first = run.metric("train/ratio_first")
    assert first == pytest.approx([1.0, 1.0], abs=1e-5)
    assert any(tensor.abs().max() > 0 for name, tensor in run.policy.items() if "lora_B" in name), "it was trained"
    check_export(run, base)
    pictures = tmp_path / "pictures"
    generate.main(["--run", str(folder), "--prompt", published.PROMPTS[0], "--steps", "2", "--out", str(pictures)])
    both = np.asarray(Image.open(pictures / "000_seed0.png"))
    assert both.shape == (32, 2 * 48 + generate.GAP, 3)
    assert not np.array_equal(both[:, :48], both[:, -48:]), "before and after"


def check_export(run: Run, base: Path) -> None:
    """The card is there, and the weights that diffusers loads are those of the last checkpoint."""
    card = (run.folder / "README.md").read_text()
    assert "rank 4, alpha 8" in card
    assert str(base) in card
    pipeline = diffusers.DiffusionPipeline.from_pretrained(base)
    pipeline.load_lora_weights(run.folder)
    loaded = {name.replace(".default_0.", "."): p for name, p in pipeline.transformer.named_parameters()}
    for name, trained in run.policy.items():
        assert torch.equal(loaded[name.replace(".default.", ".")], trained), name
    average = load_file(run.folder / "ema" / "pytorch_lora_weights.safetensors")
    assert len(average) == len(run.policy)
    assert all(tensor.dtype is torch.float32 for tensor in average.values())
    assert not json.loads((base / "model_index.json").read_text())["_class_name"].startswith("Tiny")
