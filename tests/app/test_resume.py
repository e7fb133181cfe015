"""A run that is resumed from a checkpoint is the run that was never interrupted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.app import callbacks, checkpoint
from src.app.checkpoint import CheckpointError
from src.app.config import CHECKPOINTS, ConfigError, find_checkpoint
from src.app.engine import RolloutEngine
from src.core.types import RequestKind, SampleResult
from tests.app.runs import LORA, Run, assert_same_run, assert_same_tensors, composed

FULL = "model.lora=null"
KL = "algo.loss.kl_weight=0.04"


@pytest.mark.parametrize(
    "overrides", [(FULL,), (FULL, KL), (LORA,), (LORA, KL)], ids=["full", "full-kl", "lora", "lora-kl"]
)
def test_resume_is_bit_equal(inline, plain: Run, overrides):
    whole = plain if overrides == (FULL,) else inline(*overrides, "trainer.max_steps=4")
    first = inline(*overrides, "trainer.max_steps=4", stop_after=2)
    assert [row["step"] for row in first.metrics][-1] == 2
    resumed = inline(*overrides, "trainer.max_steps=4", folder=first.folder, ckpt_path="last")
    assert_same_run(resumed, whole)
    assert [event["incarnation"] for event in resumed.events("run_started")] == [0, 1]
    assert [event["iteration"] for event in resumed.events("evaluated")] == [0, 1, 2, 3, 4]
    manifest = json.loads((resumed.folder / "images" / "manifest.json").read_text())
    assert sorted({entry["iteration"] for entry in manifest}) == [0, 1, 2, 3, 4]
    if KL in overrides:
        assert whole.metric("train/kl")[-1] > 0


@pytest.mark.parametrize("sync", ["race", "await"])
def test_a_replay_that_is_resumed_is_the_replay_that_was_never_interrupted(inline, sync: str):
    """Of a run that lost some of its seeds, and was itself interrupted, so that its log has two incarnations."""
    exploring = ("trainer.max_steps=4", f"explore.sync={sync}")
    first = inline(*exploring, workers=2, worker_engine=Forgetful, stop_after=2)
    source = inline(*exploring, workers=2, worker_engine=Forgetful, folder=first.folder, ckpt_path="last")
    assert [event["version"] for event in source.events("explored")] == ["0.0", "0.1", "1.2"]
    assert 0 < sum(source.metric("explore/explored")) < sum(source.metric("explore/requested"))

    replaying = ("trainer.max_steps=4", "explore.sync=replay", f"explore.replay_from={source.folder}")
    whole = inline(*replaying, workers=0)
    assert_same_tensors(whole.policy, source.policy)
    half = inline(*replaying, workers=0, stop_after=2)
    assert half.metrics[-1]["step"] == 2
    resumed = inline(*replaying, workers=0, folder=half.folder, ckpt_path="last")
    assert [event["incarnation"] for event in resumed.events("run_started")] == [0, 1]
    assert_same_run(resumed, whole)


class Forgetful:
    """The engine of a spot worker that fails to make every third seed it explores."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.fingerprint = engine.fingerprint
        self.batch_size = engine.batch_size
        self.load_weights = engine.load_weights

    def serve(self, requests, worker, **how):
        results, report = self._engine.serve(requests, worker, **how)
        return [self._lost(result) for result in results], report

    def _lost(self, result: SampleResult) -> SampleResult:
        lost = result.key.kind is RequestKind.EXPLORE and result.key.seed % 3 == 0
        return replace(result, error="lost") if lost else result


def test_work_beyond_the_checkpoint_is_done_again(inline, plain: Run):
    """What a kill leaves behind: metrics and images of an iteration that is in no checkpoint."""
    killed = inline("trainer.max_steps=4", "callbacks.checkpoint.every=2", stop_after=3)
    shutil.rmtree(killed.folder / CHECKPOINTS / "iteration_000003")
    resumed = inline("trainer.max_steps=4", folder=killed.folder, ckpt_path="last")
    assert_same_run(resumed, plain)


def test_a_checkpoint_of_another_run_folder_can_be_gone_on_from(inline, plain: Run):
    first = inline("trainer.max_steps=4", stop_after=2)
    resumed = inline("trainer.max_steps=4", ckpt_path=str(first.folder))
    assert_same_tensors(resumed.policy, plain.policy)
    assert resumed.metrics == [row for row in plain.metrics if row["step"] > 2]


def test_the_generators_of_gpus_are_saved_and_put_back(monkeypatch: pytest.MonkeyPatch):
    """As far as a machine without one can tell; tests/gpu has the rest."""
    generators = {0: torch.tensor([1], dtype=torch.uint8), 1: torch.tensor([2], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(generators.values()))
    states = callbacks.random_state()
    assert states.keys() == {"torch", "cuda0", "cuda1"}
    put_back: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # the machine that goes on has one less
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, number: put_back.update({number: int(state)}))
    torch.manual_seed(1)
    callbacks.set_random_state(states)
    assert torch.equal(torch.get_rng_state(), states["torch"])
    assert put_back == {0: 1}


def test_without_a_gpu_the_cpu_s_generator_is_all(inline):
    assert inline().checkpoint.tensors["random"].keys() == {"torch"}


@pytest.fixture
def two_checkpoints(tmp_path: Path, plain: Run) -> Path:
    """A copy of a run folder with two checkpoints."""
    folder = tmp_path / "copy"
    shutil.copytree(plain.folder, folder)
    assert [path.name for path in checkpoint.found(folder / CHECKPOINTS)] == [
        "iteration_000003",
        "iteration_000004",
    ]
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, alter, Path.unlink], ids=["truncated", "altered", "missing"])
@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_by_name(two_checkpoints: Path, name, damage):
    newest = two_checkpoints / CHECKPOINTS / "iteration_000004"
    damage(newest / name)
    with pytest.raises(ConfigError, match=name):
        find_checkpoint(str(newest), two_checkpoints)
    with pytest.raises(CheckpointError, match="iteration_000004"):
        checkpoint.load(newest)
    found, warnings = find_checkpoint("last", two_checkpoints)
    assert found is not None
    assert found.name == "iteration_000003"
    assert len(warnings) == 1
    assert "iteration_000004" in warnings[0]
    assert name in warnings[0]


def test_without_a_good_checkpoint_last_is_refused(two_checkpoints: Path):
    for folder in checkpoint.found(two_checkpoints / CHECKPOINTS):
        alter(folder / "policy.safetensors")
    with pytest.raises(ConfigError, match=r"no good checkpoint.*iteration_000004.*iteration_000003"):
        find_checkpoint("last", two_checkpoints)


def test_another_seed_is_refused(inline):
    first = inline(stop_after=1)
    with pytest.raises(CheckpointError, match="seed=0, this job has seed=1"):
        inline("seed=1", folder=first.folder, ckpt_path="last")


@pytest.mark.parametrize("tuning", [FULL, LORA], ids=["full", "lora"])
def test_another_base_model_is_refused(inline, tmp_path, tuning):
    """Of the same shape: only its weights tell."""
    first = inline(tuning, stop_after=1)
    other = tmp_path / "other_base"
    shutil.copytree(Path(composed().paths.assets_dir) / "tiny_digits", other)
    weights = other / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(CheckpointError, match="base="):
        inline(tuning, f"model.path={other}", folder=first.folder, ckpt_path="last")


def test_only_the_newest_checkpoints_are_kept(inline):
    run = inline("trainer.max_steps=4", "callbacks.checkpoint.keep=1")
    assert [path.name for path in (run.folder / CHECKPOINTS).iterdir()] == ["iteration_000004"]


def test_a_run_that_is_over_stays_as_it_is(inline, tmp_path: Path, plain: Run):
    shutil.copytree(plain.folder, tmp_path / "over")
    again = inline("trainer.max_steps=4", folder=tmp_path / "over", ckpt_path="last")
    assert_same_run(again, plain)


def test_a_run_that_is_over_can_be_made_longer(inline, plain: Run):
    """Its last iteration had no next one to explore for, so the first new one has random seeds."""
    short = inline("trainer.max_steps=2")
    longer = inline("trainer.max_steps=4", folder=short.folder, ckpt_path="last")
    assert [event["iteration"] for event in longer.events("explored")] == [1, 3]
    assert longer.metric("train/reward")[:2] == plain.metric("train/reward")[:2]
    assert len(longer.metric("train/reward")) == 4
