"""A sample that was interrupted and one that was not are the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from src.app.engine import RolloutEngine
from src.app.sampling import build_worker_engine
from src.core.types import (
    Commit,
    PolicyVersion,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleSpec,
)
from src.tasks.text import digits_task
from tests.app.runs import TINY, configuration

STEPS = 6
SPEC = SampleSpec(STEPS, (1, 2, 4))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[RolloutEngine]:
    """Two workers of equal weights."""
    config = configuration(Path(tmp_path_factory.mktemp("run")), *TINY, "algo.steps=6", "model.batch_size=2")
    return [build_worker_engine(config) for _ in range(2)]


def asked(kind: RequestKind, count: int = 3) -> list[SampleRequest]:
    """More than one pass."""
    keys = [RequestKey("run", 0, kind, 0, seed, PolicyVersion(0, 0), STEPS) for seed in range(count)]
    return [SampleRequest(key, digits_task().train_prompts[0], SPEC) for key in keys]


class Watch:
    """Remembers what a worker is told, and yields before step `until`."""

    def __init__(self, until: int = STEPS + 1) -> None:
        self.until = until
        self.step = 0
        self.told: list[tuple[int, int]] = []
        self.commits: list[Commit] = []

    def on_step(self, step: int, commits: list[Commit]) -> None:
        self.step = step
        self.told.append((step, len(commits)))
        self.commits = list(commits) or self.commits

    def should_yield(self) -> bool:
        return self.step >= self.until

    @property
    def how(self) -> dict:
        return {"on_step": self.on_step, "should_yield": self.should_yield}


@pytest.mark.parametrize("kind", [RequestKind.ROLLOUT, RequestKind.EXPLORE])
def test_killed_and_resumed_before_every_step(engines, kind):
    one, other = engines
    requests = asked(kind)
    whole, report = one.serve(requests, "w")
    assert report.steps == 3 * STEPS
    assert len({result.digest for result in whole if result.error is None}) == 3
    for step in range(1, STEPS):
        watch = Watch(step)
        results, report = one.serve(requests, "w", **watch.how)
        assert (results, report.steps) == ([], 3 * step)
        assert [(commit.key, commit.step) for commit in watch.commits] == [(r.key, step) for r in requests]
        resumed, report = other.serve(requests, "w", resume=watch.commits)
        assert resumed == whole
        assert report.steps == 3 * (STEPS - step)


def test_resumed_one_by_one_and_twice(engines):
    one, other = engines
    requests = asked(RequestKind.ROLLOUT)
    whole, _ = one.serve(requests, "w")
    first, second = Watch(2), Watch(4)
    one.serve(requests, "w", **first.how)
    other.serve(requests[1:], "w", resume=first.commits[1:], **second.how)
    assert one.serve(requests[1:2], "w", resume=second.commits[:1])[0] == whole[1:2]
    assert one.serve(requests[:1], "w", resume=first.commits[:1])[0] == whole[:1]


@pytest.mark.parametrize(
    ("every", "until", "told"),
    [
        (0, 99, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0)]),
        (1, 99, [(1, 3), (2, 3), (3, 3), (4, 3), (5, 3), (6, 3)]),
        (4, 99, [(1, 0), (2, 0), (3, 0), (4, 3), (5, 0), (6, 0)]),
        (4, 4, [(1, 0), (2, 0), (3, 0), (4, 3)]),
        (0, 2, [(1, 0), (2, 0), (2, 3)]),
    ],
)
def test_commits_come_every_so_many_steps_and_at_the_notice(engines, every, until, told):
    watch = Watch(until)
    engines[0].serve(asked(RequestKind.EXPLORE), "w", commit_every=every, **watch.how)
    assert watch.told == told


def test_a_notice_before_the_first_step_costs_nothing(engines):
    watch = Watch(0)
    results, report = engines[0].serve(asked(RequestKind.EXPLORE), "w", **watch.how)
    assert (results, report.steps, watch.told) == ([], 0, [])


def test_a_notice_after_the_last_step_is_committed_and_the_sample_still_finished(engines):
    watch = Watch(STEPS)
    requests = asked(RequestKind.ROLLOUT)
    results, _ = engines[0].serve(requests, "w", **watch.how)
    assert len(results) == 3
    assert watch.told[-2:] == [(STEPS, 0), (STEPS, 3)]
    again, report = engines[1].serve(requests, "w", resume=watch.commits)
    assert (again, report.steps) == (results, 0)


def test_a_commit_counts_to_the_grid_and_not_from_where_it_was_resumed(engines):
    first, second = Watch(3), Watch()
    requests = asked(RequestKind.EXPLORE)
    engines[0].serve(requests, "w", **first.how)
    engines[0].serve(requests, "w", resume=first.commits, commit_every=2, **second.how)
    assert second.told == [(4, 3), (5, 0), (6, 3)]


def test_only_rollouts_carry_their_past(engines):
    sizes = {}
    for kind in (RequestKind.ROLLOUT, RequestKind.EXPLORE):
        watch = Watch(3)
        engines[0].serve(asked(kind), "w", **watch.how)
        sizes[kind] = watch.commits[0].trajectory.before_SLC.shape[0]
    assert sizes == {RequestKind.ROLLOUT: 2, RequestKind.EXPLORE: 0}


def test_what_another_arithmetic_began_is_mixed(engines):
    watch = Watch(3)
    requests = asked(RequestKind.ROLLOUT)
    engines[0].serve(requests, "w", **watch.how)
    foreign = replace(watch.commits[1], trajectory=replace(watch.commits[1].trajectory, fingerprint="other"))
    resume = [watch.commits[0], foreign, watch.commits[2]]
    results, _ = engines[1].serve(requests, "w", resume=resume)
    own = engines[1].fingerprint
    assert [result.trajectory.fingerprint for result in results] == [own, "mixed", own]


def test_commits_must_fit_the_requests(engines):
    watch = Watch(3)
    requests = asked(RequestKind.ROLLOUT)
    engines[0].serve(requests, "w", **watch.how)
    with pytest.raises(ValueError, match="order of the requests"):
        engines[0].serve(requests, "w", resume=watch.commits[::-1])
    with pytest.raises(ValueError, match=r"before one step, got \[3, 4\]"):
        engines[0].serve(requests, "w", resume=[*watch.commits[:2], replace(watch.commits[2], step=4)])
