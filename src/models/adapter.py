"""What the sampler and the trainer know of a diffusion transformer.

Data format:
    latents_BLC   fp32, packed: L tokens (patches of the image, row by row) of C values
    embeds_BSD    a prompt: S text tokens of D values; mask_BS is true where a token is real
    images        uint8 NumPy arrays [B, height, width, channels]
    sigma         from 1 (noise) to 0 (image); the velocity is eps - x0
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts: `embeds_BSD`, the boolean `mask_BS` of their real tokens, and one vector per text where
    the model has CLIP encoders."""

    embeds_BSD: torch.Tensor
    mask_BS: torch.Tensor
    pooled_BD: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.embeds_BSD.shape[:2] != self.mask_BS.shape:
            raise ValueError(
                f"Conditioning.mask_BS of shape {tuple(self.mask_BS.shape)} does not fit "
                f"embeds_BSD of shape {tuple(self.embeds_BSD.shape)}"
            )

    def __len__(self) -> int:
        return len(self.embeds_BSD)

    def select(self, rows: Sequence[int] | torch.Tensor) -> Conditioning:
        """The given rows, in the given order; a row may be taken several times."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.embeds_BSD.device)
        pooled_BD = None if self.pooled_BD is None else self.pooled_BD[index]
        return Conditioning(self.embeds_BSD[index], self.mask_BS[index], pooled_BD)

    def to(self, device: torch.device) -> Conditioning:
        """The same on another device."""
        pooled_BD = None if self.pooled_BD is None else self.pooled_BD.to(device)
        return Conditioning(self.embeds_BSD.to(device), self.mask_BS.to(device), pooled_BD)

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """All rows of all parts; shorter texts are padded at the end with masked zeros."""
        return Conditioning._joined(parts, max(part.mask_BS.shape[1] for part in parts))

    def padded(self, length: int) -> Conditioning:
        """The same with `length` tokens per text, the new ones masked zeros."""
        return Conditioning._joined([self], length)

    @staticmethod
    def _joined(parts: Sequence[Conditioning], length: int) -> Conditioning:
        pooled = [part.pooled_BD for part in parts if part.pooled_BD is not None]
        return Conditioning(
            torch.cat([_pad_tokens(part.embeds_BSD, length) for part in parts]),
            torch.cat([_pad_tokens(part.mask_BS, length) for part in parts]),
            torch.cat(pooled) if pooled else None,
        )


def _pad_tokens(values_BS: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - values_BS.shape[1]
    if missing == 0:
        return values_BS
    padding = values_BS.new_zeros(len(values_BS), missing, *values_BS.shape[2:])
    return torch.cat([values_BS, padding], dim=1)


class PromptEncoder(Protocol):
    """Turns prompts into text tokens.

    Samples are bit-equal whatever the batch only if S does not depend on the prompts: pad to a fixed length.
    """

    def encode(self, prompts: Sequence[str]) -> Conditioning: ...


class ImageDecoder(Protocol):
    """Turns packed latents into uint8 images [B, height, width, channels]."""

    def decode(self, latents_BLC: torch.Tensor, *, height: int, width: int) -> NDArray[np.uint8]: ...


@runtime_checkable
class Movable(Protocol):
    """A part that works on a device of its own choice: modules, and encoders that rest in host memory."""

    def to(self, device: torch.device) -> Any: ...


CACHED_TEXTS = 512
"""Encodings that are kept, the last used ones: two batches and the held-out prompts of most runs."""


class DiTAdapter(ABC):
    """A text-to-image diffusion transformer with its prompt encoder and image decoder, on one device.

    Args:
        transformer: the network that is trained.
        prompt_encoder, image_decoder: frozen in post-training.
        height, width: image size in pixels.
        latent_shape: (L, C) of the packed latents of one image.
        negative_prompt: what classifier-free guidance leads away from.
        cache_prompts: keep the encodings of the texts last used; only for an encoder that no longer changes.
    """

    def __init__(
        self,
        *,
        transformer: nn.Module,
        prompt_encoder: PromptEncoder,
        image_decoder: ImageDecoder,
        height: int,
        width: int,
        latent_shape: tuple[int, int],
        negative_prompt: str = "",
        cache_prompts: bool = False,
    ) -> None:
        self.transformer = transformer
        self.prompt_encoder = prompt_encoder
        self.image_decoder = image_decoder
        self.image_size = (height, width)
        self.latent_shape = latent_shape
        self.negative_prompt = negative_prompt
        self.cache_prompts = cache_prompts
        self._encoded: dict[str, Conditioning] = {}

    @abstractmethod
    def predict_velocity(self, latents_BLC: torch.Tensor, sigma_B: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        """One forward pass: the velocity, fp32 [B, L, C], without guidance."""

    def guide(self, uncond_BLC: torch.Tensor, cond_BLC: torch.Tensor, scale: float) -> torch.Tensor:
        """Classifier-free guidance: uncond + scale (cond - uncond)."""
        return uncond_BLC + scale * (cond_BLC - uncond_BLC)

    def velocity(
        self,
        latents_BLC: torch.Tensor,
        sigma_B: torch.Tensor,
        cond: Conditioning,
        *,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        """The velocity v = eps - x0 at noise level sigma, fp32 [B, L, C].

        With a `guidance_scale` other than 1, one forward pass of 2B rows serves prompt and negative prompt.
        """
        if guidance_scale == 1.0:
            return self.predict_velocity(latents_BLC, sigma_B, cond)
        negative = self.encode([self.negative_prompt]).select([0] * len(cond))
        both_BLC = self.predict_velocity(
            torch.cat([latents_BLC, latents_BLC]),
            torch.cat([sigma_B, sigma_B]),
            Conditioning.cat([negative, cond]),
        )
        uncond_BLC, cond_BLC = both_BLC.chunk(2)
        return self.guide(uncond_BLC, cond_BLC, guidance_scale)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Encode prompts without gradient.

        Each text is encoded alone, so that its embedding does not depend on its neighbours in the batch.
        """
        cached = self._encoded if self.cache_prompts else {}
        known = {text: cached.pop(text) for text in dict.fromkeys(prompts) if text in cached}
        for text in prompts:
            if text not in known:
                known[text] = self.prompt_encoder.encode([text]).to(self.device)
        cached |= known  # at the end of the dictionary: these were used last
        for text in list(cached)[:-CACHED_TEXTS]:
            del cached[text]
        return Conditioning.cat([known[text] for text in prompts])

    def decode(self, latents_BLC: torch.Tensor) -> NDArray[np.uint8]:
        """The images of final latents, uint8 [B, height, width, channels]."""
        height, width = self.image_size
        return self.image_decoder.decode(latents_BLC, height=height, width=width)

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the transformer, adapters aside."""
        return next(self.transformer.parameters()).dtype

    def to(self, device: torch.device) -> None:
        """Move the networks to a device."""
        for part in (self.transformer, self.prompt_encoder, self.image_decoder):
            if isinstance(part, Movable):
                part.to(device)
        self._encoded.clear()

    def trainable_state(self) -> dict[str, torch.Tensor]:
        """A copy on the CPU of every parameter that is trained, by name: all of them, or the LoRA adapter.

        Raises:
            ValueError: none is trained.
        """
        own = self._trainable_parameters()
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items()}

    @torch.no_grad()
    def load_trainable_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `trainable_state` gave, in place.

        Raises:
            ValueError: a parameter is missing, unknown, or of another shape or dtype; nothing is loaded then.
        """
        own = self._trainable_parameters()
        if own.keys() != state.keys():
            raise ValueError(
                f"trainable state does not fit the model: missing {sorted(own.keys() - state.keys())[:3]}, "
                f"unknown {sorted(state.keys() - own.keys())[:3]} (first three of each)"
            )
        for name, tensor in own.items():
            given = state[name]
            if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"trainable state of {name} is {given.dtype} {tuple(given.shape)}, "
                    f"the model has {tensor.dtype} {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def checksum(self) -> str:
        """sha256 of the trainable parameters; equal on both sides of a transfer that worked."""
        return state_checksum(self._trainable_parameters())

    def _trainable_parameters(self) -> dict[str, nn.Parameter]:
        trained = {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}
        if not trained:  # nothing would be published or saved, and nobody would notice
            raise ValueError("the transformer has no trainable parameter")
        return trained


def state_checksum(state: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of the names, as hex digits."""
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # Viewed as bytes, because NumPy has no bfloat16.
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
