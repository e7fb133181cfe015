"""The checker of event logs finds each thing that can be wrong, and nothing in a log that is right."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.conservation import account, count_regroups

ROLLOUT = {"request_kind": "rollout", "iteration": 0}


def log(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two requests whose lease is lost at step 2 and resumed; `changes` by kind of event."""
    rows: list[dict[str, Any]] = [
        {"kind": "run_started", "iteration": 0},
        {"kind": "submitted", **ROLLOUT, "count": 2},
        {"kind": "lease_granted", **ROLLOUT, "lease": 0, "worker": "a", "count": 2},
        {"kind": "lease_lost", **ROLLOUT, "lease": 0, "worker": "a", "count": 2, "committed_steps": 4, "lost_steps": 2},
        {"kind": "lease_resumed", **ROLLOUT, "lease": 1, "worker": "b", "count": 2, "step": 2, "after": [0]},
        {"kind": "results_accepted", **ROLLOUT, "worker": "b", "results": [[0, 7, 0.5], [0, 8, 0.25]]},
        {"kind": "closed", **ROLLOUT, "accepted": 2, "dropped": 0},
        {"kind": "phase", "name": "train", "iteration": 0},
        {"kind": "run_ended", "status": "done", "iteration": 1},
    ]
    return [{"time_s": float(at), **row, **changes.get(row["kind"], {})} for at, row in enumerate(rows)]


def without(kind: str) -> list[dict[str, Any]]:
    return [event for event in log() if event["kind"] != kind]


def test_a_log_that_is_right() -> None:
    found = account(log(), commit_every=1)
    assert found.problems == ()
    assert (found.leases_lost, found.leases_resumed, found.kept_steps, found.repeated_steps) == (1, 1, 4, 2)
    assert (found.lives, found.repeated_iterations, found.requests_lost, found.requests_twice) == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (log(lease_lost={"lost_steps": 3}), "3 steps of 2 samples are repeated"),
        (log(lease_lost={"committed_steps": 3}), "committed at different steps"),
        (log(lease_resumed={"step": 1}), r"but \[1\] go on elsewhere"),
        (without("lease_resumed"), "nobody went on"),
        (log(submitted={"count": 3}), "1 requests neither accepted nor dropped"),
        (without("closed"), "2 requests neither accepted nor dropped"),
        (log(results_accepted={"results": [[0, 7, 0.5], [0, 7, 0.5]]}), "accepted 2 times"),
        (log(results_accepted={"results": [[0, 7, 0.5]]}), "1 made, 2 accepted"),
        (log(results_accepted={"results": [[0, 7, 0.5], [0, 8, 0.5], [0, 9, 0.5]]}), "3 made, 2 accepted"),
        (log(phase={"iteration": 1}), r"trained \[1\] instead of \[0\]"),
        (log(run_started={"iteration": 1}), "goes on at iteration 1, but 0 were done"),
    ],
)
def test_whatever_is_wrong_is_found(events: list[dict[str, Any]], problem: str) -> None:
    found = account(events, commit_every=1)
    assert re.search(problem, "; ".join(found.problems))


@pytest.mark.parametrize(
    "events",
    [
        log(
            lease_resumed={"after": []}, closed={"accepted": 1, "dropped": 1}, results_accepted={"results": [[0, 7, 1]]}
        ),
        log(lease_resumed={"after": []}, results_accepted={"worker": "a", "results": [[0, 7, 1], [0, 8, 1]]}),
        [event for event in log(lease_resumed={"after": []}) if event["kind"] not in ("closed", "run_ended")],
        log(lease_resumed={"after": []}, lease_lost={"committed_steps": 0}),
    ],
    ids=["dropped", "delivered late", "the coordinator died", "nothing committed"],
)
def test_a_lease_may_have_no_heir(events: list[dict[str, Any]]) -> None:
    assert account(events, commit_every=1).problems == ()


def test_a_restart_repeats_iterations_and_closes_the_books_of_the_life_before() -> None:
    first = [event for event in log() if event["kind"] not in ("closed", "run_ended")]
    found = account([*first, *log()], commit_every=1)
    assert (found.problems, found.lives, found.repeated_iterations, found.leases_lost) == ((), 2, 1, 2)


def test_regroups_are_counted_and_those_after_which_somebody_goes_on() -> None:
    kinds = ["lease_resumed", "regrouped", "regrouped", "lease_resumed", "lease_resumed", "regrouped", "lease_granted"]
    assert count_regroups({"kind": kind} for kind in kinds) == (3, 1)
