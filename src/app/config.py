"""Checks a configuration before anything heavy starts, and turns it into plain data. No torch here."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from src.app.schema import complaint
from src.core.events import read_jsonl
from src.core.folders import FolderError, verify, write_whole
from src.core.types import Member
from src.models.location import is_model
from src.parallel.plan import check_geometry, groups_of
from src.rl.geometry import BatchGeometry
from src.rl.replay_log import ReplayLog
from src.spot.cost import Ledger
from src.spot.market import Market
from src.spot.members import LOCAL
from src.tasks.task import Task

Config = Mapping[str, Any]
"""A resolved configuration: dictionaries, lists and plain values, as in a run folder's config.yaml."""

CHECKPOINTS = "checkpoints"


class ConfigError(ValueError):
    """Bad configuration or input: one line that names the key and its value. Ends the program with code 2."""


@dataclass(frozen=True)
class RunPlan:
    """What the job is going to do.

    Args:
        config: resolved, as written to config.yaml.
        folder: the run folder.
        overrides: what the user gave on the command line.
        resume: checkpoint folder to go on from, or None.
        warnings: what the user should see before the start.
    """

    config: Config
    folder: Path
    overrides: tuple[str, ...] = ()
    resume: Path | None = None
    warnings: tuple[str, ...] = ()

    @property
    def resume_hint(self) -> str:
        """The command that goes on with this run from its last checkpoint."""
        given = [text for text in self.overrides if not text.startswith(("ckpt_path=", "paths.output_dir="))]
        return shlex.join(["python", "train.py", *given, "ckpt_path=last", f"paths.output_dir={self.folder}"])


def plan_run(config: DictConfig) -> RunPlan:
    """Resolves and checks a composed configuration, and prepares the run folder.

    Raises:
        ConfigError: something in it cannot work.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir).resolve()
    config.paths.output_dir = str(folder)
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    check(resolved)
    overrides = tuple(hydra.overrides.task)
    resume, warnings = find_checkpoint(resolved["ckpt_path"], folder)
    if resume is not None:
        warnings += check_resumed(resolved, resume.parents[1] / "config.yaml", overrides)
    if resume is None and (folder / "events.jsonl").exists():
        raise ConfigError(
            f"paths.output_dir={folder} already holds a run: go on with ckpt_path=last, or give another folder"
        )
    for log in (folder / "events.jsonl", folder / "metrics.jsonl"):
        if log.exists():
            with refusing():
                sum(1 for _ in read_jsonl(log))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
    return RunPlan(resolved, folder, overrides, resume, warnings)


def check_resumed(config: Config, earlier: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """Compares what decides the training with the configuration that the checkpoint was made with.

    What was changed on purpose, by an override of this very command, is a warning.

    Raises:
        ConfigError: something else differs, such as an override of the first command that was forgotten.
    """
    if not earlier.is_file():
        return ()
    before, now = flat(yaml.safe_load(earlier.read_text(encoding="utf-8"))), flat(config)
    decisive = ("model.", "data.", "algo.", "explore.", "planner.")
    changed = [
        key
        for key in sorted({*before, *now})
        if key.startswith(decisive) and key not in _PLACES and before.get(key) != now.get(key)
    ]
    given = [text.lstrip("+~").partition("=")[0] for text in overrides]
    warnings = []
    for key in changed:
        told = f"{key} is {now.get(key)!r}, the checkpoint was made with {before.get(key)!r}"
        if not any(key == name or key.startswith(f"{name}.") for name in given):
            raise ConfigError(f"{told}: repeat the overrides of the first start, or give {key}= to change it")
        warnings.append(told)
    return tuple(warnings)


_PLACES = ("model.path", "model.schedule.path")
"""A model may have been moved: the checksum of its weights and noise levels is compared when it is loaded."""


def flat(section: Config, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    values: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def check(config: Config) -> None:
    """Refuses what cannot work, before any process is started.

    Raises:
        ConfigError: it names the key and the value.
    """
    if told := complaint(config):
        raise ConfigError(told)
    explore = config["explore"]
    if (explore["sync"] == "replay") != (explore["replay_from"] is not None):
        raise ConfigError(
            f"explore.replay_from names the run to replay, just for explore.sync=replay; got "
            f"explore.sync={explore['sync']} and explore.replay_from={explore['replay_from']}"
        )
    if explore["replay_from"] is not None:
        with refusing("explore.replay_from"):
            ReplayLog(Path(explore["replay_from"]) / "events.jsonl")
    with refusing("data.task"):
        heldout, wanted = len(task(config).heldout_prompts), config["data"]["eval_prompts"]
    if wanted > heldout:
        raise ConfigError(f"data.eval_prompts must be in 1..{heldout} (held-out set), got {wanted}")
    if config["algo"]["ema"] is None and config["callbacks"].get("evaluate", {}).get("average"):
        raise ConfigError("callbacks.evaluate.average=true needs a running average, got algo.ema=null")
    if not is_model(config["model"]["path"]):
        raise ConfigError(f"model.path={config['model']['path']} is no model folder: it has no model_index.json")
    geometry(config)
    build(config["planner"], "planner")
    if is_virtual(config):
        _check_virtual(config)
    elif is_joined(config):
        if config["market"]["decider"] is not None:
            raise ConfigError("market.decider must be null on a Ray cluster, whose nodes come and go by themselves")
        _check_notices(config)
    else:
        cpus, there = config["cluster"]["cpus"], os.sched_getaffinity(0)
        if not set(cpus or ()) <= there:
            raise ConfigError(f"cluster.cpus must be among {sorted(there)}, got {cpus}")
        _check_notices(config)
        _check_teams(config)
        if config["cluster"]["spot_trains"]:
            _check_spot_ranks(config)
    build_market(config)
    build_ledger(config)
    _check_ranks(config)


def _check_virtual(config: Config) -> None:
    """Refuses what a job in one process, on a clock of its own, cannot do."""
    if config["ckpt_path"] is not None:
        raise ConfigError(f"ckpt_path={config['ckpt_path']}: a run on a virtual cluster cannot be gone on with")
    if config["parallel"]["mesh"] is not None:
        raise ConfigError("parallel must be single on a virtual cluster, where one process trains for all GPUs")
    for key in ("hardware", "workload"):
        if config[key] is None:
            raise ConfigError(f"{key} must say what a virtual cluster stands for, got None (conf/{key} has some)")
    if config["model"]["load"]:
        raise ConfigError(f"model.path={config['model']['path']}: a virtual cluster trains a tiny model in its place")
    if config["cluster"]["spot_trains"]:
        _check_nothing_explored(config)
    with refusing("cluster.sp_degree"):
        build(config["hardware"], "hardware").sp_speedup(config["cluster"]["sp_degree"])


def _check_nothing_explored(config: Config) -> None:
    if explored := geometry(config).explored_per_prompt:
        raise ConfigError(
            f"cluster.spot_trains=true needs planner=none, since GPUs that train cannot explore meanwhile; got one "
            f"that asks for {explored} seeds per prompt"
        )


def _check_teams(config: Config) -> None:
    """Refuses spot workers that cannot share the model."""
    degree = config["cluster"]["sp_degree"]
    if config["model"]["compile"] and degree > 1:
        raise ConfigError(f"model.compile cannot be combined with cluster.sp_degree={degree}")
    if degree > _heads(config, degree):
        raise ConfigError(
            f"cluster.sp_degree must be at most the model's {_heads(config, degree)} attention heads, got {degree}"
        )


def _heads(config: Config, unknown: int) -> int:
    """Attention heads of the model; `unknown` of one that is not here yet: a process that gets none idles."""
    network = Path(config["model"]["path"]) / "transformer" / "config.json"
    if not network.is_file():
        return unknown
    heads: int = json.loads(network.read_text(encoding="utf-8"))["num_attention_heads"]
    return heads


def _check_notices(config: Config) -> None:
    if config["cluster"]["notices"] is not None:
        build(config["cluster"]["notices"], "cluster.notices")


def _check_ranks(config: Config) -> None:
    """Refuses training ranks that cannot share the model and the batch."""
    parallel, devices, degree = config["parallel"], config["trainer"]["devices"], config["parallel"]["sp_degree"]
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) != devices:
        raise ConfigError(f"trainer.devices must be torchrun's {os.environ['WORLD_SIZE']} processes, got {devices}")
    if parallel["mesh"] is None:
        for key, value in (("trainer.devices", devices), ("parallel.sp_degree", degree)):
            if value != 1:
                raise ConfigError(f"{key} must be 1 for one rank (several: parallel=ulysses), got {value}")
        deepspeed = config["callbacks"].get("checkpoint", {}).get("deepspeed", False)
        for key, value in (("parallel.elastic", parallel["elastic"]), ("callbacks.checkpoint.deepspeed", deepspeed)):
            if value:
                raise ConfigError(f"{key}=true needs parallel=ulysses, got parallel.mesh=null")
        return
    if parallel["strategy"].get("stage") not in (0, 1, 2):
        raise ConfigError(
            f"parallel.strategy.stage must be 0, 1 or 2: ZeRO 3 is not known to be right with sequence parallelism, "
            f"got {parallel['strategy'].get('stage')}"
        )
    if parallel["elastic"]:
        _check_elastic(config)
    if config["model"]["compile"] and degree > 1:
        raise ConfigError(f"model.compile cannot be combined with parallel.sp_degree={degree}")
    sizes = geometry(config)
    with refusing():
        check_geometry(
            world=devices,
            degree=degree,
            heads=_heads(config, degree),
            pairs=min(sizes.pairs_of_update(update) for update in range(sizes.updates)),
        )


def _check_spot_ranks(config: Config) -> None:
    """Refuses training on spot nodes that nobody plays the market for, or that could not lose a rank."""
    elastic, market = config["parallel"]["elastic"], config["market"]["decider"]
    if not elastic or market is None:
        raise ConfigError(
            f"cluster.spot_trains=true needs ranks that may go and nodes that do (parallel=ulysses "
            f"parallel.elastic=true market=replay), got parallel.elastic={elastic} and market.decider={market}"
        )
    _check_nothing_explored(config)
    sizes, ranks = geometry(config), config["trainer"]["devices"] + len(spot_ranks(config))
    pairs = min(sizes.pairs_of_update(update) for update in range(sizes.updates))
    if pairs < ranks:
        raise ConfigError(
            f"an update trains on {pairs} (sample, step) pairs, too few for {ranks} ranks (trainer.devices + "
            f"market.nodes * cluster.workers_per_node)"
        )


def _check_elastic(config: Config) -> None:
    """Refuses ranks that could not come and go."""
    stage, devices = config["parallel"]["strategy"]["stage"], config["trainer"]["devices"] + len(spot_ranks(config))
    if stage != 0:  # each rank holds a part of the optimizer's state, which would die with it
        raise ConfigError(f"parallel.elastic=true needs parallel.strategy.stage=0, got {stage}")
    if devices == 1:
        raise ConfigError("parallel.elastic=true needs ranks that can stand in for one another, got trainer.devices=1")


def is_virtual(config: Config) -> bool:
    """Whether time and capacity are those of a virtual cluster."""
    return "reserved_gpus" in config["cluster"]


def is_joined(config: Config) -> bool:
    """Whether the job runs on a Ray cluster that is there already."""
    return "address" in config["cluster"]


def build_market(config: Config) -> Market | None:
    """Which spot nodes there are when; None: one, always."""
    decider = config["market"]["decider"]
    return None if decider is None else build(decider, "market")


def build_ledger(config: Config) -> Ledger:
    """Adds up what the run costs."""
    zone, prices = config["market"]["zone"], build(config["prices"], "prices")
    with refusing("market.zone"):
        gpus = config["cluster"]["reserved_gpus"] if is_virtual(config) else config["trainer"]["devices"]
        return Ledger(prices=prices, zone=zone, reserved_gpus=gpus)


def spot_ranks(config: Config) -> list[tuple[str, int]]:
    """Node and slot of the training ranks that run on spot nodes, in the order of ranks."""
    cluster = config["cluster"]
    if is_virtual(config) or not cluster.get("spot_trains", False):
        return []
    market = build_market(config)
    if market is None:
        return []
    return [(node, slot) for node in market.nodes for slot in range(cluster["workers_per_node"])]


def spot_places(config: Config) -> int:
    """Spot workers when the market takes none; on a Ray cluster, whose nodes nobody knows beforehand, those of one."""
    cluster, market = config["cluster"], build_market(config)
    if is_joined(config):
        return int(cluster["workers_per_node"])
    if is_virtual(config):
        return int(cluster["gpus_per_node"] * (len(market.nodes) if market else cluster["spot_nodes"]))
    if cluster["spot_trains"]:
        return 0
    workers: int = cluster["workers_per_node"] * len(market.nodes) if market else cluster["spot_workers"]
    return workers


def spot_teams(config: Config) -> dict[tuple[str, int], str]:
    """Which places of spot workers, as (node, slot), share sequences, by the name of their team."""
    cluster, market = config["cluster"], build_market(config)
    nodes, slots = (market.nodes, cluster["workers_per_node"]) if market else ((LOCAL,), cluster["spot_workers"])
    places = [Member(node, slot) for node in nodes for slot in range(slots)]
    groups = [group for group in groups_of(places, cluster["sp_degree"], across_nodes=True) if len(group) > 1]
    return {(member.node, member.slot): f"sp{number}" for number, group in enumerate(groups) for member in group}


_KEYS = {
    "prompts_per_iteration": "data.prompts_per_iteration",
    "group_size": "algo.group_size",
    "rollouts_per_prompt": "algo.rollouts_per_prompt",
    "steps": "algo.steps",
    "stochastic_steps": "algo.window: the number of stochastic steps",
    "trained_steps": "algo.trained_steps",
    "updates": "algo.updates",
    "micro_batch": "algo.micro_batch",
    "previews": "explore.previews",
}
"""Where the arguments of `BatchGeometry` come from, explored_per_prompt apart: each planner has its own."""


def geometry(config: Config) -> BatchGeometry:
    """The sizes of one iteration.

    Raises:
        ConfigError: they do not fit; the message names each that does not.
    """
    algo, prompts, previews = config["algo"], task(config), tuple(config["explore"]["previews"])
    largest = "seeds_per_prompt" if "seeds_per_prompt" in config["planner"] else "max_seeds_per_prompt"
    window = build(algo["window"], "algo.window")
    with refusing("algo.window"):
        stochastic_steps = len(window.steps(algo["steps"], 0, 0))
    with refusing("explore.previews"):
        for steps in previews:
            window.steps(steps, 0, 0)
    try:
        return BatchGeometry(
            prompts_per_iteration=config["data"]["prompts_per_iteration"],
            prompts_available=len(prompts.train_prompts),
            group_size=algo["group_size"],
            rollouts_per_prompt=algo["rollouts_per_prompt"],
            explored_per_prompt=config["planner"].get(largest, 0),
            steps=algo["steps"],
            stochastic_steps=stochastic_steps,
            trained_steps=algo["trained_steps"],
            updates=algo["updates"],
            micro_batch=algo["micro_batch"],
            previews=previews,
        )
    except ValueError as error:
        keys = {**_KEYS, "explored_per_prompt": f"planner.{largest}"}
        raise ConfigError(re.sub(r"\w+(?= must)", lambda name: keys[name[0]], str(error))) from error


def task(config: Config) -> Task:
    """The task whose prompts are trained and evaluated on."""
    built: Task = build(config["data"]["task"], "data.task")
    return built


def build(section: Config, key: str) -> Any:
    """Instantiates a section of the configuration.

    Raises:
        ConfigError: it has an unknown key, or a value that its constructor refuses.
    """
    try:
        built = instantiate(section, _convert_="all")  # constructors see plain dictionaries and lists
    except InstantiationException as error:
        cause = error.__cause__
        raise ConfigError(f"{key}: {cause or str(error).splitlines()[0]}") from error
    if isinstance(built, partial):
        with refusing(key):
            signature(built.func).bind_partial(*built.args, **built.keywords)
    return built


@contextmanager
def refusing(key: str = "") -> Iterator[None]:
    """Inside, a value or argument that a constructor refuses is bad configuration, below `key` if one is given."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {error}" if key else str(error)) from error


def find_checkpoint(ckpt_path: str | None, folder: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The checkpoint that `ckpt_path` means, and warnings about damaged ones that were passed over.

    `last` means the newest good one of this run folder, another run folder that folder's. A checkpoint that is named
    itself must be good.

    Raises:
        ConfigError: there is none, or the named one is damaged.
    """
    if ckpt_path is None:
        return None, ()
    path = folder if ckpt_path == "last" else Path(ckpt_path)
    if ckpt_path == "last" and not (path / CHECKPOINTS).is_dir():
        raise ConfigError(f"ckpt_path=last: there is no checkpoint in paths.output_dir={folder}")
    if not (path / CHECKPOINTS).is_dir():
        try:
            verify(path)
        except FolderError as error:
            raise ConfigError(f"ckpt_path={ckpt_path}: {error}") from error
        return path, ()
    warnings = []
    for candidate in sorted((path / CHECKPOINTS).glob("iteration_*"), reverse=True):
        try:
            verify(candidate)
        except FolderError as error:
            warnings.append(f"checkpoint {candidate} is damaged and passed over: {error}")
        else:
            return candidate, tuple(warnings)
    raise ConfigError("; ".join([f"ckpt_path={ckpt_path}: no good checkpoint in {path / CHECKPOINTS}", *warnings]))
