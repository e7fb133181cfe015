"""What a configuration may hold: every key, its type and its range.

Sections with a `_target_` are checked by the constructor that they name. Everything else is checked here, so that a
misspelt key in any YAML file or override fails with its name before a process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Name = Annotated[str, Field(min_length=1)]
Target = Annotated[dict[str, Any], Field(min_length=1)]
"""A section that is instantiated."""


class Section(BaseModel):
    """Unknown keys and other types are refused; nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Lora(Section):
    rank: Count
    alpha: float
    target_modules: list[str]


class Model(Section):
    path: str
    load: dict[str, Any]
    """Settings of a published model, which its loader checks."""
    lora: Lora | None
    compile: bool
    batch_size: Count
    stored_dtype: Literal["float32", "bfloat16", "float16"]
    schedule: Target


class Data(Section):
    task: Target
    prompts_per_iteration: int
    eval_prompts: Count


class Reward(Section):
    reward: Target
    judge: Target


class Algo(Section):
    group_size: int
    rollouts_per_prompt: int
    steps: int
    eval_steps: Count
    noise_level: float
    guidance_scale: float
    rule: Target
    window: Target
    trained_steps: int
    updates: int
    micro_batch: int
    advantage: Target
    loss: Target
    old_logprob: Literal["auto", "rollout", "recompute"]
    ema: Target | None
    optimizer: Target
    warmup_updates: Whole
    grad_clip: float


class Audit(Section):
    prompts: Whole
    seeds: Whole


class Explore(Section):
    select: Target
    audit: Audit
    previews: list[Count]
    sync: Literal["race", "await", "replay"]
    await_timeout_s: Annotated[float, Field(gt=0)]
    replay_from: str | None


class LocalCluster(Section):
    spot_workers: Whole
    workers_per_node: Count
    sp_degree: Count
    spot_trains: bool
    spares: Whole
    respawn: bool
    device: Device
    threads: Count
    nice: Annotated[int, Field(ge=0, le=19)]
    cpus: list[Whole] | None
    heartbeat_timeout_s: Annotated[float, Field(gt=0)]
    lease_target_s: Seconds
    commit_every: Whole
    notices: Target | None


class RayCluster(Section):
    address: Annotated[str, Field(pattern=r"^(auto|[\w.-]+:\d+)$")]
    connect_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    label: Name
    reserved: Name
    spot: Name
    workers_per_node: Count
    respawn: bool
    device: Device
    threads: Count
    nice: Annotated[int, Field(ge=0, le=19)]
    heartbeat_timeout_s: Annotated[float, Field(gt=0)]
    lease_target_s: Seconds
    commit_every: Whole
    notices: Target | None


class VirtualCluster(Section):
    reserved_gpus: Count
    spot_nodes: Whole
    gpus_per_node: Count
    sp_degree: Count
    across_nodes: bool
    batch_size: Count
    lease_target_s: Seconds
    commit_every: Whole
    keeps_commits: bool
    reserved_explores: bool
    spot_trains: bool
    elastic: bool
    device: Device
    threads: Count


def _kind_of_cluster(cluster: Any) -> str:
    keys = cluster if isinstance(cluster, Mapping) else ()
    return "virtual" if "reserved_gpus" in keys else "ray" if "address" in keys else "local"


Cluster = Annotated[
    Annotated[LocalCluster, Tag("local")]
    | Annotated[RayCluster, Tag("ray")]
    | Annotated[VirtualCluster, Tag("virtual")],
    Discriminator(_kind_of_cluster),
]


class Market(Section):
    model_config = ConfigDict(extra="ignore", strict=True)  # a replayed market has the arguments of its decider here
    reserved_usd_per_gpu_hour: float
    spot_usd_per_gpu_hour: float
    zone: str
    grace_s: Seconds
    decider: Target | None


class Parallel(Section):
    sp_degree: Count
    threads: Count
    elastic: bool
    restarts: Whole
    mesh: Target | None  # None: a single rank
    strategy: Target


class Trainer(Section):
    model_config = ConfigDict(extra="allow", strict=True)  # the rest are arguments of Lightning's Trainer
    max_steps: Count
    devices: Count
    accelerator: Literal["cpu", "cuda"]


class Paths(Section):
    root_dir: str
    assets_dir: str
    output_dir: str


class Configuration(Section):
    """The whole configuration of a job that post-trains."""

    model: Model
    data: Data
    reward: Reward
    algo: Algo
    explore: Explore
    planner: Target
    cluster: Cluster
    market: Market
    prices: Target
    parallel: Parallel
    trainer: Trainer
    callbacks: dict[str, Target]
    logger: Target
    hardware: Target | None
    workload: Target | None
    paths: Paths
    name: str
    system: str | None
    job: str
    seed: int
    ckpt_path: str | None


def complaint(config: Mapping[str, Any]) -> str | None:
    """What is wrong with a configuration in one line that names the keys and values; None if nothing is."""
    try:
        Configuration.model_validate(config)
    except ValidationError as error:
        return "; ".join(_sentence(detail) for detail in error.errors())
    return None


def _sentence(detail: Mapping[str, Any]) -> str:
    place = detail["loc"]
    if place[:1] == ("cluster",):
        place = place[:1] + place[2:]  # which kind of cluster it is taken for is no part of the key
    key = ".".join(map(str, place))
    if detail["type"] == "extra_forbidden":
        return f"{key}: there is no such key"
    if detail["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {detail['input']!r}"
