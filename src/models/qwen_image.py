"""Qwen-Image: diffusers' `QwenImageTransformer2DModel`, tiny or real, behind the `DiTAdapter` interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import diffusers
import torch
from torch import nn

from src.models.adapter import Conditioning, DiTAdapter, ImageDecoder, PromptEncoder
from src.models.frozen import PIXELS_PER_TOKEN
from src.models.pipelines import Family, PipelineSettings


class Prediction(Protocol):
    """What the network's output means, turned into a velocity."""

    def velocity(self, output_BLC: torch.Tensor, latents_BLC: torch.Tensor, sigma_B: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class VelocityPrediction:
    """The network predicts the velocity, as the published models do."""

    def velocity(self, output_BLC: torch.Tensor, latents_BLC: torch.Tensor, sigma_B: torch.Tensor) -> torch.Tensor:
        return output_BLC


@dataclass(frozen=True)
class SamplePrediction:
    """The network predicts the image x0: v = (x - x0) / max(sigma, min_sigma).

    Much easier to learn for a small network whose tokens are raw pixels.
    """

    min_sigma: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.min_sigma <= 1:
            raise ValueError(f"SamplePrediction.min_sigma must lie in (0, 1], got {self.min_sigma}")

    def velocity(self, output_BLC: torch.Tensor, latents_BLC: torch.Tensor, sigma_B: torch.Tensor) -> torch.Tensor:
        return (latents_BLC - output_BLC) / sigma_B.clamp(min=self.min_sigma)[:, None, None]


class QwenImageAdapter(DiTAdapter):
    """A `QwenImageTransformer2DModel` of diffusers with its prompt encoder and image decoder.

    Args:
        transformer: the diffusers model.
        height, width: image size in pixels, multiples of `patch`.
        patch: image pixels on a side of one token: 16 for Qwen-Image (VAE factor 8, patches of 2), the patch
            size itself for a model that works on pixels.
        prediction: what the network's output means.
        negative_prompt: diffusers' pipeline documents " " for the real model.
        prompt_encoder, image_decoder, cache_prompts: see `DiTAdapter`.
    """

    def __init__(
        self,
        *,
        transformer: nn.Module,
        prompt_encoder: PromptEncoder,
        image_decoder: ImageDecoder,
        height: int,
        width: int,
        patch: int,
        prediction: Prediction,
        negative_prompt: str = "",
        cache_prompts: bool = False,
    ) -> None:
        if height % patch or width % patch:
            raise ValueError(f"height and width must be multiples of patch={patch}, got {height}x{width}")
        grid = (height // patch, width // patch)
        super().__init__(
            transformer=transformer,
            prompt_encoder=prompt_encoder,
            image_decoder=image_decoder,
            height=height,
            width=width,
            latent_shape=(grid[0] * grid[1], transformer.config.in_channels),  # type: ignore[union-attr, arg-type]
            negative_prompt=negative_prompt,
            cache_prompts=cache_prompts,
        )
        self.prediction = prediction
        # Frames, height and width in tokens: all that the rotary positions need to know.
        self._image_shape = [(1, *grid)]

    def predict_velocity(self, latents_BLC: torch.Tensor, sigma_B: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        # The mask is passed even when every token is real: attention with and without one differs in the last
        # bits, so which of the two runs must not depend on the batch. It costs 3 % on a tiny model.
        output_BLC: torch.Tensor = self.transformer(
            hidden_states=latents_BLC.to(cond.embeds_BSD.dtype),
            encoder_hidden_states=cond.embeds_BSD,
            encoder_hidden_states_mask=cond.mask_BS,
            timestep=sigma_B,
            img_shapes=[self._image_shape] * len(latents_BLC),
            return_dict=False,
        )[0]
        return self.prediction.velocity(output_BLC.float(), latents_BLC, sigma_B)

    def guide(self, uncond_BLC: torch.Tensor, cond_BLC: torch.Tensor, scale: float) -> torch.Tensor:
        """Guidance, with each token rescaled to the norm of its conditional velocity, as diffusers does."""
        guided_BLC = super().guide(uncond_BLC, cond_BLC, scale)
        cond_norm_BL1: torch.Tensor = torch.linalg.vector_norm(cond_BLC, dim=-1, keepdim=True)
        guided_norm_BL1: torch.Tensor = torch.linalg.vector_norm(guided_BLC, dim=-1, keepdim=True)
        return guided_BLC * (cond_norm_BL1 / guided_norm_BL1.clamp(min=1e-12))


def load_qwen_image(folder: Path, settings: PipelineSettings) -> QwenImageAdapter:
    """The model in a folder of `QwenImagePipeline`."""
    return QwenImageAdapter(
        **qwen_image_family().open(folder, settings),
        patch=PIXELS_PER_TOKEN,
        prediction=VelocityPrediction(),
        negative_prompt=" " if settings.negative_prompt is None else settings.negative_prompt,
    )


def _encode(pipeline: Any, text: str, tokens: int, device: torch.device) -> Conditioning:
    embeds_BSD, mask_BS = pipeline.encode_prompt(text, device=device, max_sequence_length=tokens)
    if mask_BS is None:  # diffusers' word for: every token is real
        mask_BS = torch.ones(embeds_BSD.shape[:2], device=device)
    return Conditioning(embeds_BSD, mask_BS.bool()).padded(tokens)


def _decode(vae: Any, latents_BCHW: torch.Tensor) -> torch.Tensor:
    """Pixels of an `AutoencoderKLQwenImage`: a video VAE, given one frame."""
    mean_C11, std_C11 = (
        torch.tensor(values, device=latents_BCHW.device)[:, None, None]
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    frame_BC1HW = (latents_BCHW * std_C11 + mean_C11)[:, :, None]
    pixels: torch.Tensor = vae.decode(frame_BC1HW, return_dict=False)[0][:, :, 0]
    return pixels


def qwen_image_family() -> Family:
    """Qwen-Image's classes; a function, because naming them loads transformers, which tiny models need not."""
    return Family(
        pipeline=diffusers.QwenImagePipeline,
        transformer=diffusers.QwenImageTransformer2DModel,
        vae=diffusers.AutoencoderKLQwenImage,
        encode=_encode,
        decode=_decode,
    )
