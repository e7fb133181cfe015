"""Brings up DeepSpeed in this process: on CPUs too, and without compiling anything."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch


def prepare_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for this kind of device and returns the package. To be called before any group is made."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, at the import
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    # On CPUs its first collective would compile a C++ extension: minutes, and a lock that outlives a killed process.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
