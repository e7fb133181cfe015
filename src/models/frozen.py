"""The frozen parts of a diffusers pipeline: its text encoders and its VAE.

They are used between denoising runs only, so they can rest in host memory while the transformer works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from src.models.adapter import Conditioning
from src.models.packing import unpack

PIXELS_PER_TOKEN = 16
"""On a side: the VAEs of all supported families shrink by 8, and a token is a square of 2 x 2 latent pixels."""


class Resting:
    """Frozen modules that are on the working device all the time, or only while they are used.

    Args:
        modules: put into evaluation mode, without gradient.
        offload: rest in host memory.
    """

    def __init__(self, modules: Sequence[nn.Module], *, offload: bool) -> None:
        self.modules = [module.eval().requires_grad_(False) for module in modules]
        self.offload = offload
        self.device = torch.device("cpu")

    def to(self, device: torch.device) -> None:
        """Choose the device to work on."""
        self.device = device
        if not self.offload:
            self._move(device)

    @contextmanager
    def awake(self) -> Iterator[torch.device]:
        """Inside, the modules are on the working device."""
        if not self.offload:
            yield self.device
            return
        self._move(self.device)
        try:
            yield self.device
        finally:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for module in self.modules:
            module.to(device)


class PipelineEncoder:
    """The text encoders of a pipeline (`models.adapter.PromptEncoder`).

    Every text becomes `tokens` tokens, whatever the others in its batch, so that samples are bit-equal.

    Args:
        pipeline: a diffusers pipeline without transformer and VAE.
        encode: (pipeline, text, tokens, device) -> its conditioning, one row.
        tokens: S; longer prompts are cut, as the pipeline does.
        offload: keep the encoders in host memory between calls.
    """

    def __init__(
        self,
        *,
        pipeline: Any,
        encode: Callable[[Any, str, int, torch.device], Conditioning],
        tokens: int,
        offload: bool,
    ) -> None:
        self.pipeline = pipeline
        self.tokens = tokens
        self._encode = encode
        encoders = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
        self._resting = Resting(encoders, offload=offload)

    def to(self, device: torch.device) -> None:
        """Choose the device to work on."""
        self._resting.to(device)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        with self._resting.awake() as device:
            return Conditioning.cat([self._encode(self.pipeline, text, self.tokens, device) for text in prompts])


class VAEDecoder:
    """The decoder half of a VAE (`models.adapter.ImageDecoder`), in fp32: half precision overflows in some.

    Args:
        vae: a diffusers autoencoder that shrinks by 8.
        decode: (vae, normalised latents [B, C, H, W]) -> pixels [B, 3, 8 H, 8 W] in [-1, 1].
        batch: images per pass. Passes are filled up with repeats, so that no image depends on its neighbours.
        tiled: decode in overlapping tiles: less memory, faint differences at their seams.
        offload: keep the VAE in host memory between calls.
    """

    def __init__(
        self,
        *,
        vae: Any,
        decode: Callable[[Any, torch.Tensor], torch.Tensor],
        batch: int,
        tiled: bool,
        offload: bool,
    ) -> None:
        if batch < 1:
            raise ValueError(f"vae_batch must be at least 1, got {batch}")
        if tiled:
            vae.enable_tiling()
        self.vae = vae
        self.batch = batch
        self._decode = decode
        self._resting = Resting([vae], offload=offload)

    def to(self, device: torch.device) -> None:
        """Choose the device to work on."""
        self._resting.to(device)

    @torch.no_grad()
    def decode(self, latents_BLC: torch.Tensor, *, height: int, width: int) -> NDArray[np.uint8]:
        """uint8 images [B, height, width, 3]: round(255 clamp(x / 2 + 1/2, 0, 1))."""
        grid = {"rows": height // PIXELS_PER_TOKEN, "columns": width // PIXELS_PER_TOKEN}
        images = []
        with self._resting.awake() as device:
            for part in torch.split(latents_BLC, self.batch):
                filled = torch.cat([part, part[:1].expand(self.batch - len(part), -1, -1)])
                pixels = self._decode(self.vae, unpack(filled.to(device, torch.float32), **grid))
                levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
                images.append(levels[: len(part)].permute(0, 2, 3, 1).cpu().numpy())
        return np.concatenate(images)
