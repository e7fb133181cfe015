"""From the resolved configuration to what makes samples.

All that a spot worker imports is here: without Lightning it starts in half the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from src.app.config import Config, ConfigError, build, refusing
from src.app.engine import RolloutEngine
from src.models.adapter import DiTAdapter
from src.models.load import load_adapter
from src.models.sampler import Sampler

if TYPE_CHECKING:
    from src.parallel.team_engine import ElasticEngine
    from src.parallel.ulysses import SequenceGroup


def build_sampler(config: Config, *, device: str, threads: int) -> Sampler:
    """This process's model, and how this job denoises with it."""
    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for (trainer.accelerator, cluster.device), but there is none")
    model = config["model"]
    with refusing("model"):
        adapter = load_adapter(model["path"], **model["load"])
    if model["lora"] is None:
        _refuse_half_precision(adapter)
    else:
        from src.models.lora import apply_lora  # imported here: slow to load

        with refusing("model.lora"):
            apply_lora(adapter.transformer, **model["lora"])
    if model["compile"]:
        from src.models.compile import compile_blocks  # imported here: it loads the compiler

        compile_blocks(adapter.transformer)
    adapter.to(torch.device(device))
    return Sampler(
        adapter=adapter,
        rule=build(config["algo"]["rule"], "algo.rule"),
        schedule_for=build(model["schedule"], "model.schedule"),
        noise_steps=config["algo"]["steps"],
        batch_size=model["batch_size"],
        stored_dtype=getattr(torch, model["stored_dtype"]),
    )


def _refuse_half_precision(adapter: DiTAdapter) -> None:
    if adapter.dtype != torch.float32:
        raise ConfigError(
            f"model.load.dtype must be float32 where the whole transformer is trained (model.lora=null): "
            f"small steps are lost in the rounding of {str(adapter.dtype).removeprefix('torch.')}"
        )


def build_engine(config: Config, sampler: Sampler, *, sp_degree: int = 1) -> RolloutEngine:
    """Makes and scores samples with the sampler's model, whose sequences `sp_degree` processes share."""
    reward = config["reward"]
    return RolloutEngine(
        sampler=sampler,
        reward=build(reward["reward"], "reward.reward"),
        judge=build(reward["judge"], "reward.judge"),
        sp_degree=sp_degree,
    )


def build_worker_engine(config: Config) -> RolloutEngine:
    """The engine of a spot worker that shares its sequences with nobody, with a model of its own."""
    cluster = config["cluster"]
    return build_engine(config, build_sampler(config, device=cluster["device"], threads=cluster["threads"]))


def build_team_engine(config: Config) -> ElasticEngine:
    """The engine of a spot worker whose sequences are shared with whoever is in its team."""
    from src.parallel.families import parallelize
    from src.parallel.team_engine import ElasticEngine  # imported here: others need no process groups
    from src.parallel.ulysses import SequenceGroup

    cluster, sequence = config["cluster"], SequenceGroup()
    sampler = build_sampler(config, device=cluster["device"], threads=cluster["threads"])
    with refusing("cluster.sp_degree"):
        parallelize(sampler.adapter.transformer, sequence)
    return ElasticEngine(engine=build_engine(config, sampler), sequence=sequence, device=sampler.adapter.device)


def build_rank_engine(config: Config, group: SequenceGroup | None = None) -> tuple[Sampler, RolloutEngine]:
    """The engine of a training rank, around the model that is trained; `group` shares its sequences, if there are
    several ranks."""
    device, threads = config["trainer"]["accelerator"], config["parallel"]["threads"]
    sampler = build_sampler(config, device=device, threads=threads)
    if group is None:
        return sampler, build_engine(config, sampler)
    from src.parallel.families import parallelize  # imported here: no spot worker needs it

    with refusing("parallel.sp_degree"):
        parallelize(sampler.adapter.transformer, group)
    return sampler, build_engine(config, sampler, sp_degree=config["parallel"]["sp_degree"])
