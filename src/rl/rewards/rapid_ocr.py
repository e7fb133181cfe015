"""The OCR reward with RapidOCR (PaddleOCR's models on ONNX): it reads in process, and its models are in its package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rapidocr import RapidOCR

from src.core.types import Prompt
from src.rl.rewards.ocr import ocr_score, target_text


class RapidOCRReward:
    """1 - edit distance / length between the text that is read and the text that was asked for (see `ocr_score`).

    Args:
        detect: look for lines of text first; off for images that are one line.
        enlarge: whole factor by which images are enlarged before reading: letters of less than about 20 pixels
            are read badly.
        side: longest side, in pixels, that lines are looked for in.
        threads: of the ONNX runtime.
    """

    name = "ocr"

    def __init__(self, *, detect: bool = True, enlarge: int = 1, side: int = 736, threads: int = 1) -> None:
        for field, value in (("enlarge", enlarge), ("side", side), ("threads", threads)):
            if value < 1:
                raise ValueError(f"RapidOCRReward.{field} must be at least 1, got {value}")
        self._detect = detect
        self._enlarge = enlarge
        self._reader = RapidOCR(
            params={
                "Global.log_level": "critical",  # it warns of every image without text
                "Det.limit_type": "max",
                "Det.limit_side_len": side,
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        targets = [target_text(prompt) for prompt in prompts]
        pairs = zip(images_BHWC, targets, strict=True)
        return np.array([ocr_score(self.read(image), target) for image, target in pairs], np.float32)

    def read(self, image_HWC: NDArray[np.uint8]) -> str:
        """All text in a grey or RGB image, line after line."""
        rgb = np.broadcast_to(image_HWC, (*image_HWC.shape[:2], 3))
        if self._enlarge > 1:
            size = (rgb.shape[1] * self._enlarge, rgb.shape[0] * self._enlarge)
            rgb = np.asarray(Image.fromarray(np.ascontiguousarray(rgb)).resize(size, Image.Resampling.BICUBIC))
        bgr = np.ascontiguousarray(rgb[:, :, ::-1])  # the order that OpenCV, and so the reader, expects
        found: Any = self._reader(bgr, use_det=self._detect, use_cls=self._detect, use_rec=True)
        return " ".join(found.txts or ())
