"""Trained LoRA adapters as diffusers and PEFT know them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
from peft import get_peft_model_state_dict
from torch import Tensor, nn

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file that `pipeline.load_lora_weights(folder)` looks for."""


def save_lora(transformer: nn.Module, folder: Path, state: Mapping[str, Tensor] | None = None) -> Path:
    """Write the transformer's LoRA adapter, with its rank and scale, as `folder/pytorch_lora_weights.safetensors`.

    Args:
        state: the adapter's tensors by the names of the transformer's parameters; its own by default.

    Raises:
        ValueError: there is no adapter.
    """
    configs: Mapping[str, Any] = getattr(transformer, "peft_config", {})
    if not configs:
        raise ValueError("the transformer has no LoRA adapter to save")
    ((name, config),) = configs.items()
    layers = get_peft_model_state_dict(transformer, state_dict=dict(state) if state else None, adapter_name=name)
    # Every pipeline with one transformer writes this same format; which class is asked does not matter.
    diffusers.QwenImagePipeline.save_lora_weights(
        folder,
        transformer_lora_layers={key: tensor.detach().cpu().contiguous() for key, tensor in layers.items()},
        transformer_lora_adapter_metadata=_plain(config.to_dict()),
        weight_name=LORA_FILE,
    )
    return folder / LORA_FILE


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold: PEFT keeps module names in sets, whose order changes from process to process."""
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
