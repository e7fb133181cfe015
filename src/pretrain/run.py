"""Makes the shipped weights again: the base model of a task and, where it reads text, its two recognisers.

assets/tiny_<task>         base model, a folder in diffusers' layout
assets/recogniser_<task>   reads the images for the reward
assets/judge_<task>        reads them independently, for evaluation
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from src.core.seeds import eval_seed
from src.core.types import SampleSpec
from src.models.adapter import DiTAdapter
from src.models.sampler import Sampler
from src.models.schedule import flow_match_schedule
from src.models.steps import ODE
from src.models.tiny import build_tiny, save_pretrained
from src.pretrain.base import train_base
from src.pretrain.recognisers import Distortion, train_recogniser
from src.rl.rewards.recogniser import Recogniser, RecogniserReward
from src.rl.rewards.reward import Reward
from src.rl.rewards.shapes import ShapesAccuracy, ShapesReward
from src.tasks.shapes import ShapesTask
from src.tasks.task import RenderedTask
from src.tasks.text import TextTask

log = logging.getLogger(__name__)


class BuildRecogniser(Protocol):
    """A recogniser's constructor with its widths already given."""

    def __call__(self, *, alphabet: str, height: int) -> Recogniser: ...


@dataclass(frozen=True)
class ReaderRecipe:
    """How a recogniser is made: architecture, distortions of its training images, length of training."""

    build: BuildRecogniser
    distort: Distortion
    steps: int
    seed: int
    samples: int = 12_000


@dataclass(frozen=True)
class BaseRecipe:
    """How a base model is made: its size and how far it is trained. See `build_tiny` and `train_base`."""

    steps: int
    seed: int = 0
    patch: int = 4
    layers: int = 2
    heads: int = 4
    prompt_dropout: float = 0.1
    samples: int = 16_000


def pretrain_text(
    *, task: TextTask, reader: ReaderRecipe, judge: ReaderRecipe, base: BaseRecipe, assets: Path
) -> dict[str, float]:
    """Make recogniser, judge and base model of a text task in `assets`.

    Returns:
        The held-out score of the recogniser ("ocr") and of the judge ("judge") on images of the base model,
        and on true images ("ocr/rendered", "judge/rendered").
    """
    with single_thread():
        rewards = [
            RecogniserReward(name=name, recogniser=make_reader(task, recipe, assets / folder))
            for name, recipe, folder in (
                ("ocr", reader, f"recogniser_{task.name}"),
                ("judge", judge, f"judge_{task.name}"),
            )
        ]
        return make_base(task, base, rewards, assets / f"tiny_{task.name}")


def pretrain_shapes(*, task: ShapesTask, base: BaseRecipe, assets: Path) -> dict[str, float]:
    """Make the base model of the shapes task in `assets`; returns scores as `pretrain_text` does."""
    with single_thread():
        return make_base(task, base, [ShapesReward(), ShapesAccuracy()], assets / f"tiny_{task.name}")


def make_reader(task: TextTask, recipe: ReaderRecipe, folder: Path) -> Recogniser:
    """Train a recogniser and write it to `folder`."""
    log.info("training %s, %d steps", folder.name, recipe.steps)
    recogniser, _ = train_recogniser(
        lambda: recipe.build(alphabet=task.alphabet, height=task.image_size[0]),
        task,
        distort=recipe.distort,
        steps=recipe.steps,
        seed=recipe.seed,
        samples=recipe.samples,
    )
    recogniser.save_pretrained(folder)
    return recogniser


def make_base(task: RenderedTask, recipe: BaseRecipe, rewards: Sequence[Reward], folder: Path) -> dict[str, float]:
    """Train a base model, write it to `folder`, and score it on the held-out prompts."""
    log.info("training %s, %d steps", folder.name, recipe.steps)
    height, width, channels = task.image_size
    adapter = build_tiny(
        vocabulary=task.vocabulary,
        max_tokens=task.max_tokens,
        height=height,
        width=width,
        channels=channels,
        patch=recipe.patch,
        layers=recipe.layers,
        heads=recipe.heads,
        seed=recipe.seed,
    )
    train_base(
        adapter,
        task,
        steps=recipe.steps,
        seed=recipe.seed,
        samples=recipe.samples,
        prompt_dropout=recipe.prompt_dropout,
    )
    save_pretrained(adapter, folder)
    scores = heldout_scores(adapter, task, rewards)
    log.info("%s: %s", folder.name, scores)
    return scores


def heldout_scores(
    adapter: DiTAdapter, task: RenderedTask, rewards: Sequence[Reward], *, steps: int = 6
) -> dict[str, float]:
    """Mean score of each reward over the held-out prompts, of ODE samples with the evaluation seeds and, as
    `<name>/rendered`, of true images."""
    prompts = task.heldout_prompts
    sampler = Sampler(adapter=adapter, rule=ODE(), schedule_for=flow_match_schedule, noise_steps=steps, batch_size=64)
    seeds = [eval_seed(index) for index in range(len(prompts))]
    cond = adapter.encode([prompt.text for prompt in prompts])
    images = adapter.decode(sampler.sample(seeds, cond, SampleSpec(steps=steps)).latents_BLC)
    rng = np.random.default_rng(0)
    rendered = np.stack([task.render(prompt, rng) for prompt in prompts])
    scores = {reward.name: float(reward.score(images, prompts).mean()) for reward in rewards}
    return scores | {f"{r.name}/rendered": float(r.score(rendered, prompts).mean()) for r in rewards}


@contextmanager
def single_thread() -> Iterator[None]:
    """One torch thread inside: sums in another order would make other weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
