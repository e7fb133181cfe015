"""A job on a virtual cluster, in one process: `python train.py system=spotlight` (docs/evidence.md).

The model is trained and its samples are made here, for real; how long that takes, and which GPUs there are, comes from
a hardware profile and a market (`src/sim`). So a run tells how a system of many GPUs would learn over hours and usd.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig

from src.app.build import build_training
from src.app.config import (
    Config,
    build,
    build_ledger,
    build_market,
    geometry,
    plan_run,
    refusing,
    spot_places,
)
from src.app.engine import RolloutEngine
from src.app.errors import Interrupted
from src.app.job import StopSignals, Terminal, temporary
from src.app.sampling import build_rank_engine, build_worker_engine
from src.app.summary import five_lines
from src.core.types import PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleResult
from src.sim.cluster import VirtualCluster
from src.sim.fleet import VirtualFleet
from src.sim.shape import ClusterShape, Samples
from src.sim.synthetic import RewardModel, SyntheticJob
from src.sim.timeline import Timeline
from src.sim.workload import WorkDurations
from src.spot import messages as m
from src.spot import weights
from src.spot.coordinator import WEIGHTS_FOLDER, Coordinator
from src.spot.scheduler import Scheduler


def post_train(config: DictConfig) -> float | None:
    """Post-trains a model on a virtual cluster and returns the final held-out reward.

    Raises:
        ConfigError: bad configuration or input.
        Interrupted: SIGINT or SIGTERM.
    """
    plan = plan_run(config)
    warnings.filterwarnings("ignore", module="pytorch_lightning")  # advice on settings that are chosen on purpose
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    with StopSignals() as stop, temporary(plan.folder / WEIGHTS_FOLDER), Terminal(plan) as terminal:
        coordinator = train(plan.config, plan.folder, [_Following(terminal, stop)])
        terminal.show(coordinator.log.news(terminal.cursor))
        unfinished = bool(stop.name) and terminal.iteration < plan.config["trainer"]["max_steps"]
        status = "interrupted" if unfinished else "done"
        coordinator.record("run_ended", status=status, iteration=terminal.iteration)
        coordinator.shutdown()
    if unfinished:
        raise Interrupted(f"stopped by {stop.name}; a run on a virtual cluster cannot be gone on with")
    print(five_lines(terminal.summary, plan.folder))
    reward: float | None = terminal.summary["eval_reward_end"]
    return reward


def train(config: Config, folder: Path, followers: Sequence[_Following] = ()) -> Coordinator:
    """Trains to the last iteration; the logs are in `folder`."""
    sampler, engine = build_rank_engine(config)
    samples = EngineSamples(rank=engine, worker=build_worker_engine(config), weights_root=folder / WEIGHTS_FOLDER)
    coordinator, cluster = build_cluster(config, folder, samples, samples.heard)
    trainer, module, data = build_training(config, folder, cluster, sampler, engine)
    for follower in followers:
        follower.follow(coordinator)
        trainer.callbacks.append(follower)  # type: ignore[attr-defined]
    trainer.fit(module, data)
    return coordinator


def rehearse(config: Config, folder: Path) -> Coordinator:
    """Goes through all iterations without a model: durations and costs are those of `train` for a system that does not
    explore, and rewards mean nothing."""
    sizes = geometry(config)
    coordinator, cluster = build_cluster(config, folder, RewardModel(seed=config["seed"]))
    SyntheticJob(
        seed=config["seed"],
        prompts=sizes.prompts_per_iteration,
        rollouts_per_prompt=sizes.rollouts_per_prompt,
        steps=sizes.steps,
        iterations=config["trainer"]["max_steps"],
        explores=spot_places(config) > 0,
    ).run(cluster)
    return coordinator


def build_cluster(
    config: Config, folder: Path, samples: Samples, heard: Callable[[m.Event], None] = lambda event: None
) -> tuple[Coordinator, VirtualCluster]:
    """The coordinator, and the cluster as the trainer sees it; `heard` is told what the scheduler is told."""
    timeline, durations = Timeline(), build_durations(config)
    coordinator = Coordinator(
        run=folder.name,
        folder=folder,
        scheduler=_ToldScheduler(heard, lease_target_s=config["cluster"]["lease_target_s"], lease_s=math.inf),
        planner=build(config["planner"], "planner"),
        ledger=build_ledger(config),
        now=timeline,
        start_wall_s=0.0,
    )
    fleet = VirtualFleet(
        timeline=timeline,
        coordinator=coordinator,
        durations=durations,
        samples=samples,
        shape=build_shape(config),
        nodes=config["cluster"]["spot_nodes"],
        market=build_market(config),
    )
    cluster = VirtualCluster(
        timeline=timeline, coordinator=coordinator, fleet=fleet, durations=durations, samples=samples
    )
    return coordinator, cluster


def build_shape(config: Config) -> ClusterShape:
    """The GPUs of the virtual cluster."""
    names = ("reserved_gpus", "gpus_per_node", "across_nodes", "batch_size", "commit_every", "keeps_commits")
    cluster = config["cluster"]
    with refusing("cluster"):
        return ClusterShape(
            **{name: cluster[name] for name in names},
            degree=cluster["sp_degree"],
            reserved_explores=cluster["reserved_explores"],
            spot_trains=cluster["spot_trains"],
        )


def build_durations(config: Config) -> WorkDurations:
    """How long the real job's work takes that this job's stands for."""
    sizes = geometry(config)
    hardware = build(config["hardware"], "hardware")
    workload = build(config["workload"], "workload")(hardware=hardware)
    return WorkDurations(
        workload=workload,
        samples=sizes.samples,
        trained_steps=sizes.trained_steps,
        updates=sizes.updates,
        elastic=config["cluster"]["elastic"],
    )


class _Following(pl.Callback):
    """Shows the news of the run after every iteration, and passes on the user's wish to stop."""

    def __init__(self, terminal: Terminal, stop: StopSignals) -> None:
        self._terminal = terminal
        self._stop = stop

    def follow(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._terminal.show(self._coordinator.log.news(self._terminal.cursor))
        if self._stop.name:
            self._coordinator.stop(self._stop.name)
            trainer.should_stop = True


class EngineSamples:
    """Real samples for a virtual cluster (`sim.shape.Samples`), made in whole batches of the engine.

    A sample is a function of its request and the weights, whoever makes it and when. So what else is queued is made
    together with what is asked for first, and what nobody waits for any more is never made, though a virtual worker was
    still at it.

    Args:
        rank: the engine of the model that is trained: it makes what is asked of its present weights.
        worker: an engine with weights of its own: it makes what is explored and audited while those change.
    """

    def __init__(self, *, rank: RolloutEngine, worker: RolloutEngine, weights_root: Path) -> None:
        self._rank = rank
        self._worker = worker
        self._weights_root = weights_root
        self._held: PolicyVersion | None = None
        self._open: set[RequestKey] = set()
        self._queued: dict[RequestKey, SampleRequest] = {}
        self._made: dict[RequestKey, SampleResult] = {}

    def heard(self, event: m.Event) -> None:
        """Takes what the scheduler is told."""
        match event:
            case m.Submit(requests):
                self._open.update(request.key for request in requests)
                self._queued.update((request.key, request) for request in requests)
            case m.Close(keys):
                self._open.difference_update(keys)
                for key in keys:
                    self._queued.pop(key, None)
                    self._made.pop(key, None)

    def make(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        if missing := [request for request in requests if request.key not in self._made and self._is_wanted(request)]:
            batch = [*missing, *self._alike(missing)]
            results, _ = self._engine(batch[0]).serve(batch, "virtual")
            self._made.update((result.key, result) for result in results)
        return [self._made.pop(request.key, _dropped(request)) for request in requests]

    def _is_wanted(self, request: SampleRequest) -> bool:
        """Held-out images are asked for past the scheduler."""
        return request.key in self._open or request.key.kind is RequestKind.EVAL

    def _alike(self, missing: Sequence[SampleRequest]) -> list[SampleRequest]:
        """Queued requests that fill up the last batch."""
        for request in missing:
            self._queued.pop(request.key, None)
        first = missing[0]
        alike = (
            request
            for key, request in self._queued.items()
            if (key.kind, key.policy, request.spec) == (first.key.kind, first.key.policy, first.spec)
        )
        filling = list(islice(alike, -len(missing) % self._worker.batch_size))
        for request in filling:
            del self._queued[request.key]
        return filling

    def _engine(self, request: SampleRequest) -> RolloutEngine:
        if request.key.kind in (RequestKind.ROLLOUT, RequestKind.EVAL):
            return self._rank
        policy = request.key.policy
        if policy != self._held:
            self._worker.load_weights(weights.folder_of(self._weights_root, policy))
            self._held = policy
        return self._worker


def _dropped(request: SampleRequest) -> SampleResult:
    """The scheduler rejects it, whatever it says."""
    return SampleResult(request.key, "virtual", weights_checksum="", error="nobody waits for it")


class _ToldScheduler(Scheduler):
    """Passes on what it is told."""

    def __init__(self, tell: Callable[[m.Event], None], **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._tell = tell

    def handle(self, now_s: float, event: m.Event) -> list[m.Action]:
        self._tell(event)
        return super().handle(now_s, event)
