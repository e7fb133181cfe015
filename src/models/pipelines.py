"""What the adapters of published models share: how a folder in diffusers' layout is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from src.models.adapter import Conditioning
from src.models.frozen import PIXELS_PER_TOKEN, PipelineEncoder, VAEDecoder

# diffusers' pipelines name image processors, which nothing here uses, and transformers would warn of each.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "ImageProcessor` requires torchvision" not in record.getMessage()
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How a published model is opened.

    Args:
        dtype: of the transformer and the text encoders; step mathematics, the VAE and LoRA weights are fp32.
        height, width: image size in pixels, multiples of 16.
        prompt_tokens: length that every prompt is padded or cut to (of the T5 part where there is CLIP too).
        negative_prompt: what true classifier-free guidance leads away from; None is the family's own.
        gradient_checkpointing: compute activations of the blocks anew in the backward pass.
        offload: text encoders and VAE rest in host memory.
        vae_batch: images that are decoded at once.
        vae_tiled: decode images in tiles.
    """

    dtype: str = "bfloat16"
    height: int = 512
    width: int = 512
    prompt_tokens: int = 256
    negative_prompt: str | None = None
    gradient_checkpointing: bool = False
    offload: bool = False
    vae_batch: int = 1
    vae_tiled: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        for name, value in (("height", self.height), ("width", self.width)):
            if value < PIXELS_PER_TOKEN or value % PIXELS_PER_TOKEN:
                raise ValueError(f"{name} must be a positive multiple of {PIXELS_PER_TOKEN}, got {value}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of image tokens."""
        return self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN


@dataclass(frozen=True)
class Family:
    """The diffusers classes of a family of models, and how its frozen parts are called.

    `encode` and `decode` are those of `PipelineEncoder` and `VAEDecoder`.
    """

    pipeline: Any
    transformer: Any
    vae: Any
    encode: Callable[[Any, str, int, torch.device], Conditioning]
    decode: Callable[[Any, torch.Tensor], torch.Tensor]

    def open(self, folder: Path, settings: PipelineSettings) -> dict[str, Any]:
        """The parts of a model folder, as the arguments of its adapter."""
        local = {"local_files_only": True, "use_safetensors": True}
        dtype = DTYPES[settings.dtype]
        transformer = self.transformer.from_pretrained(folder, subfolder="transformer", dtype=dtype, **local)
        if settings.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        vae = self.vae.from_pretrained(folder, subfolder="vae", dtype=torch.float32, **local)
        encoders = self.pipeline.from_pretrained(folder, transformer=None, vae=None, dtype=dtype, **local)
        return {
            "transformer": transformer,
            "prompt_encoder": PipelineEncoder(
                pipeline=encoders, encode=self.encode, tokens=settings.prompt_tokens, offload=settings.offload
            ),
            "image_decoder": VAEDecoder(
                vae=vae,
                decode=self.decode,
                batch=settings.vae_batch,
                tiled=settings.vae_tiled,
                offload=settings.offload,
            ),
            "height": settings.height,
            "width": settings.width,
            "cache_prompts": True,
        }
