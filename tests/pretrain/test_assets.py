from pathlib import Path

import pytest

from src.models.load import load_adapter
from src.pretrain.run import heldout_scores
from src.rl.rewards.recogniser import ConvRecogniser, RecogniserReward
from src.rl.rewards.reward import Reward
from src.rl.rewards.shapes import ShapesReward
from src.tasks.shapes import ShapesTask
from src.tasks.task import RenderedTask
from src.tasks.text import TextTask, digits_task

ASSETS = Path(__file__).parents[2] / "assets"


def ocr(name: str) -> Reward:
    return RecogniserReward(name="ocr", recogniser=ConvRecogniser.from_pretrained(ASSETS / f"recogniser_{name}"))


@pytest.mark.parametrize(
    ("task", "reward", "start"),
    [
        (TextTask(), ocr("text"), 0.452),
        (digits_task(), ocr("digits"), 0.335),
        (ShapesTask(), ShapesReward(), 0.670),
    ],
    ids=["text", "digits", "shapes"],
)
def test_shipped_base_models_start_where_the_documents_say(task: RenderedTask, reward: Reward, start: float) -> None:
    """Held-out reward of ODE samples with the evaluation seeds; the margin allows for other CPUs."""
    adapter = load_adapter(ASSETS / f"tiny_{task.name}")
    assert adapter.image_size == task.image_size[:2]
    assert heldout_scores(adapter, task, [reward])[reward.name] == pytest.approx(start, abs=0.02)


def test_all_shipped_weights_together_are_small() -> None:
    sizes = [path.stat().st_size for path in ASSETS.rglob("*.safetensors")]
    assert len(sizes) == 10
    assert sum(sizes) < 20_000_000
