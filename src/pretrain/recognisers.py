"""Training of the text recognisers on rendered strings with random distortions."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from src.rl.rewards.recogniser import BLANK, Recogniser, to_pixels
from src.tasks.text import TextTask

Distortion = Callable[[Tensor, np.random.Generator], Tensor]
"""pixels_BCHW in [0, 1], generator -> distorted pixels_BCHW."""


def uniform(rng: np.random.Generator, batch: int, low: float, high: float) -> Tensor:
    """One number per image, shaped to broadcast over BCHW."""
    return torch.from_numpy(rng.uniform(low, high, (batch, 1, 1, 1)).astype(np.float32))


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise drawn on the host, equal on every machine."""
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def faint_and_noisy(pixels_BCHW: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur, dim, shift the background and add noise: what samples of an early model look like."""
    batch = len(pixels_BCHW)
    blur = uniform(rng, batch, 0.0, 0.5)
    pixels = (1 - blur) * pixels_BCHW + blur * F.avg_pool2d(pixels_BCHW, 3, stride=1, padding=1)
    pixels = pixels * uniform(rng, batch, 0.55, 1.0) + uniform(rng, batch, -0.05, 0.05)
    pixels = pixels + uniform(rng, batch, 0.0, 0.09) * normal(rng, tuple(pixels.shape))
    return pixels.clamp(0.0, 1.0)


def patchy_and_speckled(pixels_BCHW: Tensor, rng: np.random.Generator) -> Tensor:
    """Change the gamma, flip single pixels, grey out 2x2 patches: other faults than `faint_and_noisy`."""
    batch, _, height, width = pixels_BCHW.shape
    pixels = pixels_BCHW ** uniform(rng, batch, 0.5, 2.0)
    flipped = torch.from_numpy(rng.random(pixels.shape, np.float32)) < uniform(rng, batch, 0.0, 0.04)
    pixels = torch.where(flipped, 1.0 - pixels, pixels)
    coarse = torch.from_numpy(rng.random((batch, 1, height // 2, width // 2), np.float32))
    greyed = F.interpolate(coarse, scale_factor=2.0, mode="nearest") < uniform(rng, batch, 0.0, 0.06)
    pixels = torch.where(greyed, 0.5 * pixels + 0.25, pixels)
    return (pixels + 0.03 * normal(rng, tuple(pixels.shape))).clamp(0.0, 1.0)


def rendered_strings(
    task: TextTask, count: int, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """`count` images [B, H, W, 1] of strings that are not held out, and their CTC classes [B, length]."""
    prompts = [task.sample_prompt(rng) for _ in range(count)]
    images = np.stack([task.render(prompt, rng) for prompt in prompts])
    classes = np.array([[task.alphabet.index(symbol) + 1 for symbol in prompt.text] for prompt in prompts])
    return images, classes


def train_recogniser(
    build: Callable[[], Recogniser],
    task: TextTask,
    *,
    distort: Distortion,
    steps: int,
    seed: int,
    samples: int,
    batch_size: int = 96,
    lr: float = 3e-3,
) -> tuple[Recogniser, list[float]]:
    """Train a recogniser with the CTC loss, AdamW and a learning rate that falls linearly to 0.

    The result is a function of the arguments alone, on one machine with one thread count: data and
    distortions come from a NumPy generator, initial weights from torch's, seeded and restored around `build`.

    Returns:
        The recogniser, in evaluation mode, and the loss of each step.
    """
    rng = np.random.default_rng(seed)
    images, classes = rendered_strings(task, samples, rng)
    pixels_BCHW, classes_BL = to_pixels(images), torch.from_numpy(classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        recogniser = build().train()
    optimizer = torch.optim.AdamW(recogniser.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    losses = []
    for _ in range(steps):
        index = torch.from_numpy(rng.integers(samples, size=batch_size))
        log_probs_BLK = recogniser(distort(pixels_BCHW[index], rng))
        loss = ctc_loss(log_probs_BLK, classes_BL[index])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(recogniser.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return recogniser.eval(), losses


def ctc_loss(log_probs_BLK: Tensor, classes_BL: Tensor) -> Tensor:
    """Mean CTC loss for strings of equal length, from log-probabilities per image column."""
    batch, columns, _ = log_probs_BLK.shape
    return F.ctc_loss(
        log_probs_BLK.transpose(0, 1),
        classes_BL,
        torch.full((batch,), columns),
        torch.full((batch,), classes_BL.shape[1]),
        blank=BLANK,
        zero_infinity=True,
    )
