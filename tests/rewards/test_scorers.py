"""Scorers that run in process: sums, pools, JPEG, OCR, and CLIP and GenEval on tiny random weights."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from src.core.types import Prompt
from src.rl.rewards.clip import CLIPModelReward, clip_score, load_clip, pick_score
from src.rl.rewards.combine import Term, WeightedSum
from src.rl.rewards.function import FunctionReward
from src.rl.rewards.geneval import COLORS, CLIPColors, Mask2FormerDetector, geneval_reward
from src.rl.rewards.geneval_rules import Found
from src.rl.rewards.jpeg import JPEGCompressibility, JPEGIncompressibility, jpeg_bytes
from src.rl.rewards.pool import ProcessPool
from src.rl.rewards.reward import Score, ScoreError, score_samples
from src.tasks.text import font_folder
from tests.rewards.mean import Mean
from tests.rewards.tiny_weights import save_clip, save_detector

PROMPTS = [Prompt(0, "a photo of two red apples"), Prompt(1, "a photo of a cat below a chair")]


def images(seed: int = 0, batch: int = 2, side: int = 40) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (batch, side, side, 3), dtype=np.uint8)


# ---------------------------------------------------------------- sums


def test_a_weighted_sum_normalises_each_term():
    both = WeightedSum(
        terms={
            "mean": Term(reward=Mean(), weight=0.5, offset=100, scale=20),
            "jpeg": Term(reward=JPEGIncompressibility(), weight=-2.0),
        }
    )
    assert both.name == "mean+jpeg"
    expected = [0.5 * (i.mean() - 100) / 20 - 2 * jpeg_bytes(i) / 1000 for i in images()]
    assert both.score(images(), PROMPTS).tolist() == pytest.approx(expected, rel=1e-6)


def test_terms_are_told_as_their_rewards_scored_them_and_what_one_cannot_score_has_no_score():
    bright_and_dark = np.stack([np.full((4, 4, 3), 200, np.uint8), np.zeros((4, 4, 3), np.uint8)])
    both = WeightedSum(
        terms={"mean": Term(reward=Mean(darkest=10)), "jpeg": Term(reward=JPEGCompressibility(), weight=0.0)}
    )
    good, bad = score_samples(both, bright_and_dark, PROMPTS)
    assert isinstance(good, Score)
    assert good.value == 200.0
    assert good.terms == {"mean": 200.0, "jpeg": pytest.approx(-jpeg_bytes(bright_and_dark[0]) / 1000)}
    assert isinstance(bad, ScoreError)


def test_terms_are_checked():
    for bad in ({"scale": 0.0}, {"scale": math.inf}, {"weight": math.nan}, {"offset": math.inf}):
        with pytest.raises(ValueError, match=r"Term\."):
            Term(reward=Mean(), **bad)
    with pytest.raises(ValueError, match=r"WeightedSum\.terms"):
        WeightedSum(terms={})


# ---------------------------------------------------------------- processes


@pytest.mark.timeout(60)
def test_a_pool_scores_as_one_scorer_does_and_survives_a_dead_process():
    pool = ProcessPool(name="mean", reward=functools.partial(Mean, darkest=10.0), processes=2)
    try:
        assert pool.score(images(), PROMPTS).tolist() == Mean().score(images(), PROMPTS).tolist()
        with pytest.raises(ScoreError, match="too dark"):
            pool.score(np.zeros((1, 4, 4, 3), np.uint8), PROMPTS[:1])
        with pytest.raises(ScoreError, match="mean: a scorer process died"):
            pool.score(np.full((1, 4, 4, 3), 255, np.uint8), PROMPTS[:1])
        assert pool.score(images(1), PROMPTS).tolist() == Mean().score(images(1), PROMPTS).tolist()
        pool._timeout_s = 0.5
        with pytest.raises(ScoreError, match=r"or was silent for 0\.5 s"):
            pool.score(np.full((1, 4, 4, 3), 254, np.uint8), PROMPTS[:1])
    finally:
        pool.close()
    with pytest.raises(ValueError, match=r"ProcessPool\.processes must be at least 1, got 0"):
        ProcessPool(name="mean", reward=Mean, processes=0)


@pytest.mark.timeout(60)
def test_why_a_scorer_of_a_pool_cannot_be_made_is_told(tmp_path: Path):
    make = functools.partial(geneval_reward, classes=tmp_path / "classes.txt", detector=str(tmp_path))
    pool = ProcessPool(name="geneval", reward=make, processes=1)
    try:
        with pytest.raises(ValueError, match=r"Mask2Former .* cannot be loaded"):
            pool.score(images(), PROMPTS)
    finally:
        pool.close()


def test_a_function_is_a_reward():
    def longest(images_BHWC, prompts, metadata):
        return [
            len(text) + known.get("bonus", 0) + image.max()
            for image, text, known in zip(images_BHWC, prompts, metadata, strict=True)
        ]

    reward = FunctionReward(name="longest", function=longest)
    scores = reward.score(np.zeros((2, 2, 2, 3), np.uint8), [Prompt(0, "ab"), Prompt(1, "a", {"bonus": 5})])
    assert (reward.name, scores.dtype, scores.tolist()) == ("longest", np.float32, [2.0, 6.0])


# ---------------------------------------------------------------- JPEG and OCR


def test_jpeg_scores_are_the_size_of_the_file():
    flat = np.full((1, 64, 64, 3), 90, np.uint8)
    noisy, grey = images(batch=1, side=64), images(batch=1, side=64)[..., :1]
    assert jpeg_bytes(flat[0]) < jpeg_bytes(grey[0]) < jpeg_bytes(noisy[0])
    assert JPEGIncompressibility().score(noisy, PROMPTS[:1]).tolist() == pytest.approx([jpeg_bytes(noisy[0]) / 1000])
    assert JPEGCompressibility().score(noisy, PROMPTS[:1]).tolist() == pytest.approx([-jpeg_bytes(noisy[0]) / 1000])


def drawn(text: str, ink: tuple[int, int, int], paper: tuple[int, int, int]) -> NDArray[np.uint8]:
    image = Image.new("RGB", (320, 128), paper)
    font = ImageFont.truetype(str(font_folder() / "DejaVuSans-Bold.ttf"), 40)
    ImageDraw.Draw(image).text((30, 40), text, fill=ink, font=font)
    return np.asarray(image)


@pytest.mark.timeout(60)
def test_ocr_reads_what_is_written():
    from src.rl.rewards.rapid_ocr import RapidOCRReward

    reward = RapidOCRReward(side=320)
    written = np.stack([drawn("Fresh Bread", (255, 0, 0), (0, 0, 0)), drawn("Bread", (0, 0, 0), (250, 250, 250))])
    prompts = [Prompt(0, "a", {"target": "Fresh Bread"}), Prompt(1, "b", {"target": "Open"})]
    assert reward.read(written[0]).replace(" ", "") == "FreshBread"
    right, wrong = reward.score(written, prompts).tolist()
    assert right == 1.0
    assert wrong < 0.5
    blank = np.zeros((1, 64, 64, 3), np.uint8)
    assert reward.score(blank, prompts[1:]).tolist() == [0.0], "nothing read is a score, not an error"
    with pytest.raises(ScoreError, match="prompt 0 has no target"):
        reward.score(blank, PROMPTS[:1])
    small = drawn("OPEN", (255, 255, 255), (0, 0, 0))[::4, ::4, :1]
    assert RapidOCRReward(enlarge=4).score(small[None], prompts[1:]).tolist() == [1.0]


# ---------------------------------------------------------------- CLIP


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"), [prompt.text for prompt in PROMPTS])


def expected_cosines(folder: Path, pictures: NDArray[np.uint8]) -> list[float]:
    """By hand: the two towers, one image and text at a time."""
    model, processor = load_clip(str(folder), None, None, torch.device("cpu"))
    cosines = []
    for image, prompt in zip(pictures, PROMPTS, strict=True):
        pixels = processor(images=Image.fromarray(image), return_tensors="pt")
        tokens = processor(text=prompt.text, padding="max_length", max_length=77, return_tensors="pt")
        one = model.get_image_features(**pixels).pooler_output[0]
        other = model.get_text_features(**tokens).pooler_output[0]
        cosines.append(float(torch.nn.functional.cosine_similarity(one, other, dim=0)))
    return cosines


def test_clip_score_and_pick_score(clip_folder: Path):
    cosines = expected_cosines(clip_folder, images())
    score = clip_score(model=str(clip_folder))
    assert score.score(images(), PROMPTS).tolist() == pytest.approx(cosines, abs=1e-6)
    assert abs(cosines[0] - cosines[1]) > 1e-3
    pick = pick_score(model=str(clip_folder), processor=str(clip_folder))
    scale = math.exp(2.6592)  # CLIP's initial logit scale
    assert pick.score(images(), PROMPTS).tolist() == pytest.approx([scale * c / 26 for c in cosines], rel=1e-4)
    long = [Prompt(0, "a photo of two red apples " * 40)]
    assert np.isfinite(score.score(images(batch=1), long)).all()
    with pytest.raises(ValueError, match="divisor must be positive"):
        CLIPModelReward(name="x", model=str(clip_folder), divisor=0)


def test_a_missing_model_is_one_clear_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"CLIP model .* cannot be loaded"):
        clip_score(model=str(tmp_path))
    with pytest.raises(ValueError, match=r"Mask2Former .* cannot be loaded"):
        Mask2FormerDetector(model=str(tmp_path), classes=tmp_path / "classes.txt")


# ---------------------------------------------------------------- GenEval's eyes


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_detector(tmp_path_factory.mktemp("mask2former"), classes=3)
    (folder / "classes.txt").write_text("cat\ndog\ncomputer mouse\n")
    return folder


def test_the_detector_gives_boxes_and_masks_of_the_image_s_size(detector_folder: Path):
    detector = Mask2FormerDetector(model=str(detector_folder), classes=detector_folder / "classes.txt")
    image = images(batch=1)[0, :, :32]
    everything = detector.detect(image, confidence=0.0)
    assert set(everything) == {"cat", "dog", "computer mouse"}
    for found in everything.values():
        for one in found:
            assert one.mask_HW is not None
            assert one.mask_HW.shape == (40, 32)
            left, top, right, bottom = one.box
            assert one.mask_HW[int(top) : int(bottom), int(left) : int(right)].sum() == one.mask_HW.sum() > 0
    assert detector.detect(image, confidence=1.0) == {}
    (detector_folder / "fewer.txt").write_text("cat\n")
    with pytest.raises(ValueError, match=r"names 1 classes, .* has 3"):
        Mask2FormerDetector(model=str(detector_folder), classes=detector_folder / "fewer.txt")


def test_colours_are_named_from_the_object_s_own_pixels(clip_folder: Path):
    namer = CLIPColors(model=str(clip_folder))
    mask = np.zeros((40, 40), np.bool_)
    mask[5:20, 5:25] = True
    found = [Found((5, 5, 25, 20), mask)]
    image = images(batch=1)[0]
    (color,) = namer.colors(image, found, "cat")
    assert color in COLORS
    outside = np.where(mask[:, :, None], image, 0).astype(np.uint8)
    assert namer.colors(outside, found, "cat") == [color], "what lies outside the mask does not matter"


def test_the_whole_reward_runs_on_random_weights(clip_folder: Path, detector_folder: Path):
    reward = geneval_reward(
        classes=detector_folder / "classes.txt", detector=str(detector_folder), colors=str(clip_folder)
    )
    metadata = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]}
    scores = reward.score(images(), [Prompt(i, "a photo of a red cat", metadata) for i in range(2)])
    assert scores.shape == (2,)
    assert ((scores >= 0) & (scores <= 1)).all()
