"""What the event log of a run proves about its requests, whoever was killed meanwhile.

- None is lost: of each batch (request kind, iteration) that was closed, what was submitted was accepted or dropped.
- None counts twice: a sample of a batch is accepted once, and only what was delivered or failed counts as accepted.
- A lost lease goes on at its committed step: every lease that takes over from it begins there. Without an heir it had
  committed nothing, was delivered after all, was cut off when its batch was closed, or its coordinator died.
- A loss repeats at most `commit_every` denoising steps of each sample.
- Iterations follow one another. A restart goes back to an iteration that was reached, never beyond it.

Leases and requests are those of one *life*, from one start of the run to the next: the queue dies with the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from src.core.events import Event


@dataclass(frozen=True)
class Account:
    """What became of leases, requests and iterations."""

    problems: tuple[str, ...]
    """Whatever contradicts the rules above: none, if all is well."""
    lives: int
    repeated_iterations: int
    leases_lost: int
    """With requests unfinished."""
    leases_resumed: int
    """Those that others went on with from a commit."""
    kept_steps: int
    repeated_steps: int
    """Denoising steps (sample x step) of lost leases that were committed, and that had to be made again."""
    requests_lost: int
    requests_twice: int
    regroups: int
    regroups_resumed: int
    """Generations of elastic groups, and those after which a lease that was begun goes on before the next one."""


def account(log: Iterable[Event], *, commit_every: int) -> Account:
    """The account of a run that has ended; see the top of this module.

    Args:
        log: its events, of all its lives.
        commit_every: `cluster.commit_every`, at least 1.
    """
    if commit_every < 1:
        raise ValueError(f"commit_every must be at least 1, got {commit_every}")
    log = list(log)
    lives = [_Life(number, events) for number, events in enumerate(_split(log))]
    problems = [problem for life in lives for problem in life.losses(commit_every)]
    problems += [problem for life in lives for problem in life.batches()]
    problems += list(_gaps(lives))
    figures = sum((life.figures for life in lives), Counter())
    trained = [iteration for life in lives for iteration in life.trained]
    regroups, regroups_resumed = count_regroups(log)
    return Account(
        problems=tuple(problems),
        lives=len(lives),
        repeated_iterations=len(trained) - len(set(trained)),
        leases_lost=figures["leases_lost"],
        leases_resumed=figures["leases_resumed"],
        kept_steps=figures["kept_steps"],
        repeated_steps=figures["repeated_steps"],
        requests_lost=figures["requests_lost"],
        requests_twice=figures["requests_twice"],
        regroups=regroups,
        regroups_resumed=regroups_resumed,
    )


def count_regroups(log: Iterable[Event]) -> tuple[int, int]:
    """`Account.regroups` and `Account.regroups_resumed`, also of a run that goes on."""
    regroups, resumed = 0, set[int]()
    for event in log:
        if event["kind"] == "regrouped":
            regroups += 1
        elif event["kind"] == "lease_resumed" and regroups:
            resumed.add(regroups)
    return regroups, len(resumed)


def _split(log: Iterable[Event]) -> list[list[Event]]:
    lives: list[list[Event]] = []
    for event in log:
        if event["kind"] == "run_started":
            lives.append([])
        lives[-1].append(event)
    return lives


def _gaps(lives: Sequence[_Life]) -> Iterator[str]:
    reached = 0
    for life in lives:
        if life.start > reached:
            yield f"life {life.number} goes on at iteration {life.start}, but {reached} were done"
        expected = list(range(life.start, life.start + len(life.trained)))
        if life.trained != expected:
            yield f"life {life.number} trained {life.trained} instead of {expected}"
        reached = max(reached, life.start + len(life.trained))


Batch = tuple[str, int]


class _Life:
    """The events from one start of the run to the next."""

    def __init__(self, number: int, events: Sequence[Event]) -> None:
        self.number = number
        self.start: int = events[0]["iteration"]
        self.trained = [e["iteration"] for e in events if e["kind"] == "phase" and e["name"] == "train"]
        self.figures: Counter[str] = Counter()
        self._events = events

    def _of(self, kind: str) -> list[Event]:
        return [event for event in self._events if event["kind"] == kind]

    def batches(self) -> Iterator[str]:
        """What is wrong with batches that were closed. Of others the life ended in the midst."""
        asked, accepted, dropped, made = Counter[Batch](), Counter[Batch](), Counter[Batch](), Counter[Batch]()
        samples: Counter[tuple[str, int, int, int]] = Counter()
        for event in self._of("submitted"):
            asked[_batch(event)] += event["count"]
        for event in self._of("closed"):
            accepted[_batch(event)] += event["accepted"]
            dropped[_batch(event)] += event["dropped"]
        for event in self._of("request_failed"):
            made[_batch(event)] += 1
        for event in self._of("results_accepted"):
            made[_batch(event)] += len(event["results"])
            samples.update((*_batch(event), instance, seed) for instance, seed, _ in event["results"])
        ended = any(event["status"] == "done" for event in self._of("run_ended"))
        for batch in asked if ended else {_batch(event) for event in self._of("closed")}:
            if missing := asked[batch] - accepted[batch] - dropped[batch]:
                self.figures["requests_lost"] += abs(missing)
                yield f"life {self.number}, {batch}: {missing} requests neither accepted nor dropped"
            if surplus := made[batch] - accepted[batch]:
                self.figures["requests_twice" if surplus > 0 else "requests_lost"] += abs(surplus)
                yield f"life {self.number}, {batch}: {made[batch]} made, {accepted[batch]} accepted"
        for sample, count in samples.items():
            if count > 1:
                self.figures["requests_twice"] += count - 1
                yield f"life {self.number}, {sample}: accepted {count} times"

    def losses(self, commit_every: int) -> Iterator[str]:
        """What is wrong with lost leases and those who took over."""
        resumed = self._of("lease_resumed")
        begun = {event["lease"]: event["step"] for event in resumed}
        for lost in self._of("lease_lost"):
            count, name = lost["count"], f"life {self.number}, lease {lost['lease']}"
            if count == 0:
                continue
            kept, rest = divmod(lost["committed_steps"], count)
            step = begun.get(lost["lease"], 0) + kept
            heirs = [event for event in resumed if lost["lease"] in event["after"]]
            self.figures += Counter(
                leases_lost=1,
                leases_resumed=bool(heirs),
                kept_steps=lost["committed_steps"],
                repeated_steps=lost["lost_steps"],
            )
            if rest:
                yield f"{name}: its {count} samples were committed at different steps"
            if not 0 <= lost["lost_steps"] <= commit_every * count:
                yield f"{name}: {lost['lost_steps']} steps of {count} samples are repeated"
            if wrong := [heir["lease"] for heir in heirs if heir["step"] != step]:
                yield f"{name}: committed at step {step}, but {wrong} go on elsewhere"
            if step and not heirs and not self._explained(lost):
                yield f"{name}: committed at step {step}, and nobody went on"

    def _explained(self, lost: Event) -> bool:
        """Whether nobody had to go on: the worker delivered after all, the rest was dropped, or the life ended."""
        later = [event for event in self._events if event["time_s"] >= lost["time_s"]]
        same = [event for event in later if "request_kind" in event and _batch(event) == _batch(lost)]
        delivered = any(e["kind"] == "results_accepted" and e["worker"] == lost["worker"] for e in same)
        closed = [event for event in same if event["kind"] == "closed"]
        return delivered or not closed or any(event["dropped"] for event in closed)


def _batch(event: Event) -> Batch:
    return event["request_kind"], event["iteration"]
