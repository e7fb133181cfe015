"""What is tested here is about devices: on the CPU in every run of the tests, on a GPU by `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)

ON_EVERY_DEVICE = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: without a GPU these tests say why they do not run."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device on this machine")


@pytest.fixture(params=ON_EVERY_DEVICE)
def device(request: pytest.FixtureRequest) -> str:
    """The device of what is tested."""
    name: str = request.param
    return name
