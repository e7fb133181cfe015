import pytest
import torch

from src.models.qwen_image import QwenImageAdapter
from tests.models.lively import lively_adapter

torch.set_num_threads(1)


@pytest.fixture
def adapter() -> QwenImageAdapter:
    return lively_adapter()
