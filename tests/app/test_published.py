"""The experiments of published models, two iterations each, with tiny random weights in their place."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

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
            f"+reward.reward.detector.model={weights / 'detector'}",
            f"+reward.reward.colors.model={weights / 'clip'}",
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
