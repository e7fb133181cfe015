"""From the resolved configuration to objects. Configuration stops here: constructors get plain keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch

from src.app import checkpoint
from src.app.config import CHECKPOINTS, Config, ConfigError, build, geometry, refusing, task
from src.app.engine import RolloutEngine
from src.core import seeds
from src.core.protocols import Cluster
from src.core.types import SampleSpec
from src.models.adapter import state_checksum
from src.models.load import load_adapter
from src.models.lora import apply_lora, reference_of
from src.models.sampler import Sampler
from src.rl.data import PromptData
from src.rl.module import Audit, FlowGRPO, RunIdentity
from src.rl.policy_gradient import PolicyGradient
from src.rl.replay_log import ReplayLog
from src.rl.seed_bank import SeedBank
from src.spot.callback import Await, Exploration, Race, Replay


def build_sampler(config: Config, *, device: str, threads: int) -> Sampler:
    """This process's model, and how this job denoises with it."""
    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for (trainer.accelerator, cluster.device), but there is none")
    model = config["model"]
    with refusing("model.path"):
        adapter = load_adapter(model["path"])
    if model["lora"] is not None:
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


def build_engine(config: Config, sampler: Sampler) -> RolloutEngine:
    """Makes and scores samples with the sampler's model."""
    reward = config["reward"]
    return RolloutEngine(
        sampler=sampler,
        reward=build(reward["reward"], "reward.reward"),
        judge=build(reward["judge"], "reward.judge"),
    )


def build_worker_engine(config: Config) -> RolloutEngine:
    """The engine of a spot worker, with a model of its own."""
    cluster = config["cluster"]
    return build_engine(config, build_sampler(config, device=cluster["device"], threads=cluster["threads"]))


def build_rank_engine(config: Config) -> tuple[Sampler, RolloutEngine]:
    """The engine of the training rank, around the model that is trained."""
    device, threads = config["trainer"]["accelerator"], config["parallel"]["threads"]
    sampler = build_sampler(config, device=device, threads=threads)
    return sampler, build_engine(config, sampler)


def build_module(
    config: Config, identity: RunIdentity, cluster: Cluster, sampler: Sampler, engine: RolloutEngine
) -> FlowGRPO:
    """The training loop."""
    algo, explore = config["algo"], config["explore"]
    loss, optimizer = build(algo["loss"], "algo.loss"), build(algo["optimizer"], "algo.optimizer")
    with refusing("algo.optimizer"):
        optimizer([torch.zeros(1, requires_grad=True)])  # Lightning makes the real one, when it is late to refuse
    return FlowGRPO(
        identity=identity,
        cluster=cluster,
        adapter=sampler.adapter,
        save_weights=engine.save_weights,
        fingerprint=engine.fingerprint,
        geometry=geometry(config),
        guidance_scale=algo["guidance_scale"],
        window=build(algo["window"], "algo.window"),
        advantage=build(algo["advantage"], "algo.advantage"),
        policy_gradient=PolicyGradient(
            sampler=sampler,
            loss=loss,
            reference=reference_of(sampler.adapter) if loss.kl_weight else None,
            micro_batch=algo["micro_batch"],
        ),
        seed_bank=SeedBank(run_seed=config["seed"], select=build(explore["select"], "explore.select")),
        audit=Audit(**explore["audit"]),
        old_logprob=algo["old_logprob"],
        optimizer=optimizer,
    )


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
    known = {
        "explore": lambda: {"planner": build(config["planner"], "planner"), "exploration": build_exploration(config)},
        "evaluate": lambda: {
            "prompts": task(config).heldout_prompts[: config["data"]["eval_prompts"]],
            "spec": SampleSpec(steps=algo["eval_steps"], guidance_scale=algo["guidance_scale"]),
            "folder": folder / "images",
            "last": last,
        },
        "checkpoint": lambda: {"root": folder / CHECKPOINTS, "last": last, "base": base, "resume": resume},
    }
    callbacks = []
    for name, section in config["callbacks"].items():
        built = build(section, f"callbacks.{name}")
        callbacks.append(built(**known[name]()) if name in known else built)
    return callbacks


def build_exploration(config: Config) -> Exploration:
    """When explored rewards count: `explore.sync`."""
    explore = config["explore"]
    if explore["sync"] == "replay":
        return Replay(source=ReplayLog(Path(explore["replay_from"]) / "events.jsonl").explored)
    if explore["sync"] == "await":
        return Await(timeout_s=explore["await_timeout_s"], workers=config["cluster"]["spot_workers"])
    return Race()


def build_training(
    config: Config,
    folder: Path,
    cluster: Cluster,
    sampler: Sampler,
    engine: RolloutEngine,
    resume: checkpoint.Checkpoint | None = None,
) -> tuple[pl.Trainer, FlowGRPO, PromptData]:
    """Everything that trains the sampler's model, ready for `trainer.fit(module, data)`."""
    identity = RunIdentity(run=cluster.run, seed=config["seed"], incarnation=cluster.incarnation)
    torch.manual_seed(seeds.derive("torch", config["seed"]))  # nothing of ours draws from it; a model's dropout would
    base = state_checksum(sampler.adapter.transformer.state_dict())  # with LoRA the frozen weights too
    module = build_module(config, identity, cluster, sampler, engine)
    trainer = build_trainer(config, build_callbacks(config, folder, base, resume))
    return trainer, module, build_data(config, first=resume.state["iteration"] if resume else 0)


def build_trainer(config: Config, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """Lightning's trainer. It runs until the data end: our `max_steps` counts iterations, not optimizer steps."""
    section = {key: value for key, value in config["trainer"].items() if key != "max_steps"}
    trainer: pl.Trainer = build(section, "trainer")(
        strategy=build(config["parallel"]["strategy"], "parallel.strategy"),
        callbacks=list(callbacks),
        max_steps=-1,
        max_epochs=1,
    )
    return trainer
