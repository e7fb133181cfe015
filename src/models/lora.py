"""LoRA adapters. Imported only by jobs that train one: peft is slow to load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from src.models.adapter import DiTAdapter


def apply_lora(
    transformer: nn.Module, *, rank: int, alpha: float, target_modules: Sequence[str], seed: int = 0
) -> None:
    """Put LoRA layers into the transformer and freeze everything else: y = W x + (alpha / rank) B A x.

    B starts at zero, so the model computes what it did before, bit for bit. A and B are fp32 whatever the
    model is: small steps would be lost in the rounding of bf16.

    Args:
        transformer: changed in place.
        rank: rows of A.
        alpha: scale.
        target_modules: endings of the names of the linear layers to adapt, such as "attn.to_q".
        seed: of A's initial values; equal in all processes.

    Raises:
        ValueError: the rank is not positive, or nothing is called like the targets.
    """
    if rank < 1:
        raise ValueError(f"lora rank must be at least 1, got {rank}")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(target_modules))
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, transformer)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


class LoRAOff:
    """The base model under a LoRA adapter, as a reference (`models.reference.Reference`): costs no memory."""

    @contextmanager
    def active(self, adapter: DiTAdapter) -> Iterator[None]:
        layers = _lora_layers(adapter.transformer)
        for layer in layers:
            layer.enable_adapters(False)
        try:
            with torch.no_grad():
                yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def _lora_layers(transformer: nn.Module) -> list[BaseTunerLayer]:
    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
