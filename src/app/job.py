"""The parent process of a job: launcher, Ray driver and terminal. It neither trains nor makes samples.

parent ── Ray: coordinator (queue, results, logs), spot workers (explore, roll out)
   └───── training ranks (src/app/rank.py): talk to the coordinator and to one another
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.utils import get_method
from omegaconf import DictConfig

from src.app.config import (
    Config,
    ConfigError,
    RunPlan,
    build,
    build_ledger,
    build_market,
    is_joined,
    plan_run,
    spot_places,
    spot_ranks,
    spot_teams,
)
from src.app.errors import Interrupted, JobFailed
from src.app.processes import TEAM, shared_folder
from src.app.progress import Progress
from src.app.ranks import LOOPBACK_ONLY, NCCL_REPORTS, ElasticRanks, Ranks
from src.app.sinks import Guarded, Sink
from src.app.summary import Summary, five_lines, write_summary
from src.core.events import Event, read_jsonl
from src.spot.coordinator import WEIGHTS_FOLDER, Coordinator, CoordinatorLost
from src.spot.fleet import Fleet
from src.spot.joined import JoinedRay
from src.spot.members import Store, rank_member
from src.spot.notices import Signs
from src.spot.process import WorkerSettings
from src.spot.run_log import EVENTS_FILE, News
from src.spot.scheduler import Scheduler
from src.spot.session import ClusterError, OwnRay

POLL_S = 0.2


def launch(config: DictConfig) -> float | None:
    """Runs the job that `config.job` names and returns what a sweep maximises."""
    job = get_method(config.job)
    result: float | None = job(config)
    return result


def post_train(config: DictConfig) -> float | None:
    """Post-trains a model and returns the final held-out reward (None if nothing was left to do).

    Raises:
        ConfigError: bad configuration or input.
        JobFailed: a part of the job died.
        Interrupted: SIGINT or SIGTERM; a checkpoint was saved.
        KeyboardInterrupt: the second of them; the last checkpoint is that of an earlier iteration.
    """
    plan = plan_run(config)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    terminal, stop = Terminal(plan), StopSignals()
    try:
        with (
            stop,
            temporary(plan.folder / WEIGHTS_FOLDER),
            _fleet(plan) as fleet,
            temporary(shared_folder(fleet.scratch)),
            _ranks(plan, fleet) as ranks,
            terminal,
        ):
            ranks.send_start(fleet.start())
            _follow(fleet, ranks, terminal, stop)
            terminal.show(fleet.news(terminal.cursor, 0.0))
            unfinished = terminal.iteration < plan.config["trainer"]["max_steps"]
            failure = ranks.failure()
            status = "failed" if failure else "interrupted" if terminal.stopped_by and unfinished else "done"
            fleet.record("run_ended", status=status, iteration=terminal.iteration)
            terminal.show(fleet.news(terminal.cursor, 0.0))
    except CoordinatorLost as error:
        raise JobFailed(f"{error}: {plan.resume_hint}") from error
    except ClusterError as error:
        cluster = plan.config["cluster"]
        key = f"cluster.address={cluster['address']}" if is_joined(plan.config) else "cluster.sp_degree"
        raise ConfigError(f"{key}: {error}") from error
    if failure:
        raise failure
    if status == "interrupted":
        raise Interrupted(f"stopped by {terminal.stopped_by}; go on with: {plan.resume_hint}")
    print(five_lines(terminal.summary, plan.folder))
    reward: float | None = terminal.summary["eval_reward_end"]
    return reward


def _ranks(plan: RunPlan, fleet: Fleet) -> Ranks:
    if not plan.config["parallel"]["elastic"]:
        return Ranks(plan)
    return ElasticRanks(plan, fleet, spot_ranks(plan.config))


def _follow(fleet: Fleet, ranks: Ranks, terminal: Terminal, stop: StopSignals) -> None:
    """Shows what happens until the training ranks have ended, and passes on the user's wish to stop."""
    told = False
    while ranks.running():
        terminal.show(fleet.news(terminal.cursor, POLL_S))
        if stop.name and not told:
            fleet.stop(stop.name)
            told = True


class Terminal:
    """Shows the news of a job on the terminal and passes it to the logger."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._sink: Sink = Guarded(build(plan.config["logger"], "logger"))
        ledger = build_ledger(plan.config)
        for event in _earlier_events(plan.folder):
            ledger.add(event)
        self._progress = Progress(total=plan.config["trainer"]["max_steps"], ledger=ledger)
        self.cursor = 0
        self.iteration = 0
        self.stopped_by = ""
        """The signal after which the job saved and ended."""
        self.summary: Summary = {}
        """The figures of the run, when it has ended."""

    def __enter__(self) -> Terminal:
        self._progress.start()
        self._sink.start(self._plan.folder, self._plan.config)
        return self

    def __exit__(self, *_: object) -> None:
        """Writes summary.json, also of a job that failed once it had begun, and ends the logger."""
        self._progress.stop()
        if (self._plan.folder / EVENTS_FILE).exists():
            self.summary = write_summary(self._plan.folder, ledger=build_ledger(self._plan.config))
        self._sink.finish(self.summary)

    def show(self, news: News) -> None:
        """Takes what was logged since the last call."""
        self.cursor = news.cursor
        for event in news.events:
            self._progress.on_event(event)
            if event["kind"] == "stop_requested":
                self.stopped_by = event["signal"]
            if event["kind"] == "evaluated":
                self._sink.images(event["iteration"], event["images"])
        for row in news.metrics:
            self._progress.on_metrics(row)
            self.iteration = max(self.iteration, row["step"])
            metrics = {name: value for name, value in row.items() if name not in ("step", "time_s")}
            self._sink.log(row["step"], metrics)


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a request to finish the iteration and save; a second one ends at once."""

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name:
            raise KeyboardInterrupt(f"stopped at once by {signal.Signals(number).name}")
        self.name = signal.Signals(number).name
        print("stopping after this iteration (again: at once)", file=sys.stderr)


def make_coordinator(config: Config, run: str, folder: Path, iteration: int) -> Coordinator:
    """The coordinator of a job, in its own process."""
    cluster = config["cluster"]
    scheduler = Scheduler(heartbeat_timeout_s=cluster["heartbeat_timeout_s"], lease_target_s=cluster["lease_target_s"])
    elastic = config["parallel"]["elastic"]
    coordinator = Coordinator(
        run=run,
        folder=folder,
        scheduler=scheduler,
        planner=build(config["planner"], "planner"),
        iteration=iteration,
        ledger=build_ledger(config),
        store=make_store() if elastic or cluster.get("sp_degree", 1) > 1 else None,
    )
    if elastic:
        incarnation = coordinator.log.incarnation
        names = [rank_member(number, incarnation).name for number in range(config["trainer"]["devices"])]
        # Ranks report an error when they next meet the others, after all that they compute by themselves.
        window_s = config["parallel"]["mesh"]["timeout_s"]
        coordinator.teams.found(TEAM, names, window_s=window_s, hold_state=True)
    return coordinator


def make_store() -> Store:
    """What elastic groups form through, in the coordinator's process: torch is loaded there only if there are any."""
    from src.parallel.group import serve_store

    return serve_store()


def make_engine(config: Config) -> Any:
    """The engine of a spot worker, in its own process: only there torch and diffusers are loaded."""
    from src.app.sampling import build_team_engine, build_worker_engine

    if config["cluster"].get("sp_degree", 1) == 1:
        return build_worker_engine(config)
    os.environ.update({**LOOPBACK_ONLY, **NCCL_REPORTS})
    return build_team_engine(config)


def make_signs(section: Config) -> Signs:
    """What a spot worker asks whether its node will be taken away, in its own process."""
    signs: Signs = build(section, "cluster.notices")
    return signs


def build_joined(config: Config) -> JoinedRay:
    """The Ray cluster that the section `cluster` names."""
    cluster = config["cluster"]
    return JoinedRay(
        address=cluster["address"],
        label=cluster["label"],
        reserved=cluster["reserved"],
        spot=cluster["spot"],
        timeout_s=cluster["connect_timeout_s"],
        grace_s=config["market"]["grace_s"],
        gpus_per_worker=int(cluster["device"].startswith("cuda")),
    )


def _fleet(plan: RunPlan) -> Fleet:
    cluster = plan.config["cluster"]
    joined = build_joined(plan.config) if is_joined(plan.config) else None
    market = joined.nodes if joined else build_market(plan.config)
    trains = bool(spot_ranks(plan.config))
    # Workers that share sequences have a GPU each; others share the first one.
    own_gpus = not joined and cluster["sp_degree"] > 1 and cluster["device"].startswith("cuda")
    ranks_on_gpus = plan.config["trainer"]["accelerator"] == "cuda"
    own_ray = OwnRay(
        reserved_gpus=plan.config["trainer"]["devices"] if ranks_on_gpus else 0,
        spot_gpus=spot_places(plan.config) if own_gpus else 0,
    )
    return Fleet(
        coordinator=partial(
            make_coordinator,
            plan.config,
            run=plan.folder.name,
            folder=plan.folder,
            iteration=_resumed_iteration(plan.resume),
        ),
        engine=partial(make_engine, plan.config),
        settings=WorkerSettings(
            niceness=cluster["nice"],
            cpus=tuple(cluster.get("cpus") or ()),
            threads=cluster["threads"],
            commit_every=cluster["commit_every"],
            grace_s=plan.config["market"]["grace_s"],
            signs=partial(make_signs, cluster["notices"]) if cluster["notices"] else None,
        ),
        spot_workers=0 if trains else cluster["workers_per_node"] if market else cluster["spot_workers"],
        ranks_per_node=cluster["workers_per_node"] if trains else 0,
        market=market,
        runs_on=joined or own_ray,
        teams={} if joined else spot_teams(plan.config),
        spares=0 if trains else cluster.get("spares", 0),
        respawn=cluster["respawn"],
    )


@contextmanager
def temporary(folder: Path) -> Iterator[None]:
    """Removes a folder in the end."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _earlier_events(folder: Path) -> Iterator[Event]:
    """What the run has logged before this start."""
    log = folder / EVENTS_FILE
    return read_jsonl(log) if log.is_file() else iter(())


def _resumed_iteration(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    iteration: int = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["iteration"]
    return iteration
