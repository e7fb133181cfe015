"""A small job as a program: `python -m tests.spot.job FOLDER ENGINE`. Parent, training rank, two spot workers.

The parent prints one line `ready SCRATCH`, then what it sees; it ends when the rank has trained, or with code 1
when the coordinator is lost. The rank is started with `rank FOLDER` instead, and told the address of Ray.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from src.core.clock import sleep_s
from src.core.types import PolicyVersion, RequestKind
from src.spot.coordinator import CoordinatorLost
from src.spot.fleet import Fleet
from tests.spot.conftest import make_coordinator, make_engine
from tests.spot.fakes import requests, saves

ITERATIONS = 4


def rank() -> None:
    from src.spot.client import RayCluster

    engine = make_engine()
    cluster = RayCluster.connect(sys.stdin.readline().strip(), engine=engine)
    for iteration in range(ITERATIONS):
        policy = PolicyVersion(cluster.incarnation, iteration)
        engine.weights = f"w{iteration}"
        cluster.publish(policy, saves(engine.weights))
        explores = requests(RequestKind.EXPLORE, 400, policy=policy, iteration=iteration + 1)
        cluster.submit(explores)
        made = cluster.collect(requests(RequestKind.ROLLOUT, 8, policy=policy, iteration=iteration))
        assert [result.error for result in made] == [None] * 8
        sleep_s(1.0)
        cluster.close(explores, wait_s=0.0)


def broken_engine() -> None:
    raise RuntimeError("no such model")


ENGINES = {"working": make_engine, "broken": broken_engine}
"""Of the spot workers; the rank's always works."""


def parent(folder: Path, engine: str) -> int:
    fleet = Fleet(coordinator=partial(make_coordinator, folder), engine=ENGINES[engine], spot_workers=2)
    with fleet:
        child = subprocess.Popen([sys.executable, "-m", "tests.spot.job", "rank"], stdin=subprocess.PIPE, text=True)
        print(fleet.start(), file=child.stdin, flush=True)
        print("ready", fleet.scratch, flush=True)
        try:
            cursor = 0
            while child.poll() is None:
                cursor = fleet.news(cursor, wait_s=0.5).cursor
        except CoordinatorLost as error:
            print(f"error: {error}", flush=True)
            return 1
        return child.returncode


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank()
    else:
        sys.exit(parent(Path(sys.argv[1]), sys.argv[2]))
