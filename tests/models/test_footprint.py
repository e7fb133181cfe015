"""What models take on a GPU: against counting on a model that really checkpoints, and against published sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from src.models import footprint as module
from src.models.footprint import ARCHITECTURES, META, LiveBytes, footprint
from src.models.pipelines import PipelineSettings

QWEN, SD3, FLUX = ARCHITECTURES
SETTINGS = PipelineSettings(height=64, width=96, prompt_tokens=32)
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["attn.to_q", "attn.to_out.0"]}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (QWEN, 20_430_401_088),
        (SD3, 2_243_171_520 + 384 * 384 * 1536),  # the table of positions is a buffer
        (FLUX, 11_901_408_320),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    architecture = ARCHITECTURES[name]
    assert footprint(architecture, SETTINGS, LORA, rows=1, guidance_scale=1.0).parameters == parameters
    with META:
        whole = architecture.family().transformer(**architecture.transformer(architecture.blocks))
    assert sum(t.numel() for t in (*whole.parameters(), *whole.buffers())) == parameters


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_of_a_kind_are_alike(name: str) -> None:
    """What is extrapolated from two and three blocks of each kind is what so many blocks are measured to take."""
    blocks = {kind: 4 + number for number, kind in enumerate(ARCHITECTURES[name].blocks)}
    small = replace(ARCHITECTURES[name], blocks=blocks)
    told = footprint(small, SETTINGS, LORA, rows=2, guidance_scale=4.0)
    whole = module._measured(module._adapter(small, blocks, SETTINGS, LORA), 2, 4.0)
    assert (told.parameters, told.adapter) == (whole["parameters"], whole["adapter"])
    assert told.transformer_bytes == whole["transformer"]
    assert told.passes == (1 if name == FLUX else 2), "FLUX.1-dev has guidance as an input"
    for kind, estimate in (("plain", told.plain_bytes), ("checkpointed", told.checkpointed_bytes)):
        assert whole[kind] < whole[kind] + whole[f"{kind}_peak"] <= estimate * 1.001
        assert estimate <= (whole[kind] + whole[f"{kind}_peak"]) * 1.1, "the worst moment may be elsewhere"
    assert told.checkpointed_bytes < told.plain_bytes


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_alive_is_what_autograd_saved(name: str) -> None:
    """Without checkpoints, counted in another way: by the tensors that autograd asks to keep."""
    architecture, settings, saved = ARCHITECTURES[name], replace(SETTINGS, height=256, width=256), {}
    blocks = dict.fromkeys(architecture.blocks, 2)
    expected = module._measured(module._adapter(architecture, blocks, settings, LORA), 2, 1.0)["plain"]
    adapter = module._adapter(architecture, blocks, settings, LORA)
    given = {tensor.untyped_storage()._cdata for tensor in adapter.transformer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor  # kept alive, so that no other takes its identity
        return tensor

    cond, latents = adapter.prompt_encoder.encode(["", ""]), torch.empty(2, *adapter.latent_shape, device=META)
    with module.fused_attention(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapter.velocity(latents, torch.empty(2, device=META), cond)
    kept = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in given)
    assert expected == pytest.approx(kept, rel=0.05)


def test_live_bytes_follow_tensors_to_their_end() -> None:
    with LiveBytes() as live:
        first = torch.empty(10, dtype=torch.float32, device=META)
        second = torch.empty(5, dtype=torch.float16, device=META)
        view = first[2:]
        del first
        assert live.now == 50
        del view
        assert live.now == 10
        del second
    assert (live.now, live.peak) == (0, 50)


@pytest.mark.parametrize(("name", "weights"), [(QWEN, 507_570_124), (SD3, 335_278_732)])
def test_decoding_takes_as_much_as_there_are_pixels(name: str, weights: int) -> None:
    sizes = [
        module._decoding(ARCHITECTURES[name], replace(SETTINGS, height=height, width=512, vae_batch=batch))
        for height, batch in ((256, 1), (512, 1), (512, 2))
    ]
    assert [size for size, _ in sizes] == [weights] * 3
    one, two, four = (peak for _, peak in sizes)
    assert two / one == pytest.approx(2, rel=0.2)
    assert four == pytest.approx(2 * two, rel=0.01)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_text_encoders_have_their_published_sizes() -> None:
    """Sizes from the encoders' config.json files."""
    t5 = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    large = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    giant = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    text = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    with META:
        assert parameters(transformers.T5EncoderModel(transformers.T5Config(**t5, feed_forward_proj="gated-gelu"))) == (
            module._T5_XXL
        )
        clip = transformers.CLIPTextConfig
        assert parameters(transformers.CLIPTextModel(clip(**large))) == module._CLIP_L
        projected = transformers.CLIPTextModelWithProjection
        assert parameters(projected(clip(**large, projection_dim=768))) == module._CLIP_L_PROJECTED
        assert parameters(projected(clip(**giant, projection_dim=1280))) == module._CLIP_G
        vl = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
        qwen = transformers.Qwen2_5_VLForConditionalGeneration(vl)
    assert parameters(qwen) == ARCHITECTURES[QWEN].encoder_parameters
