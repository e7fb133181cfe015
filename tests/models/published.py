"""Tiny random models in the folder format of the published ones, with real tokenizer classes trained on a few prompts.

No vocabulary can be downloaded in tests, and none is needed: what is under test is our use of the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

PROMPTS = (
    'a wooden sign that says "OPEN"',
    'a neon shop window with the words "Fresh Bread"',
    "a photo of two red apples and a green bench",
    "a photo of a cat below a chair",
    "low quality",
)
CLIP_TOKENS = 77


def train(tokenizer: Any, vocab_size: int = 400, **special: Any) -> Any:
    """The same kind of tokenizer with a vocabulary of PROMPTS."""
    return tokenizer.train_new_from_iterator([PROMPTS], vocab_size, **special)


def clip_tokenizer() -> Any:
    tokenizer = train(transformers.CLIPTokenizer(), model_max_length=CLIP_TOKENS)
    tokenizer.model_max_length = CLIP_TOKENS
    return tokenizer


def t5_tokenizer() -> Any:
    return train(transformers.T5TokenizerFast(extra_ids=0))


def clip_config(tokenizer: Any, width: int) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_encoder(tokenizer: Any, width: int) -> transformers.T5EncoderModel:
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=2
    )
    return transformers.T5EncoderModel(config)


def kl_vae(**scale: float) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=32,
        **scale,
    )


def qwen_image() -> diffusers.QwenImagePipeline:
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer = train(transformers.Qwen2Tokenizer(), new_special_tokens=specials)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special_ids = dict.fromkeys(names, tokenizer.pad_token_id)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special_ids)
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift=1.0,
            shift_terminal=0.02,
            time_shift_type="exponential",
            use_dynamic_shifting=True,
        ),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            num_res_blocks=1,
            latents_mean=[-0.75, 0.1, -0.2, 0.4],
            latents_std=[2.8, 1.4, 2.3, 0.9],
        ),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
        transformer=diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def sd3() -> diffusers.StableDiffusion3Pipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=kl_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=transformers.CLIPTextModelWithProjection(clip_config(clip, 16)),
        tokenizer=clip,
        text_encoder_2=transformers.CLIPTextModelWithProjection(clip_config(clip, 16)),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5, 32),
        tokenizer_3=t5,
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=32,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        ),
    )


def flux(*, guidance_embeds: bool = True) -> diffusers.FluxPipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=4096,
            max_shift=1.15,
            shift=3.0,
            use_dynamic_shifting=True,
        ),
        vae=kl_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=transformers.CLIPTextModel(clip_config(clip, 32)),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5, 32),
        tokenizer_2=t5,
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
        ),
    )


FAMILIES: Mapping[str, Callable[[], Any]] = {"qwen_image": qwen_image, "sd3": sd3, "flux": flux}


def build(family: str, seed: int = 0) -> Any:
    """A pipeline with random weights, none of them zero: fresh output layers would hide everything else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = FAMILIES[family]()
        with torch.no_grad():
            for parameter in pipeline.transformer.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """Such a pipeline on disk."""
    build(family, seed).save_pretrained(folder)
    return folder
