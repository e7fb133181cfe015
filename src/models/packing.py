"""Latents as tokens: each token is a square of `patch` x `patch` latent pixels, channel by channel, row by row."""

from __future__ import annotations

import torch


def pack(latents_BCHW: torch.Tensor, *, patch: int = 2) -> torch.Tensor:
    """[B, C, H, W] -> [B, (H / patch) (W / patch), C patch patch]."""
    batch, channels, height, width = latents_BCHW.shape
    squares = latents_BCHW.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def unpack(latents_BLC: torch.Tensor, *, rows: int, columns: int, patch: int = 2) -> torch.Tensor:
    """The inverse of `pack`, for L = rows x columns tokens."""
    batch, _, values = latents_BLC.shape
    channels = values // (patch * patch)
    squares = latents_BLC.reshape(batch, rows, columns, channels, patch, patch)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * patch, columns * patch)
