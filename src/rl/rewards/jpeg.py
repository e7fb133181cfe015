"""How well an image compresses: a reward that needs no weights (DDPO, arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from src.core.types import Prompt

QUALITY = 95
KILOBYTE = 1000


def jpeg_bytes(image_HWC: NDArray[np.uint8]) -> int:
    """Size of the image as a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(image_HWC.squeeze(-1) if image_HWC.shape[-1] == 1 else image_HWC).save(
        buffer, format="JPEG", quality=QUALITY
    )
    return buffer.tell()


class JPEGIncompressibility:
    """The size as a JPEG file in kilobytes."""

    name = "jpeg_incompressibility"

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        return np.array([jpeg_bytes(image) / KILOBYTE for image in images_BHWC], np.float32)


class JPEGCompressibility:
    """Minus the size as a JPEG file in kilobytes."""

    name = "jpeg_compressibility"

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        return np.array([-jpeg_bytes(image) / KILOBYTE for image in images_BHWC], np.float32)
