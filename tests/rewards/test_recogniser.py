from pathlib import Path

import numpy as np
import pytest
import torch

from src.core.types import Prompt
from src.rl.rewards.recogniser import ConvRecogniser, Recogniser, RecogniserReward, RecurrentRecogniser
from src.rl.rewards.reward import ScoreError
from src.tasks.text import TextTask, digits_task

ASSETS = Path(__file__).parents[2] / "assets"
TASKS = {"text": TextTask(), "digits": digits_task()}


def shipped(role: str, task: TextTask) -> RecogniserReward:
    kind: type[Recogniser] = {"recogniser": ConvRecogniser, "judge": RecurrentRecogniser}[role]
    return RecogniserReward(name=role, recogniser=kind.from_pretrained(ASSETS / f"{role}_{task.name}"))


def heldout_renders(task: TextTask) -> tuple[np.ndarray, list[Prompt]]:
    rng = np.random.default_rng(9)
    prompts = list(task.heldout_prompts)
    return np.stack([task.render(prompt, rng) for prompt in prompts]), prompts


@pytest.mark.parametrize("role", ["recogniser", "judge"])
@pytest.mark.parametrize("name", TASKS)
def test_shipped_readers_read_true_images_of_heldout_strings(role: str, name: str) -> None:
    images, prompts = heldout_renders(TASKS[name])
    reward = shipped(role, TASKS[name])
    assert reward.score(images, prompts).mean() > 0.98
    assert reward.score(images, prompts[1:] + prompts[:1]).mean() < 0.15
    noisy = np.clip(images + np.random.default_rng(1).normal(0, 25, images.shape), 0, 255).astype(np.uint8)
    assert reward.score(noisy, prompts).mean() > 0.9


def test_the_judge_errs_independently_of_the_reward() -> None:
    """Where noise makes both misread an image, they rarely read the same wrong string into it."""
    images, prompts = heldout_renders(TASKS["text"])
    noise = np.random.default_rng(2).normal(0, 80, images.shape)
    garbled = np.clip(images + noise, 0, 255).astype(np.uint8)
    ours, judges = (shipped(role, TASKS["text"]).recogniser.read(garbled) for role in ("recogniser", "judge"))
    misread = [(a, b) for a, b, p in zip(ours, judges, prompts, strict=True) if p.text not in (a, b)]
    assert len(misread) > 50
    assert np.mean([a == b for a, b in misread]) < 0.2


def test_a_blank_image_reads_as_nothing() -> None:
    task = TASKS["text"]
    black = np.zeros((2, *task.image_size), np.uint8)
    for role in ("recogniser", "judge"):
        assert shipped(role, task).recogniser.read(black) == ["", ""]


class Scripted(Recogniser):
    """Gives a fixed class to each column, whatever the image."""

    def __init__(self, *, alphabet: str, classes: list[int]) -> None:
        super().__init__(alphabet=alphabet)
        self.classes = classes

    def forward(self, pixels_BCHW: torch.Tensor) -> torch.Tensor:
        one_hot = torch.nn.functional.one_hot(torch.tensor(self.classes), len(self.alphabet) + 1)
        return one_hot.float().expand(len(pixels_BCHW), -1, -1)


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        ([0, 0, 0], ""),
        ([1, 1, 2], "AB"),  # repeats merge
        ([1, 0, 1], "AA"),  # a blank parts them
        ([0, 2, 2, 0, 0, 2, 1], "BBA"),
        ([3, 3, 3], "C"),
    ],
)
def test_ctc_decoding(classes: list[int], text: str) -> None:
    assert Scripted(alphabet="ABC", classes=classes).read(np.zeros((1, 4, 4, 1), np.uint8)) == [text]


def test_a_reader_survives_saving(tmp_path: Path) -> None:
    for build in (
        lambda: ConvRecogniser(alphabet="AB", height=8, channels=4),
        lambda: RecurrentRecogniser(alphabet="AB", height=8, channels=4, hidden=3),
    ):
        made = build().eval()
        made.save_pretrained(tmp_path)
        loaded = type(made).from_pretrained(tmp_path)
        pixels = torch.rand(2, 1, 8, 16)
        assert torch.equal(made(pixels), loaded(pixels))
        assert not loaded.training


def test_a_prompt_without_a_target_is_a_failure_and_no_zero() -> None:
    reward = RecogniserReward(name="ocr", recogniser=Scripted(alphabet="AB", classes=[1]))
    with pytest.raises(ScoreError):
        reward.score(np.zeros((1, 4, 4, 1), np.uint8), [Prompt(id=0, text="A")])
