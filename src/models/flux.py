"""FLUX.1: diffusers' `FluxTransformer2DModel` behind the `DiTAdapter` interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from src.models.adapter import Conditioning, DiTAdapter
from src.models.pipelines import Family, PipelineSettings
from src.models.sd3 import decode_kl


class FluxAdapter(DiTAdapter):
    """A `FluxTransformer2DModel`.

    FLUX.1-dev was distilled with guidance as an input: its scale is an argument of the one forward pass. A
    model without that input (schnell) takes true classifier-free guidance instead.
    """

    def velocity(
        self,
        latents_BLC: torch.Tensor,
        sigma_B: torch.Tensor,
        cond: Conditioning,
        *,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        if not self.transformer.config.guidance_embeds:  # type: ignore[union-attr]
            return super().velocity(latents_BLC, sigma_B, cond, guidance_scale=guidance_scale)
        return self._forward(latents_BLC, sigma_B, cond, torch.full_like(sigma_B, guidance_scale))

    def predict_velocity(self, latents_BLC: torch.Tensor, sigma_B: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        return self._forward(latents_BLC, sigma_B, cond, None)

    def _forward(
        self, latents_BLC: torch.Tensor, sigma_B: torch.Tensor, cond: Conditioning, guidance_B: torch.Tensor | None
    ) -> torch.Tensor:
        output_BLC: torch.Tensor = self.transformer(
            hidden_states=latents_BLC.to(cond.embeds_BSD.dtype),
            timestep=sigma_B,
            guidance=guidance_B,
            encoder_hidden_states=cond.embeds_BSD,
            pooled_projections=cond.pooled_BD,
            txt_ids=torch.zeros(cond.embeds_BSD.shape[1], 3, device=latents_BLC.device),
            img_ids=self._positions(latents_BLC.device),
            return_dict=False,
        )[0]
        return output_BLC.float()

    def _positions(self, device: torch.device) -> torch.Tensor:
        """(0, row, column) of each image token, [L, 3]: fp32, because bf16 cannot count beyond 256."""
        height, width = self.image_size
        rows, columns = torch.arange(height // 16, device=device), torch.arange(width // 16, device=device)
        return torch.cartesian_prod(rows.new_zeros(1), rows, columns).float()


def load_flux(folder: Path, settings: PipelineSettings) -> FluxAdapter:
    """The model in a folder of `FluxPipeline`."""
    parts = flux_family().open(folder, settings)
    rows, columns = settings.grid
    shape = (rows * columns, parts["transformer"].config.in_channels)
    return FluxAdapter(**parts, latent_shape=shape, negative_prompt=settings.negative_prompt or "")


def _encode(pipeline: Any, text: str, tokens: int, device: torch.device) -> Conditioning:
    embeds_BSD, pooled_BD, _ = pipeline.encode_prompt(text, device=device, max_sequence_length=tokens)
    everything = torch.ones(embeds_BSD.shape[:2], dtype=torch.bool, device=device)  # the model attends to padding
    return Conditioning(embeds_BSD, everything, pooled_BD)


def flux_family() -> Family:
    """FLUX.1's classes; a function, because naming them loads transformers."""
    return Family(
        pipeline=diffusers.FluxPipeline,
        transformer=diffusers.FluxTransformer2DModel,
        vae=diffusers.AutoencoderKL,
        encode=_encode,
        decode=decode_kl,
    )
