"""From the resolved configuration to objects. Configuration stops here: constructors get plain keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate

from src.app.engine import RolloutEngine
from src.models.adapter import DiTAdapter
from src.models.load import load_adapter
from src.models.lora import apply_lora
from src.models.sampler import Sampler

Config = Mapping[str, Any]
"""The resolved configuration as plain dictionaries and lists: what config.yaml of a run folder holds."""


def build_adapter(model: Config) -> DiTAdapter:
    """The model of `model.path`, with a LoRA adapter if `model.lora` is set."""
    adapter = load_adapter(model["path"])
    if model["lora"] is not None:
        apply_lora(adapter.transformer, **model["lora"])
    if model["compile"]:
        from src.models.compile import compile_blocks  # imported here: pulls in the compiler

        compile_blocks(adapter.transformer)
    return adapter


def build_sampler(config: Config, adapter: DiTAdapter) -> Sampler:
    """How this job denoises: step rule and schedule from `algo` and `model`."""
    return Sampler(
        adapter=adapter,
        rule=instantiate(config["algo"]["rule"]),
        schedule_for=instantiate(config["model"]["schedule"]),
        noise_steps=config["algo"]["steps"],
        batch_size=config["model"]["batch_size"],
        stored_dtype=getattr(torch, config["model"]["stored_dtype"]),
    )


def build_engine(config: Config, sampler: Sampler | None = None) -> RolloutEngine:
    """An engine with a model of its own, or around the trainer's sampler."""
    if sampler is None:
        sampler = build_sampler(config, build_adapter(config["model"]))
    return RolloutEngine(
        sampler=sampler,
        reward=instantiate(config["reward"]["reward"]),
        judge=instantiate(config["reward"]["judge"]),
    )


def build_worker_engine(config: Config) -> RolloutEngine:
    """What a spot worker runs, in its own process."""
    torch.set_num_threads(config["cluster"]["threads"])
    return build_engine(config)


def engine_factory(config: Config) -> Callable[[], RolloutEngine]:
    """A picklable `build_worker_engine` for this configuration."""
    return partial(build_worker_engine, config)
