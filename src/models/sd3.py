"""Stable Diffusion 3 and 3.5: diffusers' `SD3Transformer2DModel` behind the `DiTAdapter` interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from src.models.adapter import Conditioning, DiTAdapter
from src.models.packing import pack, unpack
from src.models.pipelines import Family, PipelineSettings

TRAIN_TIMESTEPS = 1000.0
"""The transformer is told sigma times this."""


class SD3Adapter(DiTAdapter):
    """A `SD3Transformer2DModel`, with true classifier-free guidance. Tokens are its own 2 x 2 patches."""

    def predict_velocity(self, latents_BLC: torch.Tensor, sigma_B: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        height, width = self.image_size
        latents_BCHW = unpack(latents_BLC, rows=height // 16, columns=width // 16)
        output_BCHW: torch.Tensor = self.transformer(
            hidden_states=latents_BCHW.to(cond.embeds_BSD.dtype),
            timestep=sigma_B * TRAIN_TIMESTEPS,
            encoder_hidden_states=cond.embeds_BSD,
            pooled_projections=cond.pooled_BD,
            return_dict=False,
        )[0]
        return pack(output_BCHW.float())


def load_sd3(folder: Path, settings: PipelineSettings) -> SD3Adapter:
    """The model in a folder of `StableDiffusion3Pipeline`."""
    parts = sd3_family().open(folder, settings)
    rows, columns = settings.grid
    shape = (rows * columns, parts["transformer"].config.in_channels * 4)
    return SD3Adapter(**parts, latent_shape=shape, negative_prompt=settings.negative_prompt or "")


def _encode(pipeline: Any, text: str, tokens: int, device: torch.device) -> Conditioning:
    embeds_BSD, _, pooled_BD, _ = pipeline.encode_prompt(
        prompt=text,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        device=device,
        max_sequence_length=tokens,
    )
    everything = torch.ones(embeds_BSD.shape[:2], dtype=torch.bool, device=device)  # the model attends to padding
    return Conditioning(embeds_BSD, everything, pooled_BD)


def decode_kl(vae: Any, latents_BCHW: torch.Tensor) -> torch.Tensor:
    """Pixels of an `AutoencoderKL`; FLUX has one too."""
    scaled = latents_BCHW / vae.config.scaling_factor + vae.config.shift_factor
    pixels: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
    return pixels


def sd3_family() -> Family:
    """Stable Diffusion 3's classes; a function, because naming them loads transformers."""
    return Family(
        pipeline=diffusers.StableDiffusion3Pipeline,
        transformer=diffusers.SD3Transformer2DModel,
        vae=diffusers.AutoencoderKL,
        encode=_encode,
        decode=decode_kl,
    )
