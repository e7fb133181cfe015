"""The deciders of a job decide from what they are told, and from nothing else: told the same, they decide the same."""

from __future__ import annotations

import warnings
from copy import deepcopy

from src.app.build import build_training
from src.app.config import build
from src.app.sampling import build_rank_engine, build_worker_engine
from src.spot.coordinator import Coordinator
from src.spot.inline import InlineCluster
from src.spot.scheduler import Scheduler
from tests.app.runs import TINY, configuration


class Recorder:
    """A decider that remembers what it was told and what it answered."""

    def __init__(self, decider):
        self._decider = decider
        self.told = []
        self.answered = []

    def __getattr__(self, name):
        return getattr(self._decider, name)

    def handle(self, now_s, event):
        self.told.append((now_s, deepcopy(event)))
        actions = self._decider.handle(now_s, event)
        self.answered.append(deepcopy(actions))
        return actions


def test_recorded_inputs_of_a_job_give_the_recorded_decisions(tmp_path):
    config = configuration(
        tmp_path / "run", *TINY, "planner=ucb", "planner.max_seeds_per_prompt=12", "planner.portion=2"
    )
    scheduler, planner = Recorder(Scheduler()), Recorder(build(config["planner"], "planner"))
    coordinator = Coordinator(run="run", folder=tmp_path / "run", scheduler=scheduler, planner=planner)
    sampler, engine = build_rank_engine(config)
    cluster = InlineCluster(coordinator=coordinator, engine=engine, spot_engines=[build_worker_engine(config)])
    trainer, module, data = build_training(config, tmp_path / "run", cluster, sampler, engine)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")  # as src/app/rank.py does
        trainer.fit(module, data)
    coordinator.shutdown()
    for recorded, again in ((scheduler, Scheduler()), (planner, build(config["planner"], "planner"))):
        assert [again.handle(now_s, event) for now_s, event in recorded.told] == recorded.answered
        assert sum(map(len, recorded.answered)) >= 10
