"""When frozen parts are on the working device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from src.models.frozen import Resting

GPU = torch.device("cuda")


class Travelling(nn.Module):
    """Writes down where it is sent; no such device is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device) -> Travelling:  # type: ignore[override]
        self.places.append(device.type)
        return self


def test_what_rests_in_host_memory_is_on_the_device_only_while_it_is_used() -> None:
    module = Travelling()
    resting = Resting([module], offload=True)
    resting.to(GPU)
    assert module.places == []
    with resting.awake() as device:
        assert (device, module.places) == (GPU, ["cuda"])
    assert module.places == ["cuda", "cpu"]
    with pytest.raises(RuntimeError, match="memory"), resting.awake():
        raise RuntimeError("no memory")
    assert module.places == ["cuda", "cpu"] * 2


def test_what_does_not_rest_stays_on_the_device() -> None:
    module = Travelling()
    resting = Resting([module], offload=False)
    resting.to(GPU)
    for _ in range(2):
        with resting.awake() as device:
            assert device == GPU
    assert module.places == ["cuda"]
