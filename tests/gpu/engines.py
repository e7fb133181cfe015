"""The engine of a worker as the product builds it, on a device and in a dtype."""

from __future__ import annotations

from pathlib import Path

import torch

from src.app.engine import RolloutEngine
from src.app.sampling import build_engine, build_sampler
from src.core.types import PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleSpec
from src.models.sampler import Sampler
from src.tasks.text import digits_task
from tests.app.runs import TINY, configuration

STEPS = 6
SPEC = SampleSpec(STEPS, (1, 2, 4))
COUNT = 10
BATCH_SIZE = 4


def build_on(
    device: str, dtype: torch.dtype, folder: Path, batch_size: int = BATCH_SIZE
) -> tuple[Sampler, RolloutEngine]:
    """A sampler with the weights of `tiny_digits`, and the engine around it."""
    config = configuration(folder, *TINY, f"algo.steps={STEPS}", f"model.batch_size={batch_size}")
    sampler = build_sampler(config, device=device, threads=1)
    for network in (sampler.adapter.transformer, sampler.adapter.prompt_encoder):
        assert isinstance(network, torch.nn.Module)
        network.to(dtype)
    return sampler, build_engine(config, sampler)


def asked(kind: RequestKind = RequestKind.ROLLOUT, count: int = COUNT) -> list[SampleRequest]:
    """Requests of different prompts."""
    prompts = digits_task().train_prompts
    keys = [RequestKey("run", 0, kind, row, 100 + row, PolicyVersion(0, 0), STEPS) for row in range(count)]
    return [SampleRequest(key, prompts[row], SPEC) for row, key in enumerate(keys)]
