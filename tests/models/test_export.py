"""A trained adapter, saved by us and loaded by plain diffusers."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch

from src.core.types import SampleSpec
from src.models.export import LORA_FILE, save_lora
from src.models.lora import apply_lora
from src.models.noise import initial_noise_for
from src.models.packing import pack
from tests.models.cases import CASES, opened, pipeline_latents, sampler_of
from tests.models.published import PROMPTS

TARGETS = ["attn.to_q", "attn.to_v", "attn.add_k_proj"]


def asked(family: str, latents: torch.Tensor) -> dict[str, object]:
    return {
        "prompt": PROMPTS[0],
        "height": 32,
        "width": 32,
        "num_inference_steps": 4,
        "latents": pipeline_latents(family, latents, 32, 32),
        "max_sequence_length": CASES[family].tokens,
        "output_type": "latent",
        **CASES[family].call,
    }


@pytest.mark.parametrize("family", CASES)
def test_plain_diffusers_loads_the_adapter_and_makes_the_same_image(
    tmp_path: Path, folders: dict[str, Path], family: str
) -> None:
    adapter = opened(folders, family, 32, 32)
    spec, noise = SampleSpec(4, guidance_scale=CASES[family].guidance), initial_noise_for([5], adapter.latent_shape)
    base = sampler_of(folders, adapter, family).sample([5], adapter.encode(PROMPTS[:1]), spec).latents_BLC
    apply_lora(adapter.transformer, rank=3, alpha=12, target_modules=TARGETS)
    with torch.no_grad():
        for parameter in adapter.transformer.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    ours = sampler_of(folders, adapter, family).sample([5], adapter.encode(PROMPTS[:1]), spec).latents_BLC
    assert (ours - base).abs().max() > 1e-2, "the adapter must change something"
    assert save_lora(adapter.transformer, tmp_path) == tmp_path / LORA_FILE

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folders[family])
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(tmp_path)
    theirs = pipeline(**asked(family, noise)).images
    torch.testing.assert_close(ours, pack(theirs) if family == "sd3" else theirs, rtol=1e-4, atol=3e-5)
    pipeline.unload_lora_weights()
    plain = pipeline(**asked(family, noise)).images
    torch.testing.assert_close(base, pack(plain) if family == "sd3" else plain, rtol=1e-4, atol=3e-5)


def test_a_running_average_can_be_saved_in_its_place(tmp_path: Path, folders: dict[str, Path]) -> None:
    adapter = opened(folders, "flux", 32, 32)
    with pytest.raises(ValueError, match="no LoRA adapter"):
        save_lora(adapter.transformer, tmp_path)
    apply_lora(adapter.transformer, rank=2, alpha=2, target_modules=TARGETS)
    state = {name: torch.full_like(p, 7.0) for name, p in adapter.trainable_state().items()}
    save_lora(adapter.transformer, tmp_path, state)
    fresh = diffusers.DiffusionPipeline.from_pretrained(folders["flux"])
    fresh.load_lora_weights(tmp_path)
    loaded = {name: p for name, p in fresh.transformer.named_parameters() if "lora" in name}
    assert len(loaded) == len(state)
    assert all(bool((p == 7.0).all()) for p in loaded.values())
