"""Members of a team of spot workers are killed and frozen at random: no hang, no other sample, nothing lost.

make test-slow ARGS="tests/app/test_spot_team_trials.py -s"      # -s shows how long each trial took
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.conservation import account
from tests.app.blows import POINTS, Blow, make_engine_that_is_hit, prepare
from tests.app.test_spot_teams import (
    COUNT,
    TOLERANCE,
    WITHIN_S,
    asked_for,
    difference,
    log_of,
    pid_of,
    publish,
    started,
)

TRIALS = int(os.environ.get("SPOTLIGHT_TRIALS", "100"))
FROZEN_S = 2.0


def drawn(trial: int) -> tuple[list[Blow], float | None]:
    """A random story of one or two blows: at points of the work, or (the seconds) whenever."""
    draw = random.Random(trial)
    blows = [
        Blow(
            draw.choice(POINTS) if number else draw.choice(POINTS[:2]),
            1 if number else draw.randint(1, 150),
            draw.randrange(2),
            draw.random() < 0.5,
            draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)),
        )
        for number in range(draw.choice((1, 2)))
    ]
    return ([], draw.random() * 1.5) if draw.random() < 0.25 else (blows, None)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_whatever_happens_whenever(tmp_path: Path):
    """kill -9 and SIGSTOP of any member, before, in and between collectives: no hang, no other sample, nothing lost.
    SPOTLIGHT_TRIALS=10 for fewer of them."""
    torch.set_num_threads(1)
    file = tmp_path / "blows.json"
    hit = partial(make_engine_that_is_hit, file=file)
    with started(tmp_path / "run", hit, f"cluster.heartbeat_timeout_s={FROZEN_S}") as teams:
        alone, _ = teams._engine.serve(asked_for(publish(teams, 0)), "me")
        for trial in range(TRIALS):
            asked = asked_for(publish(teams, trial + 1))
            members = teams.complete()["members"]
            blows, after_s = drawn(trial)
            prepare(file, blows)
            began_s = time.monotonic()
            teams.cluster.submit(asked)
            if after_s is not None:
                time.sleep(after_s)
                os.kill(pid_of(teams, members[trial % 2]), (signal.SIGKILL, signal.SIGSTOP)[trial // 2 % 2])
            made = teams.cluster.close(asked, wait_s=WITHIN_S)
            took_s = time.monotonic() - began_s
            print(f"trial {trial}: {took_s:.1f} s, {blows or after_s}", flush=True)
            prepare(file, [])
            assert [result.error for result in made] == [None] * COUNT, (trial, blows)
            assert max(map(difference, made, alone)) < TOLERANCE, (trial, blows)
        found = account([*log_of(teams)], commit_every=1)
    assert found.problems == ()
    assert found.leases_resumed > 0
