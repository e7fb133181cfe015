"""Text-to-image models small enough for a CPU: the Qwen-Image transformer on raw pixels and a token table.

They are saved in the folder layout of diffusers, with the token table in place of the text encoder and a
reshape into patches in place of the VAE.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from src.models.adapter import Conditioning
from src.models.qwen_image import QwenImageAdapter, SamplePrediction

PIPELINE_CLASS = "TinyQwenImage"
"""`_class_name` in the model_index.json of a tiny model's folder."""

HEAD_DIM = 32
ROPE_AXES = (8, 12, 12)
"""Rotary dimensions of frame, row and column; they add up to HEAD_DIM."""


class TokenEncoder(nn.Module):
    """A learned table of token embeddings: characters, or words if any token is longer than a character.

    Args:
        vocabulary: every token that a prompt may hold.
        max_tokens: length that all prompts are padded to.
        width: values per token.
    """

    def __init__(self, *, vocabulary: Sequence[str], max_tokens: int, width: int) -> None:
        super().__init__()
        self.vocabulary = tuple(vocabulary)
        self.max_tokens = max_tokens
        self.width = width
        self._index = {token: number for number, token in enumerate(self.vocabulary)}
        self._words = any(len(token) > 1 for token in self.vocabulary)
        self.table = nn.Embedding(len(self.vocabulary), width)
        nn.init.normal_(self.table.weight, std=0.7)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Embeddings [B, max_tokens, width] with gradient, and the mask of the real tokens.

        Raises:
            ValueError: a prompt is too long or holds an unknown token.
        """
        rows = [self._tokens(prompt) for prompt in prompts]
        ids_BS = torch.tensor([row + [0] * (self.max_tokens - len(row)) for row in rows], device=self.device)
        lengths_B = torch.tensor([len(row) for row in rows], device=self.device)
        mask_BS = torch.arange(self.max_tokens, device=self.device) < lengths_B[:, None]
        return Conditioning(self.table(ids_BS) * mask_BS[:, :, None], mask_BS)

    @property
    def device(self) -> torch.device:
        return self.table.weight.device

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"vocabulary": self.vocabulary, "max_tokens": self.max_tokens, "width": self.width}

    def _tokens(self, prompt: str) -> list[int]:
        tokens = prompt.split() if self._words else list(prompt)
        unknown = [token for token in tokens if token not in self._index]
        if unknown or len(tokens) > self.max_tokens:
            raise ValueError(
                f"prompt {prompt!r}: {len(tokens)} tokens, at most {self.max_tokens} fit; unknown: {unknown}"
            )
        return [self._index[token] for token in tokens]


class PixelDecoder:
    """Packed latents are pixels in [-1, 1]: C = channels x patch x patch values a token, channel by channel.

    Args:
        channels: image channels, 1 or 3.
        patch: pixels on a side of a token.
    """

    def __init__(self, *, channels: int, patch: int) -> None:
        self.channels = channels
        self.patch = patch

    def decode(self, latents_BLC: torch.Tensor, *, height: int, width: int) -> NDArray[np.uint8]:
        """uint8 images [B, height, width, channels]: round((clamp(x, -1, 1) + 1) 127.5)."""
        rows, columns, p = height // self.patch, width // self.patch, self.patch
        pixels = latents_BLC.float().view(len(latents_BLC), rows, columns, self.channels, p, p)
        images = pixels.permute(0, 1, 4, 2, 5, 3).reshape(len(latents_BLC), height, width, self.channels)
        levels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return levels.cpu().numpy()

    def pack(self, images: NDArray[np.uint8]) -> torch.Tensor:
        """The inverse of `decode`: latents [B, L, C] of uint8 images [B, height, width, channels]."""
        batch, height, width, channels = images.shape
        p = self.patch
        pixels = torch.from_numpy(images).float() / 127.5 - 1
        tokens = pixels.view(batch, height // p, p, width // p, p, channels).permute(0, 1, 3, 5, 2, 4)
        return tokens.reshape(batch, -1, channels * p * p)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"channels": self.channels, "patch": self.patch}


def build_tiny(
    *,
    vocabulary: Sequence[str],
    max_tokens: int,
    height: int,
    width: int,
    channels: int,
    patch: int = 4,
    layers: int = 2,
    heads: int = 4,
    min_sigma: float = 0.05,
    seed: int = 0,
) -> QwenImageAdapter:
    """A fresh tiny model in fp32: 1.3 M parameters with the default two layers and four heads.

    Modulation and output start at zero, so every block starts as the identity and the first prediction is
    x0 = 0: without that, a network of this size learns far more slowly. The weights depend on `seed` alone.
    """
    embed = heads * HEAD_DIM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = diffusers.QwenImageTransformer2DModel(
            patch_size=patch,
            in_channels=channels * patch * patch,
            out_channels=channels,
            num_layers=layers,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=heads,
            joint_attention_dim=embed,
            axes_dims_rope=ROPE_AXES,
        )
        prompt_encoder = TokenEncoder(vocabulary=vocabulary, max_tokens=max_tokens, width=embed)
    for block in transformer.transformer_blocks:
        for linear in (block.img_mod[-1], block.txt_mod[-1]):
            _zero(linear)
    _zero(transformer.proj_out)
    return QwenImageAdapter(
        transformer=transformer,
        prompt_encoder=prompt_encoder,
        image_decoder=PixelDecoder(channels=channels, patch=patch),
        height=height,
        width=width,
        patch=patch,
        prediction=SamplePrediction(min_sigma=min_sigma),
    )


def _zero(linear: nn.Linear) -> None:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


def save_pretrained(adapter: QwenImageAdapter, folder: Path) -> None:
    """Write a tiny model: model_index.json, transformer/, text_encoder/, vae/, scheduler/.

    Raises:
        TypeError: the adapter is not a tiny one.
    """
    encoder, decoder, prediction = adapter.prompt_encoder, adapter.image_decoder, adapter.prediction
    if not isinstance(encoder, TokenEncoder):
        raise TypeError(f"a tiny model is saved with a TokenEncoder, not {type(encoder).__name__}")
    if not isinstance(decoder, PixelDecoder):
        raise TypeError(f"a tiny model is saved with a PixelDecoder, not {type(decoder).__name__}")
    if not isinstance(prediction, SamplePrediction):
        raise TypeError(f"a tiny model is saved with a SamplePrediction, not {type(prediction).__name__}")
    height, width = adapter.image_size
    folder.mkdir(parents=True, exist_ok=True)
    adapter.transformer.save_pretrained(folder / "transformer")  # type: ignore[operator]
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    (folder / "text_encoder").mkdir(exist_ok=True)
    save_file(dict(encoder.state_dict()), folder / "text_encoder" / "model.safetensors")
    _write_json(folder / "text_encoder" / "config.json", {"_class_name": "TokenEncoder", **encoder.config()})
    (folder / "vae").mkdir(exist_ok=True)
    _write_json(folder / "vae" / "config.json", {"_class_name": "PixelDecoder", **decoder.config()})
    index = {
        "_class_name": PIPELINE_CLASS,
        "_diffusers_version": diffusers.__version__,
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["src.models.tiny", "TokenEncoder"],
        "vae": ["src.models.tiny", "PixelDecoder"],
        "height": height,
        "width": width,
        "min_sigma": prediction.min_sigma,
    }
    _write_json(folder / "model_index.json", index)


def load_pretrained(folder: Path) -> QwenImageAdapter:
    """Read what `save_pretrained` wrote; the prompt encoder is frozen, the whole transformer trainable."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    transformer = diffusers.QwenImageTransformer2DModel.from_pretrained(
        folder / "transformer", local_files_only=True, use_safetensors=True
    )
    encoder = TokenEncoder(**_read_config(folder / "text_encoder" / "config.json"))
    encoder.load_state_dict(load_file(folder / "text_encoder" / "model.safetensors"))
    decoder = PixelDecoder(**_read_config(folder / "vae" / "config.json"))
    return QwenImageAdapter(
        transformer=transformer,
        prompt_encoder=encoder.requires_grad_(False),
        image_decoder=decoder,
        height=index["height"],
        width=index["width"],
        patch=decoder.patch,
        prediction=SamplePrediction(min_sigma=index["min_sigma"]),
        cache_prompts=True,
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if not key.startswith("_")}
