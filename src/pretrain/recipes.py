"""The recipes of the shipped weights. Each function makes one task's again, in `assets`.

How far the base models are trained is a choice: they start post-training at a held-out reward of about 0.4,
where there is much to gain (the text model would reach 0.6 by itself in half as many steps again).
"""

from functools import partial
from pathlib import Path

from src.pretrain.recognisers import faint_and_noisy, patchy_and_speckled
from src.pretrain.run import BaseRecipe, ReaderRecipe, pretrain_shapes, pretrain_text
from src.rl.rewards.recogniser import ConvRecogniser, RecurrentRecogniser
from src.tasks.shapes import ShapesTask
from src.tasks.text import TextTask, digits_task


def text(assets: str | Path) -> dict[str, float]:
    """tiny_text, recogniser_text, judge_text: four minutes of one core."""
    return pretrain_text(
        task=TextTask(),
        reader=ReaderRecipe(partial(ConvRecogniser, channels=32), faint_and_noisy, steps=900, seed=1),
        judge=ReaderRecipe(
            partial(RecurrentRecogniser, channels=48, hidden=64), patchy_and_speckled, steps=2500, seed=2
        ),
        base=BaseRecipe(steps=600),
        assets=Path(assets),
    )


def digits(assets: str | Path) -> dict[str, float]:
    """tiny_digits, recogniser_digits, judge_digits: for tests; a minute of one core."""
    return pretrain_text(
        task=digits_task(),
        reader=ReaderRecipe(partial(ConvRecogniser, channels=16), faint_and_noisy, steps=500, seed=1),
        judge=ReaderRecipe(
            partial(RecurrentRecogniser, channels=24, hidden=32), patchy_and_speckled, steps=1500, seed=2
        ),
        base=BaseRecipe(steps=800, heads=2),
        assets=Path(assets),
    )


def shapes(assets: str | Path) -> dict[str, float]:
    """tiny_shapes: half a minute of one core."""
    return pretrain_shapes(task=ShapesTask(), base=BaseRecipe(steps=200), assets=Path(assets))
