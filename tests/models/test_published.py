"""Adapters of published models against diffusers' own pipelines, on tiny random weights in the real folder format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from src.core.types import SampleSpec
from src.models.adapter import DiTAdapter
from src.models.load import load_adapter, load_schedule
from src.models.noise import initial_noise_for
from src.models.packing import pack, unpack
from src.models.sampler import log_probs_at
from src.models.schedule import Schedule
from tests.models import published
from tests.models.cases import CASES, opened, pipeline_latents, sampler_of
from tests.models.published import PROMPTS

SIZES = [(32, 32), (64, 32)]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("family", CASES)
def test_the_sampler_and_diffusers_pipeline_make_the_same_image(
    folders: dict[str, Path], family: str, height: int, width: int
) -> None:
    """The same noise through the same steps: latents agree to rounding, images to one level."""
    adapter, seeds, prompts = opened(folders, family, height, width), [3, 4], PROMPTS[:2]
    ours = sampler_of(folders, adapter, family).sample(
        seeds, adapter.encode(prompts), SampleSpec(4, guidance_scale=CASES[family].guidance)
    )
    images = adapter.decode(ours.latents_BLC)

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folders[family])
    pipeline.set_progress_bar_config(disable=True)
    for row, seed in enumerate(seeds):
        noise_BLC = initial_noise_for([seed], adapter.latent_shape)
        asked = {
            "prompt": prompts[row],
            "height": height,
            "width": width,
            "num_inference_steps": 4,
            "latents": pipeline_latents(family, noise_BLC, height, width),
            "max_sequence_length": CASES[family].tokens,
            **CASES[family].call,
        }
        theirs = pipeline(**asked, output_type="latent").images
        theirs_BLC = pack(theirs) if family == "sd3" else theirs
        torch.testing.assert_close(ours.latents_BLC[row : row + 1], theirs_BLC, rtol=1e-4, atol=2e-5)
        image = np.asarray(pipeline(**asked).images[0])
        assert image.shape == (height, width, 3)
        assert np.abs(images[row].astype(int) - image).max() <= 1
        assert (images[row] == image).mean() > 0.99


OTHER_SCHEDULERS: dict[str, dict[str, Any]] = {
    "qwen_image": {"shift": 1.7, "use_dynamic_shifting": False, "shift_terminal": None},
    "sd3": {"use_dynamic_shifting": True, "base_shift": 0.3, "max_shift": 0.8, "max_image_seq_len": 300},
    "flux": {"shift": 1.0, "use_dynamic_shifting": False},  # as FLUX.1-schnell has it
}


@pytest.mark.parametrize("family", CASES)
def test_the_noise_schedule_is_that_of_the_model_folder(tmp_path: Path, folders: dict[str, Path], family: str) -> None:
    """Of another model of the family, too: what its pipeline runs."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folders[family])
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(
        pipeline.scheduler.config, **OTHER_SCHEDULERS[family]
    )
    pipeline.save_pretrained(tmp_path)
    usual, other = (load_schedule(folder, height=64, width=32)(3) for folder in (folders[family], tmp_path))
    assert usual != other
    size = {"height": 64, "width": 32, "num_inference_steps": 3, "output_type": "latent"}
    pipeline(PROMPTS[0], **size, **CASES[family].call, max_sequence_length=CASES[family].tokens)
    assert other.sigmas == pytest.approx(pipeline.scheduler.sigmas.tolist(), abs=1e-6)


def test_a_scheduler_that_is_not_known_is_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text((folders["flux"] / "model_index.json").read_text())
    file = tmp_path / "scheduler" / "scheduler_config.json"
    for content, message in (
        ('{"time_shift_type": "linear"}', "time_shift_type=exponential is known, got linear"),
        ('{"shift": 0}', "shift must be positive"),
        ("[]", "scheduler_config.json: "),
        ("no JSON", "scheduler_config.json: "),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_schedule(tmp_path, height=32, width=32)
    file.unlink()
    with pytest.raises(ValueError, match=r"scheduler_config\.json: .*No such file"):
        load_schedule(tmp_path, height=32, width=32)


def test_packing_is_that_of_diffusers() -> None:
    latents = torch.randn(2, 3, 8, 4)
    packed = diffusers.FluxPipeline._pack_latents(latents, 2, 3, 8, 4)
    assert torch.equal(pack(latents), packed)
    assert torch.equal(unpack(packed, rows=4, columns=2), latents)


@pytest.mark.parametrize("family", CASES)
def test_samples_do_not_depend_on_their_batch(folders: dict[str, Path], family: str) -> None:
    adapter = opened(folders, family, 64, 32)
    sampler, spec = sampler_of(folders, adapter, family), SampleSpec(4, (1, 2), CASES[family].guidance)
    together = sampler.sample([1, 2, 3], adapter.encode(PROMPTS[:3]), spec)
    for row in range(3):
        alone = sampler.sample([row + 1], adapter.encode([PROMPTS[row]]), spec)
        assert torch.equal(alone.latents_BLC[0], together.latents_BLC[row])
        assert np.array_equal(adapter.decode(alone.latents_BLC)[0], adapter.decode(together.latents_BLC)[row])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CASES)
def test_the_replay_in_training_has_the_rollouts_log_probs(
    folders: dict[str, Path], family: str, dtype: str, checkpointing: bool
) -> None:
    """Ratio 1, to the last bit, also in bf16 and with activations computed anew; and a gradient arrives."""
    adapter = opened(folders, family, 32, 64, dtype=dtype, gradient_checkpointing=checkpointing)
    spec, cond = SampleSpec(4, (0, 2), CASES[family].guidance), adapter.encode(PROMPTS[:2])
    sampler = sampler_of(folders, adapter, family)
    path = sampler.sample([8, 9], cond, spec).trajectory
    schedule: Schedule = sampler.schedule_for(4)
    for slot, step in enumerate(spec.stochastic_steps):
        replayed, _ = log_probs_at(
            adapter,
            sampler.rule,
            schedule,
            path.before_BSLC[:, slot],
            path.after_BSLC[:, slot],
            torch.tensor([step, step]),
            cond,
            guidance_scale=spec.guidance_scale,
        )
        assert replayed.dtype == torch.float32
        assert torch.equal(replayed, path.log_probs_BS[:, slot])
    replayed.sum().backward()
    gradients = [p.grad for p in adapter.transformer.parameters() if p.grad is not None]
    assert gradients
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_guidance_of_flux_is_an_input_where_the_model_has_one(tmp_path: Path, folders: dict[str, Path]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        published.flux(guidance_embeds=False).save_pretrained(tmp_path)
    dev, schnell = opened(folders, "flux", 32, 32), load_adapter(tmp_path, dtype="float32", height=32, width=32)
    noise, sigma = initial_noise_for([1], dev.latent_shape), torch.tensor([0.7])

    def velocity(adapter: DiTAdapter, scale: float) -> torch.Tensor:
        return adapter.velocity(noise, sigma, adapter.encode(PROMPTS[:1]), guidance_scale=scale)

    assert not torch.allclose(velocity(dev, 1.0), velocity(dev, 3.5))
    plain, half, double = (velocity(schnell, scale) for scale in (1.0, 0.0, 2.0))
    torch.testing.assert_close(double - plain, plain - half, rtol=1e-3, atol=1e-5)  # linear in the scale: true CFG


@pytest.mark.parametrize("family", CASES)
def test_frozen_parts_rest_in_host_memory_and_work_all_the_same(folders: dict[str, Path], family: str) -> None:
    resident, resting = opened(folders, family, 32, 32), opened(folders, family, 32, 32, offload=True)
    for adapter in (resident, resting):
        adapter.to(torch.device("cpu"))
    assert torch.equal(resident.encode(PROMPTS[:1]).embeds_BSD, resting.encode(PROMPTS[:1]).embeds_BSD)
    latents = initial_noise_for([1, 2, 3], resident.latent_shape)
    assert np.array_equal(resident.decode(latents), resting.decode(latents))
    assert not any(p.requires_grad for p in resident.prompt_encoder.pipeline.text_encoder.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", CASES)
def test_images_are_decoded_in_batches_and_tiles(folders: dict[str, Path], family: str) -> None:
    plain = opened(folders, family, 64, 32)
    latents = initial_noise_for([1, 2, 3], plain.latent_shape)
    batched = opened(folders, family, 64, 32, vae_batch=2).decode(latents)
    assert batched.shape == (3, 64, 32, 3)
    assert np.abs(batched.astype(int) - plain.decode(latents)).max() <= 1
    assert opened(folders, family, 64, 32, vae_tiled=True).decode(latents).shape == (3, 64, 32, 3)
