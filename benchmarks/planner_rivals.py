"""What the planners are compared with: one that knows the truth, and a bandit library that chooses among sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from river import bandit
from river import stats as river_stats
from scipy.special import ndtri

from benchmarks.planner_worlds import LEVELS, Array, Draws, Score, World
from src.core import stats
from src.spot.planning.allocation import Curves
from src.spot.planning.anytime import AnytimePlanner, Round
from src.spot.planning.attitudes import Ucb
from src.spot.planning.bandit import Bandit
from src.spot.planning.beliefs import Prompts
from src.spot.planning.protocol import Audited, Explore, KeptRegenerated
from src.spot.planning.value import LearningValue


class Oracle(Bandit):
    """The same rules with nothing to learn: it knows every prompt's distribution, b, speeds, and the training time.

    It does not know the rewards of seeds before they are explored, nor which workers will come and go.
    """

    def __init__(self, *, world: World, learning: LearningValue) -> None:
        super().__init__(seed=world.seed, attitude=Ucb(optimism=0.0), learning=learning)
        self._world = world
        self._draws: Draws = world.iteration(0)
        self._curves: list[tuple[int, Array]] = []

    def _begin(self, now: Round) -> None:
        super()._begin(now)
        self._draws = self._world.iteration(now.opened.iteration)
        self._curves = []

    def _slope(self, now: Round, steps: int) -> float:
        return self._draws.slope(steps)

    def _sober_slope(self, now: Round) -> float:
        return self._draws.slope(now.steps)

    def _reference(self, now: Round) -> float:
        return self._draws.random_variance

    def _gains(self, now: Round) -> Array:
        curves = self._outlook(now).curves
        if not self._curves:
            self._curves = [(0, conditional_gain(curves, score, ())) for score in self._draws.scores]
        for prompt, rewards in enumerate(now.rewards):
            if self._curves[prompt][0] != len(rewards):
                self._curves[prompt] = (len(rewards), conditional_gain(curves, self._draws.scores[prompt], rewards))
        return np.stack([gain for _, gain in self._curves])

    def _room(self, now_s: float, now: Round) -> float:
        start_s = now.opened_s + 40.0 if now.started_s is None else now.started_s
        room = 0
        for worker in now.workers:
            pass_s = self._draws.step_s(int(worker.name)) * now.steps
            begin_s = max(now.busy_since_s.get(worker.name, start_s), now_s - pass_s, start_s)
            left_s = start_s + self._draws.training_s - begin_s - 0.1 * pass_s
            room += max(0, math.floor(left_s / pass_s)) * worker.batch_size
        return room

    def _seed_usd(self, now: Round) -> float:
        rates = [w.batch_size / (self._draws.step_s(int(w.name)) * now.steps) for w in now.workers]
        return now.opened.spot_usd_per_hour / 3600 * len(rates) / sum(rates) if rates else 0.0


class Informed(Oracle):
    """Knows the model but not the prompts: b, how prompts differ on the whole, speeds, and the training time.

    What tells it from the bandit is what learning and caution cost; what tells it from the oracle is foresight of the
    single prompts, which nobody has who meets them for the first time.
    """

    def _begin(self, now: Round) -> None:
        super()._begin(now)
        draw = self._world.generator("population")
        variances = [float(self._world.reward(draw)(LEVELS).var()) for _ in range(300)]
        mean = stats.mean(variances)
        self._beliefs.prompts = Prompts(1e6, 1e6 * mean, 1e6 * stats.mean([v * v for v in variances]))

    def _reference(self, now: Round) -> float:
        return Bandit._reference(self, now)

    def _gains(self, now: Round) -> Array:
        return Bandit._gains(self, now)


def conditional_gain(curves: Curves, score: Score, known: Sequence[float]) -> Array:
    """Gain with the true distribution: known rewards, and the expected order statistics of those to come."""

    def at_random(count: int) -> Array:
        return score(ndtri((np.arange(1, count + 1) - 0.375) / (count + 0.25)))

    groups = [np.sort([*known, *at_random(max(int(size) - len(known), 0))]) for size in curves.sizes]
    groups.append(np.sort(at_random(curves.keep)))
    low, high = (np.stack([group[::turn][: curves.keep] for group in groups]) for turn in (1, -1))
    *variance_M, random_variance = curves.kept_variance(low, high)
    return np.asarray(np.maximum.accumulate(np.maximum(np.array(variance_M) - random_variance, 0.0)))


class RiverUcb(AnytimePlanner):
    """river's UCB over sizes N, equal for all prompts, among those that fit; paid in progress per usd."""

    def __init__(self, *, keep: int, prompts: int, learning: LearningValue, seed: int) -> None:
        super().__init__()
        self._arms = [0, *(m * keep for m in (2, 3, 4, 6, 8))]
        self._policy = bandit.UCB(delta=0.3, reward_obj=river_stats.EWMean(fading_factor=0.2), seed=seed)
        self._learning = learning
        self._arm = 0
        self._paid: dict[int, tuple[int, float]] = {}
        self._random: list[float] = []

    def _next(self, now: Round, room: float) -> Explore | str:
        if not any(now.asked):
            prompts = now.opened.prompts
            self._arm = self._policy.pull([arm for arm in self._arms if arm * prompts <= room])
        part = sum(now.asked) % now.opened.prompts
        if now.asked[part] >= self._arm:
            return "chosen size is asked for"
        return Explore(part, 1, now.steps)

    def _finish(self, now: Round) -> None:
        iteration_usd = now.opened.reserved_usd_per_hour / 3600 * (self._iteration.expected or 0.0)
        share = sum(now.asked) * self._seed_usd(now) / iteration_usd if iteration_usd else 0.0
        self._paid[now.opened.iteration] = (self._arm if any(now.asked) else 0, share)

    def _learn(self, event: KeptRegenerated | Audited) -> None:
        if isinstance(event, Audited):
            groups: dict[int, list[float]] = {}
            for pair in event.pairs:
                groups.setdefault(pair.prompt, []).append(pair.fresh)
            self._random += [stats.variance(g) * len(g) / (len(g) - 1) for g in groups.values() if len(g) > 1]
            self._random = self._random[-40:]
        elif event.iteration in self._paid:
            arm, share = self._paid.pop(event.iteration)
            keep = max(map(len, event.rewards_PG))
            random_variance = stats.mean(self._random) * (1 - 1 / keep) if any(self._random) else math.nan
            fresh = stats.mean([stats.variance(rewards) for rewards in event.rewards_PG])
            contrast = fresh / random_variance if arm and random_variance > 0 else 1.0
            self._policy.update(arm, self._learning.progress(contrast) / (1 + share))
