"""Plain image statistics. A policy that games its reward often moves them: edges vanish, for one."""

import numpy as np
from numpy.typing import NDArray


def image_statistics(images_BHWC: NDArray[np.uint8]) -> dict[str, float]:
    """Statistics over a batch, each averaged over its images, with pixel values in [0, 1].

    Returns:
        `mean` and `std` of the pixels of an image; `edge_energy`, the mean squared difference of neighbouring
        pixels; `saturation`, the mean of max - min over the colour channels (0 for grayscale).
    """
    pixels = images_BHWC.astype(np.float64) / 255.0
    across, down = np.diff(pixels, axis=2), np.diff(pixels, axis=1)
    return {
        "mean": float(pixels.mean()),
        "std": float(pixels.std(axis=(1, 2, 3)).mean()),
        "edge_energy": float((across**2).mean() + (down**2).mean()),
        "saturation": float((pixels.max(axis=3) - pixels.min(axis=3)).mean()),
    }
