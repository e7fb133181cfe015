"""From the resolved configuration to what trains. Configuration stops here: constructors get plain arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from src.app import checkpoint
from src.app.callbacks import Boundaries, Checkpointing, Evaluation
from src.app.config import CHECKPOINTS, Config, ConfigError, build, geometry, refusing, spot_places, spot_ranks, task
from src.app.engine import RolloutEngine
from src.app.export import LoRAExport
from src.core import seeds
from src.core.protocols import Cluster
from src.core.types import SampleSpec
from src.models.adapter import DiTAdapter, state_checksum
from src.models.reference import FrozenCopy, Reference
from src.models.sampler import Sampler
from src.parallel.elastic import ElasticWorld
from src.parallel.mesh import World
from src.rl.data import PromptData
from src.rl.module import Audit, FlowGRPO, RunIdentity
from src.rl.policy_gradient import PolicyGradient
from src.rl.replay_log import ReplayLog
from src.rl.seed_bank import SeedBank
from src.spot.callback import Await, Race, Replay, SpotExploration, Sync


def build_module(
    config: Config, identity: RunIdentity, cluster: Cluster, sampler: Sampler, engine: RolloutEngine
) -> FlowGRPO:
    """The training loop."""
    algo, explore = config["algo"], config["explore"]
    loss, optimizer = build(algo["loss"], "algo.loss"), build(algo["optimizer"], "algo.optimizer")
    half = sampler.adapter.dtype != torch.float32
    with refusing("algo.optimizer"):
        optimizer([torch.zeros(1, requires_grad=True)])  # Lightning makes the real one, when it is late to refuse
    return FlowGRPO(
        identity=identity,
        cluster=cluster,
        adapter=sampler.adapter,
        save_weights=engine.save_weights,
        geometry=geometry(config),
        guidance_scale=algo["guidance_scale"],
        window=build(algo["window"], "algo.window"),
        advantage=build(algo["advantage"], "algo.advantage"),
        policy_gradient=PolicyGradient(
            sampler=sampler,
            loss=loss,
            reference=build_reference(config, sampler.adapter) if loss.kl_weight else None,
            micro_batch=algo["micro_batch"],
            fill=half,
        ),
        seed_bank=SeedBank(run_seed=config["seed"], select=build(explore["select"], "explore.select")),
        audit=Audit(**explore["audit"]),
        # Of ranks that come and go, all must decide alike: so it is the degree that was asked for, whatever it is now.
        trusts=trusts(
            algo["old_logprob"],
            engine.fingerprint_at(config["parallel"]["sp_degree"]),
            replays_alike=algo["micro_batch"] == sampler.batch_size or not half,
        ),
        optimizer=optimizer,
        ema=build(algo["ema"], "algo.ema") if algo["ema"] else None,
    )


def trusts(old_logprob: str, fingerprint: str, *, replays_alike: bool) -> Callable[[str], bool]:
    """Whose log-probabilities are taken as they came: `algo.old_logprob`, for a rank with this fingerprint.

    Args:
        replays_alike: whether its replay has the arithmetic of its own samples. In half precision, passes of other
            numbers of rows may differ by far more than a clip range (docs/models.md).

    Raises:
        ConfigError: the option is not known.
    """
    options: dict[str, Callable[[str], bool]] = {
        "auto": lambda made_by: replays_alike and made_by == fingerprint,
        "rollout": lambda made_by: True,
        "recompute": lambda made_by: False,
    }
    if old_logprob not in options:
        raise ConfigError(f"algo.old_logprob must be one of {', '.join(options)}, got {old_logprob!r}")
    return options[old_logprob]


def build_reference(config: Config, adapter: DiTAdapter) -> Reference:
    """The policy before the first update."""
    if config["model"]["lora"] is None:
        return FrozenCopy(adapter.transformer)
    from src.models.lora import LoRAOff  # imported here: slow to load

    return LoRAOff()


def build_data(config: Config, *, first: int) -> PromptData:
    """The batches of iterations `first`.. of this run."""
    return PromptData(
        prompts=task(config).train_prompts,
        per_iteration=config["data"]["prompts_per_iteration"],
        seed=config["seed"],
        iterations=config["trainer"]["max_steps"],
        first=first,
    )


def build_callbacks(config: Config, folder: Path, base: str, resume: checkpoint.Checkpoint | None) -> list[pl.Callback]:
    """The entries of `callbacks`, in their order: it is the order in which they run at the end of an iteration.

    This project's own are given here what only the running job knows; any other Lightning callback is taken as it is.
    """
    algo, last = config["algo"], config["trainer"]["max_steps"]
    known: dict[Any, dict[str, Any]] = {
        SpotExploration: {
            "sync": build_sync(config),
            "workers": spot_places(config),
        },
        Evaluation: {
            "prompts": task(config).heldout_prompts[: config["data"]["eval_prompts"]],
            "spec": SampleSpec(steps=algo["eval_steps"], guidance_scale=algo["guidance_scale"]),
            "folder": folder / "images",
            "last": last,
        },
        LoRAExport: {"folder": folder, "last": last, "config": config},
        Checkpointing: {"root": folder / CHECKPOINTS, "last": last, "base": base, "resume": resume},
    }
    callbacks = []
    for name, section in config["callbacks"].items():
        built = build(section, f"callbacks.{name}")
        with refusing(f"callbacks.{name}"):
            callbacks.append(built(**known.get(built.func, {})) if isinstance(built, partial) else built)
    return callbacks


def build_sync(config: Config) -> Sync:
    """When explored rewards count: `explore.sync`."""
    explore = config["explore"]
    if explore["sync"] == "replay":
        return Replay(source=ReplayLog(Path(explore["replay_from"]) / "events.jsonl").explored)
    if explore["sync"] == "await":
        return Await(timeout_s=explore["await_timeout_s"])
    return Race()


def build_training(
    config: Config,
    folder: Path,
    cluster: Cluster,
    sampler: Sampler,
    engine: RolloutEngine,
    resume: checkpoint.Checkpoint | None = None,
    world: World | None = None,
) -> tuple[pl.Trainer, FlowGRPO, PromptData]:
    """Everything that trains the sampler's model, ready for `trainer.fit(module, data)`; `world` of several ranks."""
    identity = RunIdentity(run=cluster.run, seed=config["seed"], incarnation=cluster.incarnation)
    torch.manual_seed(seeds.derive("torch", config["seed"]))  # nothing of ours draws from it; a model's dropout would
    sigmas = torch.tensor(sampler.schedule_for(config["algo"]["steps"]).sigmas)
    weights = sampler.adapter.transformer.state_dict()  # with LoRA the frozen weights too
    base = state_checksum({**weights, "sigmas": sigmas})
    module = build_module(config, identity, cluster, sampler, engine)
    callbacks = build_callbacks(config, folder, base, resume)
    if isinstance(world, ElasticWorld):
        callbacks.insert(0, Boundaries(world=world, base=base))
    trainer = build_trainer(config, callbacks, world)
    return trainer, module, build_data(config, first=resume.state["iteration"] if resume else 0)


def build_trainer(config: Config, callbacks: Sequence[pl.Callback], world: World | None) -> pl.Trainer:
    """Lightning's trainer. It runs until the data end: our `max_steps` counts iterations, not optimizer steps."""
    strategy = build(config["parallel"]["strategy"], "parallel.strategy")
    if world is not None:
        with refusing("parallel.strategy"):
            strategy = strategy(world=world)
    section = {key: value for key, value in config["trainer"].items() if key != "max_steps"}
    section["devices"] += len(spot_ranks(config))
    trainer: pl.Trainer = build(section, "trainer")(
        strategy=strategy,
        callbacks=list(callbacks),
        max_steps=-1,
        max_epochs=1,
    )
    return trainer
