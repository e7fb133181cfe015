from collections.abc import Sequence

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

from src.core.types import SampleSpec
from src.models.adapter import Conditioning, state_checksum
from src.models.noise import initial_noise_for
from src.models.qwen_image import QwenImageAdapter, SamplePrediction, VelocityPrediction
from src.models.sampler import Sampler
from src.models.schedule import diffusers_schedule
from src.models.steps import ODE
from src.models.tiny import PixelDecoder
from tests.models.lively import lively_adapter


def inputs(adapter: QwenImageAdapter, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, Conditioning]:
    latents = initial_noise_for(range(batch), adapter.latent_shape)
    return latents, torch.linspace(1, 0.1, batch), adapter.encode(["abcd", "ba", "c"][:batch])


# ---------------------------------------------------------------- conditioning


def test_texts_of_different_lengths_are_padded_and_masked() -> None:
    short = Conditioning(torch.ones(1, 2, 3), torch.ones(1, 2, dtype=torch.bool))
    long = Conditioning(2 * torch.ones(2, 4, 3), torch.ones(2, 4, dtype=torch.bool))
    both = Conditioning.cat([short, long])
    assert len(both) == 3
    assert both.mask_BS.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
    assert torch.equal(both.embeds_BSD[0, 2:], torch.zeros(2, 3))
    assert torch.equal(both.select([2, 0]).embeds_BSD, both.embeds_BSD[[2, 0]])
    with pytest.raises(ValueError, match=r"Conditioning\.mask_BS"):
        Conditioning(torch.ones(1, 2, 3), torch.ones(1, 3, dtype=torch.bool))


def test_masked_tokens_do_not_matter(adapter: QwenImageAdapter) -> None:
    latents, sigmas, cond = inputs(adapter)
    changed = torch.where(cond.mask_BS[:, :, None], cond.embeds_BSD, torch.randn_like(cond.embeds_BSD))
    before = adapter.velocity(latents, sigmas, cond)
    after = adapter.velocity(latents, sigmas, Conditioning(changed, cond.mask_BS))
    torch.testing.assert_close(after, before)
    other = adapter.velocity(latents, sigmas, adapter.encode(["abcd", "ba", "d"]))
    assert not torch.allclose(other[2], before[2])


class CountingEncoder:
    """Counts its calls; a text is its length, in as many tokens as it has characters."""

    def __init__(self) -> None:
        self.calls: list[Sequence[str]] = []

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        self.calls.append(list(prompts))
        (text,) = prompts
        return Conditioning(
            torch.full((1, len(text), 64), float(len(text))), torch.ones(1, len(text), dtype=torch.bool)
        )


def test_each_text_is_encoded_once_and_alone(adapter: QwenImageAdapter) -> None:
    encoder = CountingEncoder()
    adapter.prompt_encoder, adapter.cache_prompts = encoder, True
    cond = adapter.encode(["aa", "b", "aa"])
    assert torch.equal(adapter.encode(["b", "aa"]).embeds_BSD, cond.embeds_BSD[[1, 0]])
    assert encoder.calls == [["aa"], ["b"]]
    assert cond.mask_BS.tolist() == [[True, True], [True, False], [True, True]]
    adapter.cache_prompts = False
    adapter.encode(["b", "b"])
    adapter.encode(["b"])
    assert encoder.calls[2:] == [["b"], ["b"]]


def test_the_encodings_used_last_are_kept(adapter: QwenImageAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.models.adapter.CACHED_TEXTS", 2)
    encoder = CountingEncoder()
    adapter.prompt_encoder, adapter.cache_prompts = encoder, True
    for texts in (["a"], ["bb"], ["a"], ["ccc"], ["a"], ["bb"]):
        adapter.encode(texts)
    assert encoder.calls == [["a"], ["bb"], ["ccc"], ["bb"]]
    assert len(adapter.encode(["a", "bb", "ccc", "d"])) == 4  # more at once than are kept


# ---------------------------------------------------------------- prediction and guidance


def test_predictions() -> None:
    x0, eps = torch.full((2, 1, 1), 3.0), torch.full((2, 1, 1), -1.0)
    sigma = torch.tensor([0.5, 0.02])
    x = (1 - sigma)[:, None, None] * x0 + sigma[:, None, None] * eps
    assert torch.equal(VelocityPrediction().velocity(eps - x0, x, sigma), eps - x0)
    velocity = SamplePrediction(min_sigma=0.05).velocity(x0, x, sigma)
    assert velocity[:, 0, 0].tolist() == pytest.approx([-4.0, -4.0 * 0.02 / 0.05])
    with pytest.raises(ValueError, match=r"SamplePrediction\.min_sigma"):
        SamplePrediction(min_sigma=0.0)


def test_guidance_of_scale_1_is_no_guidance(adapter: QwenImageAdapter) -> None:
    latents, sigmas, cond = inputs(adapter)
    plain = adapter.predict_velocity(latents, sigmas, cond)
    assert torch.equal(adapter.velocity(latents, sigmas, cond, guidance_scale=1.0), plain)
    barely = adapter.velocity(latents, sigmas, cond, guidance_scale=1.0 + 1e-6)
    torch.testing.assert_close(barely, plain, rtol=1e-4, atol=1e-5)


def test_guidance_keeps_the_norm_of_every_token(adapter: QwenImageAdapter) -> None:
    latents, sigmas, cond = inputs(adapter)
    negative = adapter.encode([""] * 3)
    uncond = adapter.predict_velocity(latents, sigmas, negative)
    plain = adapter.predict_velocity(latents, sigmas, cond)
    guided = adapter.velocity(latents, sigmas, cond, guidance_scale=4.0)
    direction = uncond + 4.0 * (plain - uncond)
    expected = direction * plain.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(guided, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_equal_to_the_pipeline_of_diffusers(guidance_scale: float) -> None:
    """The ODE sampler on Qwen-Image's geometry and schedule: prompts of different lengths, with guidance."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        num_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 12, 12),
    ).eval()
    texts = {
        "short": Conditioning(torch.randn(1, 3, 16), torch.ones(1, 3, dtype=torch.bool)),
        "longer": Conditioning(torch.randn(1, 5, 16), torch.ones(1, 5, dtype=torch.bool)),
        " ": Conditioning(torch.randn(1, 2, 16), torch.ones(1, 2, dtype=torch.bool)),
    }

    class Table:
        def encode(self, prompts: Sequence[str]) -> Conditioning:
            return Conditioning.cat([texts[prompt] for prompt in prompts])

    adapter = QwenImageAdapter(
        transformer=transformer,
        prompt_encoder=Table(),
        image_decoder=PixelDecoder(channels=1, patch=8),
        height=64,
        width=96,
        patch=16,
        prediction=VelocityPrediction(),
        negative_prompt=" ",
    )
    assert adapter.latent_shape == (24, 64)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift_terminal=0.02, max_shift=0.9, max_image_seq_len=8192
    )
    sampler = Sampler(
        adapter=adapter,
        rule=ODE(),
        schedule_for=diffusers_schedule(scheduler.config, image_tokens=24, own_levels=False),
        noise_steps=5,
        batch_size=2,
    )
    cond = adapter.encode(["short", "longer"])
    ours = sampler.sample([1, 2], cond, SampleSpec(5, (), guidance_scale)).latents_BLC

    pipeline = QwenImagePipeline(
        scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=transformer
    )
    pipeline.set_progress_bar_config(disable=True)
    negative = texts[" "].select([0, 0])
    theirs = pipeline(
        prompt_embeds=cond.embeds_BSD,
        prompt_embeds_mask=cond.mask_BS,
        negative_prompt_embeds=negative.embeds_BSD,
        negative_prompt_embeds_mask=negative.mask_BS,
        true_cfg_scale=guidance_scale,
        latents=initial_noise_for([1, 2], (24, 64)),
        height=64,
        width=96,
        num_inference_steps=5,
        output_type="latent",
    ).images
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------- trainable state


def test_the_trainable_state_travels(adapter: QwenImageAdapter) -> None:
    other = lively_adapter(seed=1)
    assert adapter.checksum() != other.checksum()
    other.load_trainable_state(adapter.trainable_state())
    assert adapter.checksum() == other.checksum() == state_checksum(adapter.trainable_state())
    latents, sigmas, cond = inputs(adapter)
    assert torch.equal(adapter.velocity(latents, sigmas, cond), other.velocity(latents, sigmas, cond))


def test_a_state_is_a_copy(adapter: QwenImageAdapter) -> None:
    state, before = adapter.trainable_state(), adapter.checksum()
    for tensor in state.values():
        tensor += 1
    assert adapter.checksum() == before


def test_only_what_is_trained_is_in_the_state(adapter: QwenImageAdapter) -> None:
    adapter.transformer.requires_grad_(False)
    adapter.transformer.proj_out.requires_grad_(True)
    assert set(adapter.trainable_state()) == {"proj_out.weight", "proj_out.bias"}
    adapter.transformer.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        adapter.trainable_state()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(adapter: QwenImageAdapter) -> None:
    before, state = adapter.checksum(), adapter.trainable_state()
    missing = {name: tensor + 1 for name, tensor in state.items() if name != "proj_out.bias"}
    with pytest.raises(ValueError, match=r"missing \['proj_out.bias'\], unknown \[\]"):
        adapter.load_trainable_state(missing)
    with pytest.raises(ValueError, match=r"unknown \['other'\]"):
        adapter.load_trainable_state({**state, "other": torch.zeros(1)})
    for wrong in (torch.zeros(3), state["proj_out.bias"].double()):
        shifted = {name: tensor + 1 for name, tensor in state.items()}
        with pytest.raises(ValueError, match=r"proj_out\.bias"):
            adapter.load_trainable_state({**shifted, "proj_out.bias": wrong})
    assert adapter.checksum() == before


def test_the_checksum_sees_names_dtypes_shapes_and_values() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    variants = [
        {"a": torch.zeros(3, 2), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(2)},
        {"c": torch.zeros(2, 3), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3), "b": torch.tensor([1.0, 1.0 + 1e-7])},
    ]
    assert len({state_checksum(state) for state in [base, *variants]}) == 5
    assert state_checksum(dict(reversed(base.items()))) == state_checksum(base)
    half = {"a": torch.zeros(3, dtype=torch.bfloat16)}
    assert state_checksum(half) == state_checksum({"a": half["a"].clone()})


def test_image_size_must_fill_tokens() -> None:
    with pytest.raises(ValueError, match="height and width must be multiples of patch=4, got 12x22"):
        lively_adapter(height=12, width=22)


def test_images_have_the_models_size(adapter: QwenImageAdapter) -> None:
    images = adapter.decode(initial_noise_for([1, 2], adapter.latent_shape))
    assert images.shape == (2, 12, 24, 1)
    assert images.dtype == np.uint8
