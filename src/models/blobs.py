"""Tensors on the wire: `Blob` <-> torch, bit-exact (bfloat16 has no NumPy type, so it goes as int16)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.core.types import Blob

_AS_INTEGER = {torch.bfloat16: torch.int16}


def to_blob(tensor: Tensor) -> Blob:
    """Copies a tensor of any device into a `Blob`."""
    host = tensor.detach().to("cpu").contiguous()
    view = host.view(_AS_INTEGER.get(host.dtype, host.dtype))
    return Blob(str(host.dtype).removeprefix("torch."), tuple(host.shape), view.numpy().tobytes())


def from_blob(blob: Blob) -> Tensor:
    """The tensor of a `Blob`, on the host, with memory of its own."""
    dtype = getattr(torch, blob.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"Blob.dtype must name a torch dtype, got {blob.dtype!r}")
    flat = torch.frombuffer(bytearray(blob.buffer), dtype=dtype) if blob.buffer else torch.empty(0, dtype=dtype)
    return flat.reshape(blob.shape)
