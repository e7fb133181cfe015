"""torch.compile as an option."""

from __future__ import annotations

from torch import nn


def compile_blocks(transformer: nn.Module) -> None:
    """Compile the repeated blocks of a diffusers transformer in place, each at its first call.

    Blocks rather than the whole model, because equal blocks share one compilation. Compiled and plain blocks
    differ in the last bits, so either all processes of a run compile or none.
    """
    transformer.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
