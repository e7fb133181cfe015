"""What is known about the seeds of coming batches, and the choice of those that are trained on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from src.core import events, seeds
from src.core.selection import Selector
from src.core.types import Explored, ExploredByInstance, PolicyVersion


@dataclass(frozen=True)
class _Offer:
    policy: PolicyVersion
    explored: dict[int, tuple[Explored, ...]]
    """By prompt position, in the order of the seeds: who explored first must not matter."""


class SeedBank:
    """Keeps explored seeds by iteration and prompt, and chooses among them (a `core.protocols.SeedSource`).

    Choices depend on what was explored, not on the order in which it came, and degrade smoothly: fewer
    explored seeds than asked for are filled up with new ones; none at all is plain GRPO on random seeds.

    Args:
        run_seed: decides candidate seeds, ties and audits.
        select: which of the explored rewards to keep.
    """

    def __init__(self, *, run_seed: int, select: Selector) -> None:
        self._run_seed = run_seed
        self._select = select
        self._offers: dict[int, _Offer] = {}
        self._chosen: dict[int, dict[int, tuple[int, ...]]] = {}

    def offer(self, iteration: int, explored: ExploredByInstance, policy: PolicyVersion) -> None:
        """Takes what was explored for the batch of `iteration` with the weights `policy`.

        A new offer for the iteration replaces the old one.

        Raises ValueError if a seed was explored twice for a prompt.
        """
        for instance, results in explored.items():
            if len({result.seed for result in results}) < len(results):
                raise ValueError(f"explored seeds of iteration {iteration}, instance {instance} repeat")
        in_order = {
            instance: tuple(sorted(explored[instance], key=lambda result: result.seed)) for instance in sorted(explored)
        }
        self._offers[iteration] = _Offer(policy, in_order)

    def take(self, iteration: int, instance: int, count: int) -> tuple[int, ...]:
        """`count` seeds for a prompt: selected ones if enough are explored, else all of them and new ones."""
        explored = self.explored(iteration, instance)
        if len(explored) >= count:
            ties = seeds.generator("ties", self._run_seed, iteration, instance)
            kept = self._select(self.explored_rewards(iteration, instance), count, ties)
            chosen = tuple(explored[index].seed for index in kept)
        else:
            known = [result.seed for result in explored]
            candidates = (seeds.sample_seed(self._run_seed, iteration, instance, index) for index in itertools.count())
            new = (seed for seed in candidates if seed not in known)
            chosen = tuple(known) + tuple(itertools.islice(new, count - len(known)))
        self._chosen.setdefault(iteration, {})[instance] = chosen
        return chosen

    def audit(self, iteration: int, prompts: int, per_prompt: int) -> dict[int, tuple[Explored, ...]]:
        """Explored seeds to make again: `per_prompt` of each of `prompts` prompts, drawn uniformly.

        The draw knows neither rewards nor choices. Prompts with a single explored seed are passed over, since
        nothing can be ranked there; those with fewer than `per_prompt` give what they have.
        """
        offer = self._offers.get(iteration)
        known = {i: results for i, results in offer.explored.items() if len(results) > 1} if offer else {}
        drawn = seeds.draw(list(known), prompts, "audit", self._run_seed, iteration)
        audited = {}
        for instance in sorted(drawn):
            order = range(len(known[instance]))
            indices = seeds.draw(order, per_prompt, "audit", self._run_seed, iteration, instance)
            audited[instance] = tuple(known[instance][index] for index in sorted(indices))
        return audited

    def explored(self, iteration: int, instance: int) -> tuple[Explored, ...]:
        """What is known of a prompt's seeds, in the order of the seeds."""
        offer = self._offers.get(iteration)
        return offer.explored.get(instance, ()) if offer else ()

    def explored_rewards(self, iteration: int, instance: int) -> list[float]:
        """Their rewards, in the same order."""
        return [result.reward for result in self.explored(iteration, instance)]

    def policy(self, iteration: int) -> PolicyVersion | None:
        """The weights that the iteration's batch was explored with; None if it was not."""
        offer = self._offers.get(iteration)
        return offer.policy if offer else None

    def chosen(self, iteration: int) -> Mapping[int, tuple[int, ...]]:
        """The seeds that were taken for the iteration's batch, by prompt position."""
        return self._chosen.get(iteration, {})

    def forget_before(self, iteration: int) -> None:
        """Drops everything about earlier batches."""
        self._offers = {key: offer for key, offer in self._offers.items() if key >= iteration}
        self._chosen = {key: chosen for key, chosen in self._chosen.items() if key >= iteration}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the constructor's arguments, in JSON types; floats survive JSON exactly."""
        return {
            "explored": {
                str(iteration): {"policy": str(offer.policy), "results": events.explored_rows(offer.explored)}
                for iteration, offer in self._offers.items()
            },
            "chosen": {
                str(iteration): {str(instance): list(chosen) for instance, chosen in by_instance.items()}
                for iteration, by_instance in self._chosen.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, in place of everything known."""
        self._offers = {}
        for iteration, saved in state["explored"].items():
            explored = events.read_explored_rows(saved["results"])
            self.offer(int(iteration), explored, PolicyVersion.parse(saved["policy"]))
        self._chosen = {
            int(iteration): {int(instance): tuple(chosen) for instance, chosen in by_instance.items()}
            for iteration, by_instance in state["chosen"].items()
        }
