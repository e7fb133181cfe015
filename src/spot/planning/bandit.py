"""The planner that learns what exploration brings, as a discounted bandit (docs/planner.md)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from src.core import seeds, stats
from src.core.selection import max_variance
from src.spot.planning.allocation import Array, Curves
from src.spot.planning.anytime import AnytimePlanner, Round
from src.spot.planning.attitudes import Attitude, Ucb
from src.spot.planning.beliefs import Beliefs, Prompts, unbiased_variance
from src.spot.planning.protocol import Audited, Explore, KeptRegenerated
from src.spot.planning.value import LearningValue, progress_usd

_BLIND = 0.5
"""Weight of a prompt of which more seeds are under way than its outlook rests on: others are looked at first."""


class Bandit(AnytimePlanner):
    """Gives the next seeds to the prompt where they add most to the kept variance, while they are worth their price.

    With b the fresh variance gained per unit of stale variance gained, and r_p the best gain per seed of prompt p
    (`Curves.best_rates`), the next portion goes to argmax r_p; it is worth

        b r_p / (P R) dL/dv x (iteration_usd + exploration_usd) / L(v)   usd per seed,   v = 1 + b mean_p gain_p / R

    with R the variance of a random group. Exploration stops when that is less than the spot price of a seed's time,
    when v has reached the saturation of learning, or when the time is over. b and the gains are taken as the attitude
    says, which makes it look again at what did not pay: knowledge fades, and doubt grows.

    Args:
        seed: of the run.
        attitude: UCB (if None) or Thompson.
        learning: value of contrast.
        discount: weight that knowledge keeps per iteration.
        portion: seeds per decision.
        max_seeds_per_prompt, miss_rate: see `AnytimePlanner`.
    """

    def __init__(
        self,
        *,
        seed: int,
        attitude: Attitude | None = None,
        learning: LearningValue | None = None,
        discount: float = 0.85,
        portion: int = 4,
        max_seeds_per_prompt: int = 64,
        miss_rate: float = 0.01,
    ) -> None:
        super().__init__(max_seeds_per_prompt=max_seeds_per_prompt, miss_rate=miss_rate)
        if not 0 < discount < 1:
            raise ValueError(f"planner.discount must be between 0 and 1, got {discount}")
        if portion < 1:
            raise ValueError(f"planner.portion must be at least 1, got {portion}")
        self._seed = seed
        self._attitude = attitude or Ucb()
        self._learning = learning or LearningValue()
        self._portion = portion
        self._beliefs = Beliefs(discount=discount)
        self._pending: dict[int, tuple[int, float, float]] = {}  # iteration -> (steps, stale: gained, random)
        self._prospects: _Prospects | None = None

    # Decisions

    def _begin(self, now: Round) -> None:
        self._beliefs.age()
        self._prospects = None

    def _prepare(self, now: Round, room: float) -> None:
        if now.opened.previews and room < math.inf:
            now.steps = self._best_steps(now, room * now.steps)

    def _next(self, now: Round, room: float) -> Explore | str:
        prospects = self._outlook(now)
        reference = self._reference(now) * (1 - 1 / now.opened.keep)  # population variance of a random group
        slope = self._slope(now, now.steps)
        asked_P = np.array(now.asked, dtype=np.float64)
        gain_PM = self._gains(now)
        reached_P = prospects.curves.at(gain_PM, asked_P)
        contrast = 1 + self._sober_slope(now) * float(reached_P.mean()) / reference
        if contrast >= self._learning.saturation:
            return "more contrast would teach no more"
        rate_P = prospects.curves.best_rates(gain_PM, asked_P, reached_P, room)
        rate_P *= self._attitude.stretch(prospects.doubt_P, (self._seed, now.opened.iteration))
        best = float(rate_P.max())
        if not best > 0:
            return "no contrast to gain in this time"
        learning = self._learning.slope(contrast) * slope * best / (now.opened.prompts * reference)
        if not self._pays(now, contrast, learning):
            return "the learning gained is worth less than the spot time"
        blind_P = asked_P - np.array(now.back) + self._portion > prospects.known_P + prospects.prior
        rank_P = rate_P * np.where(blind_P & (asked_P > 0), _BLIND, 1.0)
        prompt = int(prospects.order[np.argmax(rank_P[prospects.order])])
        count = min(self._portion, self._max_seeds_per_prompt - now.asked[prompt], int(min(room, self._portion)))
        return Explore(prompt, count, now.steps)

    def _slope(self, now: Round, steps: int) -> float:
        """b to reckon with, if seeds are explored with `steps` steps."""
        return self._attitude.value(*self._beliefs.slope(steps), (self._seed, now.opened.iteration, steps))

    def _sober_slope(self, now: Round) -> float:
        """b as it is believed: whether learning is saturated is no matter for optimism."""
        return self._beliefs.slope(now.steps)[0]

    def _reference(self, now: Round) -> float:
        """R: variance of fresh rewards within a prompt of this batch, of random seeds (ddof = 1)."""
        return self._outlook(now).random_variance * self._beliefs.scale(now.steps)

    def _gains(self, now: Round) -> Array:
        """Expected stale variance gained by each prompt (P) at each size of the grid (M)."""
        return self._outlook(now).gain_PM

    def _pays(self, now: Round, contrast: float, learning: float) -> bool:
        """Whether a seed that adds `learning` is worth the spot time that it takes."""
        iteration_s = self._iteration.expected
        if iteration_s is None:
            return True
        iteration_usd = now.opened.reserved_usd_per_hour / 3600 * iteration_s
        worth_usd = progress_usd(self._learning.progress(contrast), iteration_usd, sum(now.asked) * now.seed_usd)
        return learning * worth_usd >= now.seed_usd

    def _best_steps(self, now: Round, room: float) -> int:
        """T or one of the previews: what gives most progress per usd with `room` denoising steps to spend."""
        curves = self._outlook(now).curves
        step_usd = now.seed_usd / now.steps
        iteration_usd = now.opened.reserved_usd_per_hour / 3600 * (self._iteration.expected or 0.0)
        relative_M = curves.normal / (1 - 1 / now.opened.keep)

        def value(steps: int) -> float:
            seeds_each = min(room / steps / now.opened.prompts, self._max_seeds_per_prompt)
            # Where all prompts together get less than a size of the grid, a share of the prompts gets it.
            share_M = np.minimum(seeds_each / curves.sizes, 1.0)
            contrast_M = 1 + self._slope(now, steps) * share_M * relative_M
            usd_M = iteration_usd + step_usd * steps * now.opened.prompts * share_M * curves.sizes
            progress = [self._learning.progress(float(contrast)) for contrast in contrast_M]
            return max(p / (usd or 1.0) for p, usd in zip(progress, usd_M, strict=True))

        return max((now.opened.steps, *now.opened.previews), key=value)

    def _outlook(self, now: Round) -> _Prospects:
        if self._prospects is None:
            self._prospects = _Prospects(now, self._max_seeds_per_prompt, self._seed, self._beliefs.prompts)
        self._prospects.update(now)
        return self._prospects

    # Learning

    def _finish(self, now: Round) -> None:
        random_variance = self._outlook(now).random_variance
        gained = sum(_stale_gain(rewards, now.opened.keep) for rewards in now.rewards) / now.opened.prompts
        self._pending[now.opened.iteration] = (now.steps, gained, random_variance)
        self._pending = {key: value for key, value in self._pending.items() if key > now.opened.iteration - 2}
        self._beliefs.explored(now.rewards)

    def _learn(self, event: KeptRegenerated | Audited) -> None:
        if event.iteration not in self._pending:
            return
        steps, gained, random_variance = self._pending[event.iteration]
        if isinstance(event, Audited):
            self._beliefs.audited(steps, event.pairs)
        elif gained > 0 and (groups := [rewards for rewards in event.rewards_PG if len(rewards) > 1]):
            fresh = stats.mean([stats.variance(rewards) for rewards in groups])  # of a single survivor there is none
            at_random = random_variance * (1 - 1 / max(map(len, groups)))
            self._beliefs.paid(steps, gained / at_random, fresh / (at_random * self._beliefs.scale(steps)) - 1)

    def state_dict(self) -> dict[str, Any]:
        pending = [[iteration, *known] for iteration, known in self._pending.items()]
        return {**super().state_dict(), "beliefs": self._beliefs.state_dict(), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._beliefs.load_state_dict(state["beliefs"])
        self._pending = {iteration: (steps, gain, random) for iteration, steps, gain, random in state["pending"]}
        self._prospects = None


class _Prospects:
    """What to expect of the prompts of an open round: a function of what came back, kept up to date."""

    def __init__(self, now: Round, candidates: int, seed: int, known: Prompts) -> None:
        prompts = now.opened.prompts
        self.curves = Curves(keep=now.opened.keep, candidates=max(candidates, now.opened.keep))
        self.order = np.array(seeds.permutation(prompts, "planner order", seed, now.opened.iteration), dtype=np.intp)
        self.prior = known.prior_seeds
        self._typical = known.typical
        self.known_P: Array = np.zeros(prompts)
        self._total = 0
        self._variance_P: Array = np.zeros(prompts)
        self._own_PM: Array = np.zeros((prompts, len(self.curves.sizes)))
        self.random_variance = self._typical or 1.0
        """Of this batch, in the mean: stale, ddof = 1."""
        self.gain_PM: Array = np.zeros_like(self._own_PM)
        """Expected stale variance gained: from a prompt's own rewards and the typical prompt, in proportion n : n_0."""
        self.doubt_P: Array = np.zeros(prompts)
        """Relative deviation of each prompt's variance, as far as its own rewards tell: sqrt(2 / (n + n_0))."""
        self._mix()

    def update(self, now: Round) -> None:
        """Takes what came back since the last time."""
        total = sum(map(len, now.rewards))
        if total == self._total:
            return
        self._total = total
        for prompt, rewards in enumerate(now.rewards):
            if len(rewards) > 1 and len(rewards) != self.known_P[prompt]:
                self.known_P[prompt] = len(rewards)
                self._variance_P[prompt] = unbiased_variance(rewards)
                self._own_PM[prompt] = self.curves.known(rewards)
        self._mix()

    def _mix(self) -> None:
        some = self.known_P > 0
        typical = self._typical or float(self._variance_P[some].mean() if some.any() else 0.0) or 1.0
        weight_P = self.known_P / (self.known_P + self.prior)
        self.random_variance = float((weight_P * self._variance_P + (1 - weight_P) * typical).mean())
        self.doubt_P = np.sqrt(2 / (self.known_P + self.prior))
        self.gain_PM = weight_P[:, None] * self._own_PM + (1 - weight_P)[:, None] * typical * self.curves.normal


def _stale_gain(rewards: list[float], keep: int) -> float:
    """Variance of the best subset, less that of a random group."""
    if len(rewards) <= keep:
        return 0.0
    kept = max_variance(rewards, keep, random.Random(0))  # ties do not matter: equal rewards, equal variance
    return stats.variance([rewards[index] for index in kept]) - unbiased_variance(rewards) * (1 - 1 / keep)
