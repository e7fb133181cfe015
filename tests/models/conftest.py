from pathlib import Path

import pytest
import torch

from src.models.qwen_image import QwenImageAdapter
from tests.models import published
from tests.models.lively import lively_adapter

torch.set_num_threads(1)


@pytest.fixture
def adapter() -> QwenImageAdapter:
    return lively_adapter()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model folder of each published family."""
    root = tmp_path_factory.mktemp("published")
    return {family: published.save(family, root / family) for family in published.FAMILIES}
