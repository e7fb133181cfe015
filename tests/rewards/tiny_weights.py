"""Tiny random CLIP and Mask2Former models on disk, as their published ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def save_clip(folder: Path, texts: list[str]) -> Path:
    """A CLIP whose tokenizer is trained on a few texts."""
    tokenizer = transformers.CLIPTokenizer().train_new_from_iterator([texts], 400)
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    heads = {"num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.CLIPConfig(
            text_config=text | special | heads, vision_config=vision | heads, projection_dim=8
        )
        transformers.CLIPModel(config).save_pretrained(folder)
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPProcessor(transformers.CLIPImageProcessor(**size), tokenizer).save_pretrained(folder)
    return folder


def save_detector(folder: Path, classes: int) -> Path:
    """A Mask2Former of so many classes."""
    stages = [f"stage{number}" for number in range(1, 5)]
    swin = transformers.SwinConfig(
        image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=4, out_features=stages
    )
    sizes: dict[str, Any] = {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32}
    layers: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 6}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.Mask2FormerConfig(
            backbone_config=swin, encoder_feedforward_dim=32, dim_feedforward=32, num_labels=classes, **sizes, **layers
        )
        transformers.Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    transformers.Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder
