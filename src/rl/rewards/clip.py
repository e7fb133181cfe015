"""Rewards from a CLIP model: similarity of image and prompt, and PickScore's learned preference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from src.core.types import Prompt

LONGEST_TEXT = 77
"""Tokens that CLIP reads; the rest is cut."""


class CLIPModelReward:
    """scale x cosine of the embeddings of image and text.

    Args:
        name: of the score.
        model: hub id or folder of a CLIP model.
        processor: hub id or folder of its tokenizer and image processor; the model's own by default.
        revision: of the model on the hub.
        device: torch device, such as "cuda".
        scale: factor; None for the model's own (the exponential of its logit scale).
        divisor: what the score is divided by, to bring it near 1.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        processor: str | None = None,
        revision: str | None = None,
        device: str = "cpu",
        scale: float | None = 1.0,
        divisor: float = 1.0,
    ) -> None:
        if not divisor > 0:
            raise ValueError(f"CLIPModelReward.divisor must be positive, got {divisor}")
        self.name = name
        self._device = torch.device(device)
        self._model, self._processor = load_clip(model, processor, revision, self._device)
        self._scale = float(self._model.logit_scale.exp()) if scale is None else scale
        self._divisor = divisor

    @torch.no_grad()
    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        inputs = self._processor(
            images=[to_pil(image) for image in images_BHWC],
            text=[prompt.text for prompt in prompts],
            padding="max_length",
            truncation=True,
            max_length=LONGEST_TEXT,
            return_tensors="pt",
        ).to(self._device)
        embedded = self._model(**inputs)  # both are of length 1
        cosine_B = (embedded.image_embeds * embedded.text_embeds).sum(dim=-1)
        scores_B: NDArray[np.float32] = (self._scale * cosine_B / self._divisor).float().cpu().numpy()
        return scores_B


def clip_score(*, model: str = "openai/clip-vit-large-patch14", **settings: Any) -> CLIPModelReward:
    """The cosine (CLIPScore, arXiv 2104.08718)."""
    return CLIPModelReward(name="clip_score", model=model, **settings)


def pick_score(
    *,
    model: str = "yuvalkirstain/PickScore_v1",
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    **settings: Any,
) -> CLIPModelReward:
    """PickScore (arXiv 2305.01569), divided by 26 as in Flow-GRPO: good images are near 0.85."""
    return CLIPModelReward(name="pick_score", model=model, processor=processor, scale=None, divisor=26.0, **settings)


def load_clip(model: str, processor: str | None, revision: str | None, device: torch.device) -> tuple[Any, Any]:
    """A frozen CLIP model and its processor.

    Raises:
        ValueError: there is none at that place, or it cannot be downloaded.
    """
    try:
        loaded = transformers.CLIPModel.from_pretrained(model, revision=revision, use_safetensors=True)
        prepared = transformers.CLIPProcessor.from_pretrained(processor or model)
    except OSError as error:
        raise ValueError(f"CLIP model {model} cannot be loaded: {str(error).splitlines()[0]}") from error
    return loaded.eval().requires_grad_(False).to(device), prepared


def to_pil(image_HWC: NDArray[np.uint8]) -> Image.Image:
    """An RGB picture of a grey or RGB array."""
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(image_HWC, (*image_HWC.shape[:2], 3))))
