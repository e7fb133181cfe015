"""What the planner chose, batch by batch: a pure fold over the event log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from src.core.events import Event
from src.report.read import Curve


@dataclass(frozen=True)
class Choices:
    """Seeds that were asked for, by the iteration that they are for."""

    seeds: Curve
    """Per prompt, on average over the batch."""
    least: Curve
    most: Curve
    by_steps: Mapping[int, Curve]
    """Of the whole batch, by denoising steps; 0 where others were asked for."""
    mean_steps: Curve
    """Of a seed, in batches that any were asked for."""
    reasons: Counter[str]
    """Why nothing more was asked for, and how often."""


def choices(events: Iterable[Event]) -> Choices:
    """Folds an event log. Of a batch that was explored again after a crash only the last exploration counts."""
    prompts: dict[int, int] = {}
    asked: dict[int, Counter[int]] = {}
    steps_of: dict[int, Counter[int]] = {}
    reasons: Counter[str] = Counter()
    for event in events:
        match event["kind"]:
            case "exploration_opened":
                prompts[event["iteration"]] = event["prompts"]
                asked[event["iteration"]], steps_of[event["iteration"]] = Counter(), Counter()
            case "explore_asked":
                for prompt, count, steps in event["seeds"]:
                    asked.setdefault(event["iteration"], Counter())[prompt] += count
                    steps_of.setdefault(event["iteration"], Counter())[steps] += count
            case "explore_stopped":
                reasons[event["reason"]] += 1
    batches = [iteration for iteration in sorted(asked) if prompts.get(iteration, len(asked[iteration]))]
    if not any(counts.total() for counts in asked.values()):
        batches = []
    size = {iteration: prompts.get(iteration, len(asked[iteration])) for iteration in batches}
    complete = {i: len(asked[i]) == size[i] for i in batches}
    return Choices(
        seeds=tuple((float(i), asked[i].total() / size[i]) for i in batches),
        least=tuple((float(i), float(min(asked[i].values())) if complete[i] else 0.0) for i in batches),
        most=tuple((float(i), float(max(asked[i].values(), default=0))) for i in batches),
        by_steps={
            steps: tuple((float(i), float(steps_of[i][steps])) for i in batches)
            for steps in sorted({steps for i in batches for steps in steps_of[i]})
        },
        mean_steps=tuple(
            (float(i), sum(steps * count for steps, count in steps_of[i].items()) / steps_of[i].total())
            for i in batches
            if steps_of[i].total()
        ),
        reasons=reasons,
    )
