"""Pretraining of the tiny base models by flow matching on rendered images.

x_sigma = (1 - sigma) x0 + sigma eps with sigma = sigmoid(n), n standard normal; the loss is
mean |v(x_sigma, sigma, prompt) - (eps - x0)|^2. The adapter turns its prediction of x0 into the velocity v.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from src.models.adapter import DiTAdapter
from src.models.tiny import PixelDecoder, TokenEncoder
from src.pretrain.recognisers import normal
from src.tasks.task import RenderedTask


def flow_matching_loss(adapter: DiTAdapter, prompts: Sequence[str], x0_BLC: Tensor, rng: np.random.Generator) -> Tensor:
    """Mean squared velocity error at a logit-normal noise level per sample."""
    noise_BLC = normal(rng, tuple(x0_BLC.shape))
    sigma_B = torch.sigmoid(normal(rng, (len(x0_BLC),)))
    sigma_B11 = sigma_B[:, None, None]
    latents_BLC = (1 - sigma_B11) * x0_BLC + sigma_B11 * noise_BLC
    # The encoder itself, not `adapter.encode`, which has no gradient: the token table is learned here.
    cond = adapter.prompt_encoder.encode(prompts)
    velocity_BLC = adapter.predict_velocity(latents_BLC, sigma_B, cond)
    return (velocity_BLC - (noise_BLC - x0_BLC)).square().mean()


def make_optimizers(networks: Sequence[nn.Module], *, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the transformer blocks (modulation apart), AdamW for everything else."""
    named = [item for network in networks for item in network.named_parameters()]
    matrices = [p for name, p in named if p.ndim == 2 and "transformer_blocks" in name and "_mod" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in chosen]
    return [
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.99), weight_decay=0.01),
        torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.01),
    ]


class WeightAverage:
    """Moving average of weights; the decay grows from 0 to `decay`, so that early steps are forgotten."""

    def __init__(self, networks: Sequence[nn.Module], *, decay: float) -> None:
        self.parameters = [p for network in networks for p in network.parameters()]
        self.average = [p.detach().clone() for p in self.parameters]
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 20))
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.lerp_(parameter, 1 - decay)

    @torch.no_grad()
    def copy_to_networks(self) -> None:
        for parameter, average in zip(self.parameters, self.average, strict=True):
            parameter.copy_(average)


def train_base(
    adapter: DiTAdapter,
    task: RenderedTask,
    *,
    steps: int,
    seed: int,
    samples: int,
    batch_size: int = 64,
    lr: float = 2e-3,
    muon_lr: float = 0.02,
    warmup_steps: int = 50,
    ema_decay: float = 0.995,
    prompt_dropout: float = 0.1,
) -> list[float]:
    """Train a tiny model in place and leave it with its averaged weights.

    The result is a function of the arguments and the initial weights alone, on one machine with one thread
    count: data, noise and dropout come from one NumPy generator.

    Args:
        adapter: a model of `build_tiny`.
        task: draws `samples` images, once, of prompts that are not held out.
        warmup_steps: the learning rates grow linearly over them and then stay.
        prompt_dropout: share of samples trained with the empty prompt, which guidance needs.

    Returns:
        The loss of each step.
    """
    encoder, decoder = cast(TokenEncoder, adapter.prompt_encoder), cast(PixelDecoder, adapter.image_decoder)
    rng = np.random.default_rng(seed)
    prompts = [task.sample_prompt(rng) for _ in range(samples)]
    x0_NLC = decoder.pack(np.stack([task.render(prompt, rng) for prompt in prompts]))
    networks = [adapter.transformer.train(), encoder.train()]
    optimizers = make_optimizers(networks, lr=lr, muon_lr=muon_lr)
    warmups = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))
        for optimizer in optimizers
    ]
    average = WeightAverage(networks, decay=ema_decay)
    losses = []
    for _ in range(steps):
        index = rng.integers(samples, size=batch_size)
        dropped = rng.random(batch_size) < prompt_dropout
        texts = ["" if drop else prompts[i].text for i, drop in zip(index, dropped, strict=True)]
        loss = flow_matching_loss(adapter, texts, x0_NLC[torch.from_numpy(index)], rng)
        _descend(loss, average.parameters, optimizers)
        for warmup in warmups:
            warmup.step()
        average.update()
        losses.append(loss.item())
    average.copy_to_networks()
    return losses


def _descend(loss: Tensor, parameters: Iterable[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """One step of every optimizer on the gradient, clipped to norm 1."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
