"""A tiny model for tests."""

import torch

from src.models.qwen_image import QwenImageAdapter
from src.models.tiny import build_tiny


def lively_adapter(seed: int = 0, height: int = 12, width: int = 24) -> QwenImageAdapter:
    """Random weights everywhere: a fresh model has zero output layers and ignores its input."""
    adapter = build_tiny(
        vocabulary="abcd", max_tokens=4, height=height, width=width, channels=1, layers=1, heads=2, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return adapter
