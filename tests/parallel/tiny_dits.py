"""Small random models of every family that sequence parallelism knows, with inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


def qwen_image(heads: int, grid: tuple[int, int], text: int, batch: int = 2) -> tuple[nn.Module, Inputs]:
    """With prompts of different lengths: the last one is shorter by a third."""
    torch.manual_seed(0)
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=12,
        axes_dims_rope=(2, 2, 4),
    )
    length = grid[0] * grid[1]
    mask_BL = torch.ones(batch, text, dtype=torch.bool)
    mask_BL[-1, text - text // 3 :] = False
    return model, {
        "hidden_states": torch.randn(batch, length, 4),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "encoder_hidden_states_mask": mask_BL,
        "timestep": torch.linspace(0.3, 0.7, batch),
        "img_shapes": [[(1, *grid)]] * batch,
    }


def flux(heads: int, grid: tuple[int, int], text: int, batch: int = 2) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    )
    rows, columns = grid
    ids_L3 = torch.stack([torch.zeros(rows * columns), *_positions(rows, columns)], dim=1)
    return model, {
        "hidden_states": torch.randn(batch, rows * columns, 4),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "pooled_projections": torch.randn(batch, 6),
        "timestep": torch.linspace(0.3, 0.7, batch),
        "img_ids": ids_L3,
        "txt_ids": torch.zeros(text, 3),
    }


def sd3(heads: int, grid: tuple[int, int], text: int, batch: int = 2) -> tuple[nn.Module, Inputs]:
    """The first block has a second attention of the image alone, as in SD 3.5; the last one drops the text."""
    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(
        sample_size=2 * max(grid),
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=12,
        caption_projection_dim=8 * heads,
        pooled_projection_dim=6,
        out_channels=4,
        pos_embed_max_size=2 * max(grid),
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return model, {
        "hidden_states": torch.randn(batch, 4, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "pooled_projections": torch.randn(batch, 6),
        "timestep": torch.linspace(0.3, 0.7, batch),
    }


FAMILIES: Mapping[str, Callable[..., tuple[nn.Module, Inputs]]] = {"qwen_image": qwen_image, "flux": flux, "sd3": sd3}


def cast(inputs: Inputs, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Tensors on another device, those of floating-point numbers in another dtype too."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


@contextmanager
def rotary_in(dtype: torch.dtype) -> Iterator[None]:
    """Has Qwen-Image rotate queries and keys in `dtype`.

    diffusers always rounds them to single precision there, which turns a difference in the last bit of a double
    into one of 1e-7 now and then.
    """

    def rotate(x: Tensor, freqs_cis: Tensor, use_real: bool) -> Tensor:
        pairs = torch.view_as_complex(x.to(dtype).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis.unsqueeze(1)).flatten(3).type_as(x)

    modules = ("diffusers.models.transformers.transformer_qwenimage", "src.parallel.families")
    with patch(f"{modules[0]}.apply_rotary_emb_qwen", rotate), patch(f"{modules[1]}.apply_rotary_emb_qwen", rotate):
        yield


def _positions(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return row.flatten().float(), column.flatten().float()
