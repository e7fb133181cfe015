"""The GenEval reward: Mask2Former finds the objects, CLIP names their colours, GenEval's rules judge.

GenEval uses the same detector through MMDetection; this one goes through transformers, so scores of single images
may differ in borderline cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from src.core.types import Prompt
from src.rl.rewards.clip import LONGEST_TEXT, load_clip, to_pil
from src.rl.rewards.geneval_rules import ColorsOf, Found, Objects, graded, is_correct
from src.rl.rewards.reward import ScoreError

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COLOR_TEXTS = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
BACKGROUND = 0x99
"""Grey level around an object whose colour is asked for."""

CONFIDENCE, COUNTING_CONFIDENCE = 0.3, 0.9
MOST_OBJECTS = 16

Verdict = Callable[[Objects, Mapping[str, Any], ColorsOf], float]


class Detector(Protocol):
    """Finds objects."""

    def detect(self, image_HWC: NDArray[np.uint8], *, confidence: float) -> Objects: ...


class ColorNamer(Protocol):
    """Names the colours of objects."""

    def colors(self, image_HWC: NDArray[np.uint8], found: Sequence[Found], name: str) -> list[str]: ...


class GenEvalReward:
    """The rules' verdict on what the detector and the colour namer see.

    Args:
        name: of the score.
        detector, colors: the eyes.
        strict: GenEval's own score, 1 for a correct image and 0 for others; false for the graded one.
    """

    def __init__(self, *, detector: Detector, colors: ColorNamer, strict: bool = False, name: str = "geneval") -> None:
        self.name = name
        self._detector = detector
        self._colors = colors
        self._verdict: Verdict = is_correct if strict else graded

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        pairs = zip(images_BHWC, prompts, strict=True)
        return np.array([self._score(image, prompt) for image, prompt in pairs], np.float32)

    def _score(self, image_HWC: NDArray[np.uint8], prompt: Prompt) -> float:
        if "include" not in prompt.metadata:
            raise ScoreError(f"prompt {prompt.id} has no GenEval metadata")
        confidence = COUNTING_CONFIDENCE if prompt.metadata.get("tag") == "counting" else CONFIDENCE
        objects = self._detector.detect(image_HWC, confidence=confidence)

        def colors_of(found: Sequence[Found], name: str) -> list[str]:
            return self._colors.colors(image_HWC, found, name)

        return float(self._verdict(objects, prompt.metadata, colors_of))


def geneval_reward(
    *,
    classes: str | Path,
    detector: str = "facebook/mask2former-swin-small-coco-instance",
    colors: str = "openai/clip-vit-large-patch14",
    device: str = "cpu",
    strict: bool = False,
) -> GenEvalReward:
    """The reward with GenEval's own detector (Swin-S, COCO) and CLIP model, or others of their kind.

    Args:
        classes: see `Mask2FormerDetector`.
        detector, colors: hub ids or folders of a Mask2Former and of a CLIP model.
        device: torch device.
        strict: see `GenEvalReward`.
    """
    return GenEvalReward(
        detector=Mask2FormerDetector(classes=classes, model=detector, device=device),
        colors=CLIPColors(model=colors, device=device),
        strict=strict,
    )


class Mask2FormerDetector:
    """Instance segmentation by a Mask2Former of transformers.

    Args:
        classes: file of GenEval's names of the detector's classes, one a line, in their order.
        model: hub id or folder.
        device: torch device.

    Raises:
        ValueError: the model cannot be loaded, or has another number of classes.
    """

    def __init__(
        self,
        *,
        classes: str | Path,
        model: str,
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        try:
            loaded = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(model, use_safetensors=True)
            self._processor = transformers.AutoImageProcessor.from_pretrained(model)
        except OSError as error:
            raise ValueError(f"Mask2Former {model} cannot be loaded: {str(error).splitlines()[0]}") from error
        self._names = Path(classes).read_text(encoding="utf-8").split("\n")
        self._names = [name for name in self._names if name]
        if len(self._names) != loaded.config.num_labels:
            raise ValueError(f"{classes} names {len(self._names)} classes, {model} has {loaded.config.num_labels}")
        self._model = loaded.eval().requires_grad_(False).to(self._device)

    @torch.no_grad()
    def detect(self, image_HWC: NDArray[np.uint8], *, confidence: float) -> Objects:
        """At most 16 objects of each class, above a confidence."""
        inputs = self._processor(images=to_pil(image_HWC), return_tensors="pt").to(self._device)
        output = self._model(**inputs)
        classes_QC = output.class_queries_logits[0].softmax(dim=-1)[:, :-1]  # the last class is: no object
        logits_QHW = torch.nn.functional.interpolate(
            output.masks_queries_logits, size=image_HWC.shape[:2], mode="bilinear", align_corners=False
        )[0]
        masks_QHW = logits_QHW > 0
        inside_Q = masks_QHW.sum(dim=(1, 2))
        # Confidence in the class times that in the mask, as Mask2Former's own evaluation takes it.
        sure_Q = (logits_QHW.sigmoid() * masks_QHW).sum(dim=(1, 2)) / inside_Q.clamp(min=1)
        scores_QC = classes_QC * sure_Q[:, None]
        found: dict[str, list[tuple[float, Found]]] = {}
        for query, label in (scores_QC > confidence).nonzero().tolist():
            instance = (float(scores_QC[query, label]), _found(masks_QHW[query].cpu().numpy()))
            found.setdefault(self._names[label], []).append(instance)
        return {name: _most_confident(instances) for name, instances in found.items()}


class CLIPColors:
    """The colour of an object as CLIP sees it, on grey, cut out by its mask and box.

    Args:
        model: hub id or folder of a CLIP model.
        device: torch device.
    """

    def __init__(self, *, model: str, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._model, self._processor = load_clip(model, None, None, self._device)
        self._texts: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def colors(self, image_HWC: NDArray[np.uint8], found: Sequence[Found], name: str) -> list[str]:
        """One of COLORS for each object."""
        if name not in self._texts:
            self._texts[name] = self._embed_texts(name)
        crops = [to_pil(_cut_out(image_HWC, one)) for one in found]
        pixels = self._processor(images=crops, return_tensors="pt").to(self._device)
        images_BD = _unit(self._model.get_image_features(**pixels).pooler_output)
        return [COLORS[index] for index in (images_BD @ self._texts[name].T).argmax(dim=-1).tolist()]

    def _embed_texts(self, name: str) -> torch.Tensor:
        """One direction for each colour: the mean of its texts'."""
        rows = []
        for color in COLORS:
            texts = [text.format(color, name) for text in COLOR_TEXTS]
            tokens = self._processor(
                text=texts, padding="max_length", truncation=True, max_length=LONGEST_TEXT, return_tensors="pt"
            ).to(self._device)
            rows.append(_unit(_unit(self._model.get_text_features(**tokens).pooler_output).mean(dim=0)))
        return torch.stack(rows)


def _found(mask_HW: NDArray[np.bool_]) -> Found:
    rows, columns = np.flatnonzero(mask_HW.any(axis=1)), np.flatnonzero(mask_HW.any(axis=0))
    return Found((float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)), mask_HW)


def _most_confident(instances: Sequence[tuple[float, Found]]) -> list[Found]:
    ranked = sorted(instances, key=lambda instance: -instance[0])
    return [found for _, found in ranked[:MOST_OBJECTS]]


def _cut_out(image_HWC: NDArray[np.uint8], found: Found) -> NDArray[np.uint8]:
    left, top, right, bottom = (round(edge) for edge in found.box)
    mask = np.ones(image_HWC.shape[:2], np.bool_) if found.mask_HW is None else found.mask_HW
    on_grey = np.where(mask[:, :, None], image_HWC, np.uint8(BACKGROUND))
    return on_grey[top:bottom, left:right]


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)
