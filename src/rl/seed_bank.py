"""What is known about the seeds of coming batches, and the choice of those that are trained on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from src.core import events, seeds
from src.core.selection import Selector
from src.core.types import Explored, ExploredByInstance


class SeedBank:
    """Keeps explored seeds by iteration and prompt, and chooses among them.

    Choices depend on what was explored, not on the order in which it came, and degrade smoothly: fewer
    explored seeds than asked for are filled up with new ones; none at all is plain GRPO on random seeds.

    Args:
        run_seed: decides candidate seeds, ties and audits.
        select: which of the explored rewards to keep.
    """

    def __init__(self, *, run_seed: int, select: Selector) -> None:
        self._run_seed = run_seed
        self._select = select
        self._explored: dict[int, dict[int, tuple[Explored, ...]]] = {}
        """By iteration and prompt position, in the order of the seeds: who explored first must not matter."""

    def offer(self, iteration: int, explored: ExploredByInstance) -> None:
        """Takes what was explored for the batch of `iteration`; a new offer for it replaces the old one.

        Raises ValueError if a seed was explored twice for a prompt.
        """
        for instance, results in explored.items():
            if len({result.seed for result in results}) < len(results):
                raise ValueError(f"explored seeds of iteration {iteration}, instance {instance} repeat")
        self._explored[iteration] = {
            instance: tuple(sorted(explored[instance], key=lambda result: result.seed)) for instance in sorted(explored)
        }

    def take(self, iteration: int, instance: int, count: int) -> tuple[int, ...]:
        """`count` seeds for a prompt: selected ones if enough are explored, else all of them and new ones."""
        explored = self.explored(iteration, instance)
        if len(explored) >= count:
            return self.choose(iteration, instance, {found.seed: found.reward for found in explored}, count)
        known = [result.seed for result in explored]
        candidates = (seeds.sample_seed(self._run_seed, iteration, instance, index) for index in itertools.count())
        new = (seed for seed in candidates if seed not in known)
        return tuple(known) + tuple(itertools.islice(new, count - len(known)))

    def choose(self, iteration: int, instance: int, rewards: Mapping[int, float], count: int) -> tuple[int, ...]:
        """`count` of a prompt's seeds by their rewards; all if there are no more."""
        ordered = sorted(rewards)
        if len(ordered) < count:
            return tuple(ordered)
        ties = seeds.generator("ties", self._run_seed, iteration, instance)
        return tuple(ordered[index] for index in self._select([rewards[seed] for seed in ordered], count, ties))

    def audit(self, iteration: int, prompts: int, per_prompt: int) -> dict[int, tuple[Explored, ...]]:
        """Explored seeds to make again: `per_prompt` of each of `prompts` prompts, drawn uniformly.

        The draw knows neither rewards nor choices. Prompts with a single explored seed are passed over, since
        nothing can be ranked there; those with fewer than `per_prompt` give what they have.
        """
        known = {i: results for i, results in self._explored.get(iteration, {}).items() if len(results) > 1}
        drawn = seeds.draw(list(known), prompts, "audit", self._run_seed, iteration)
        audited = {}
        for instance in sorted(drawn):
            order = range(len(known[instance]))
            indices = seeds.draw(order, per_prompt, "audit", self._run_seed, iteration, instance)
            audited[instance] = tuple(known[instance][index] for index in sorted(indices))
        return audited

    def explored(self, iteration: int, instance: int) -> tuple[Explored, ...]:
        """What is known of a prompt's seeds, in the order of the seeds."""
        return self._explored.get(iteration, {}).get(instance, ())

    def forget_before(self, iteration: int) -> None:
        """Drops everything about earlier batches."""
        self._explored = {key: explored for key, explored in self._explored.items() if key >= iteration}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the constructor's arguments, in JSON types; floats survive JSON exactly."""
        return {str(iteration): events.explored_rows(explored) for iteration, explored in self._explored.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, in place of everything known."""
        self._explored = {}
        for iteration, rows in state.items():
            self.offer(int(iteration), events.read_explored_rows(rows))
