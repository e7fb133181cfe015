"""The training loop: one `training_step` is one iteration of GRPO on a batch of prompts.

Samples are made and scored by the cluster, by this rank and the spot workers alike. Which seeds are rolled out was
decided while the iteration before trained: `src/spot/callback.py` is the callback around this step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
import torch
from torch import Tensor

from src.core.clock import Stopwatch
from src.core.events import explored_rows
from src.core.protocols import Cluster, Updater
from src.core.types import (
    Batch,
    Exploration,
    Explored,
    ExploredByInstance,
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleSpec,
)
from src.models.adapter import Conditioning, DiTAdapter
from src.rl.advantages import Advantages, GroupAdvantage
from src.rl.audit import AuditPair, audit_statistics, within_variance
from src.rl.ema import EMA
from src.rl.geometry import BatchGeometry
from src.rl.loss import LossSums
from src.rl.metrics import rollout_metrics, update_metrics
from src.rl.policy_gradient import PolicyGradient, TrainingSet
from src.rl.rollouts import Pairs, Rollouts
from src.rl.seed_bank import SeedBank
from src.rl.window import StepWindow, trained_steps


@dataclass(frozen=True)
class RunIdentity:
    """Which run this is: its name, its seed, and how often it was started before."""

    run: str
    seed: int
    incarnation: int


@dataclass(frozen=True)
class Audit:
    """How many explored seeds are made again to measure the ranking: `seeds` of each of `prompts` prompts."""

    prompts: int
    seeds: int

    def __post_init__(self) -> None:
        for name, value in (("prompts", self.prompts), ("seeds", self.seeds)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")


class FlowGRPO(pl.LightningModule):
    """Flow-GRPO (arXiv 2505.05470) on seeds that were chosen by exploration.

    Args:
        identity: run, seed and incarnation.
        cluster: makes samples and holds the event log.
        adapter: the model that is trained, and its prompt encoder.
        save_weights: writes the trained parameters into a folder and returns their checksum.
        geometry: sizes of the batch. guidance_scale: of classifier-free guidance, 1 for none.
        window: the stochastic steps of an iteration.
        trusts: whether log-probabilities made with the arithmetic of a fingerprint are taken as they came; the others
            are computed again.
        ema: running average of the trained weights, kept beside them.
    """

    def __init__(
        self,
        *,
        identity: RunIdentity,
        cluster: Cluster,
        adapter: DiTAdapter,
        save_weights: Callable[[Path], str],
        geometry: BatchGeometry,
        guidance_scale: float,
        window: StepWindow,
        advantage: GroupAdvantage,
        policy_gradient: PolicyGradient,
        seed_bank: SeedBank,
        audit: Audit,
        trusts: Callable[[str], bool],
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        ema: EMA | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.run = identity.run
        self.seed = identity.seed
        self.incarnation = identity.incarnation
        self.cluster = cluster
        self.adapter = adapter
        self.transformer = adapter.transformer  # registered here, so that Lightning sees its parameters
        self.seed_bank = seed_bank
        self.geometry = geometry
        self.ema = ema
        self.iteration = 0
        """Iterations done. Lightning's global_step stays 0: it sees none of the optimizer steps."""
        self.published: PolicyVersion | None = None
        """The version of the weights that were made available last."""
        self._save_weights = save_weights
        self._guidance_scale = guidance_scale
        self._window = window
        self._advantage = advantage
        self._policy_gradient = policy_gradient
        self._audit = audit
        self._trusts = trusts
        self._make_optimizer = optimizer
        self._rollout_rewards: dict[tuple[int, int], float] = {}

    # ---------------------------------------------------------------- one iteration

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        watch = Stopwatch(self.cluster.now)
        with watch.phase("rollout"), self.cluster.phase("rollout", batch.iteration):
            seeds_PR = self.take_seeds(batch)
            rollouts = self.contrast(batch, self.roll_out(batch, seeds_PR))
        with watch.phase("train"), self.cluster.phase("train", batch.iteration):
            advantages = self.advantages(batch, rollouts)
            data, metrics = self.training_set(batch, rollouts, advantages, watch)
            metrics |= self.update(batch, data)
        self.iteration = batch.iteration + 1
        metrics |= rollout_metrics(rollouts, advantages)
        metrics |= {f"time/{phase}_s": seconds for phase, seconds in watch.seconds.items()}
        self.cluster.log_metrics(self.iteration, metrics)

    def take_seeds(self, batch: Batch) -> list[tuple[int, ...]]:
        """R seeds per prompt: the kept ones of those explored, random ones where none were."""
        count, instances = self.geometry.rollouts_per_prompt, range(len(batch.prompts))
        taken = [self.seed_bank.take(batch.iteration, instance, count) for instance in instances]
        self.cluster.record("kept", iteration=batch.iteration, seeds=dict(enumerate(taken)))
        return taken

    def roll_out(self, batch: Batch, seeds_PR: Sequence[Sequence[int]]) -> Rollouts:
        """Trajectories and rewards under the current weights."""
        requests = [
            self.request(RequestKind.ROLLOUT, batch.iteration, instance, prompt, seed)
            for instance, (prompt, seeds_R) in enumerate(zip(batch.prompts, seeds_PR, strict=True))
            for seed in seeds_R
        ]
        rollouts = Rollouts.stack(self.cluster.collect(requests)).to(self.device)
        made = zip(rollouts.instances_B, rollouts.seeds_B, rollouts.rewards_B, strict=True)
        self._rollout_rewards = {(instance, seed): reward for instance, seed, reward in made}
        return rollouts

    def contrast(self, batch: Batch, rollouts: Rollouts) -> Rollouts:
        """The G samples of each prompt that have the most contrast: all, unless more were made (R > G).

        Down-sampling (PODS, arXiv 2504.13818): what is left out cost a rollout, but is not trained on.
        """
        if self.geometry.rollouts_per_prompt == self.geometry.group_size:
            return rollouts
        kept: list[int] = []
        for instance, rows in rollouts.groups().items():
            rewards = {rollouts.seeds_B[row]: rollouts.rewards_B[row] for row in rows}
            chosen = self.seed_bank.choose(batch.iteration, instance, rewards, self.geometry.group_size)
            kept += [row for row in rows if rollouts.seeds_B[row] in chosen]
        return rollouts.subset(sorted(kept))

    def advantages(self, batch: Batch, rollouts: Rollouts) -> Advantages:
        """Advantages by group, in the order of `rollouts.groups()`."""
        groups = rollouts.groups()
        rewards = [[rollouts.rewards_B[row] for row in rows] for rows in groups.values()]
        return self._advantage(rewards, [self._candidates(batch.iteration, instance) for instance in groups])

    def _candidates(self, iteration: int, instance: int) -> list[float]:
        """The rewards that a prompt's trained samples were chosen by."""
        if self.geometry.rollouts_per_prompt > self.geometry.group_size:
            return [reward for (of, _), reward in self._rollout_rewards.items() if of == instance]
        return [found.reward for found in self.seed_bank.explored(iteration, instance)]

    def training_set(
        self, batch: Batch, rollouts: Rollouts, advantages: Advantages, watch: Stopwatch
    ) -> tuple[TrainingSet, dict[str, float]]:
        """The rollouts with advantages and the log-probabilities that the ratio starts from."""
        advantages_B = torch.zeros(len(rollouts), device=self.device)
        for rows, values in zip(rollouts.groups().values(), advantages.groups, strict=True):
            advantages_B[rows] = torch.as_tensor(values, dtype=torch.float32, device=self.device)
        cond = self.adapter.encode([batch.prompts[instance].text for instance in rollouts.instances_B])
        spec = self.spec(batch.iteration)
        old_BS, old_means_BSLC = rollouts.log_probs_BS.clone(), None
        anew = self._policy_gradient.needs_old_means  # of all: means and log-probabilities must be of one arithmetic
        makers = enumerate(rollouts.fingerprints_B)
        untrusted = [row for row, made_by in makers if anew or not self._trusts(made_by)]
        with watch.phase("recompute"):
            if anew:
                old_BS, old_means_BSLC = self.updater.together(
                    lambda: self._policy_gradient.old_policy(rollouts, cond, spec)
                )
            elif untrusted:
                computed_BS = self.updater.together(lambda: self._log_probs(rollouts, cond, spec, untrusted))
                old_BS[untrusted] = computed_BS[untrusted]
        drift_BS = (old_BS - rollouts.log_probs_BS).exp()
        metrics = {"train/ratio_rollout": float(drift_BS.mean()), "train/recomputed": float(len(untrusted))}
        return TrainingSet(rollouts, cond, spec, advantages_B, old_BS, old_means_BSLC), metrics

    def update(self, batch: Batch, data: TrainingSet) -> dict[str, float]:
        """The optimizer updates of the iteration; each takes its share of the groups."""
        sums, first, norms = LossSums.zeros(data.spec.steps), LossSums.zeros(data.spec.steps), []
        for number in range(self.geometry.updates):
            pairs, count = self.pairs(batch, data, self.geometry.groups_of_update(number))
            if len(pairs) == 0:
                continue  # every group of this share has equal rewards: there is nothing to learn from

            def closure(pairs: Pairs = pairs, count: int = count) -> LossSums:
                return LossSums(self.updater.total(self._backward(data, pairs, 1 / count).sums_XT))

            serial = batch.iteration * self.geometry.updates + number
            norm, total = self.updater.apply(serial, closure)
            norms.append(norm)
            if self.ema is not None:
                self.ema.update(self.trained, serial + 1)
            sums, first = sums + total, first if first.pairs else total
        skipped = {"train/skipped_updates": float(self.updater.skipped)}
        return update_metrics(sums, first, norms, self.parameters_trained) | skipped

    def pairs(self, batch: Batch, data: TrainingSet, instances: Iterable[int]) -> tuple[Pairs, int]:
        """The (sample, step) pairs of some groups that carry a gradient, and the number of all their pairs.

        Samples of advantage 0 add nothing, so no forward pass is spent on them; they count in the mean all the same.
        """
        groups = data.rollouts.groups()
        slot_of = {step: slot for slot, step in enumerate(data.spec.stochastic_steps)}
        advantages = data.advantages_B.tolist()  # one copy from the device, not one for each row
        chosen, count = [], 0
        for row in (row for instance in instances for row in groups.get(instance, [])):
            count += self.geometry.trained_steps
            if advantages[row] == 0 and not self._policy_gradient.has_kl:
                continue
            steps = trained_steps(
                data.spec.stochastic_steps,
                self.geometry.trained_steps,
                run_seed=self.seed,
                iteration=batch.iteration,
                instance=data.rollouts.instances_B[row],
                seed=data.rollouts.seeds_B[row],
            )
            chosen += [(row, slot_of[step]) for step in steps]
        return Pairs.of(chosen).to(self.device), count

    def _backward(self, data: TrainingSet, pairs: Pairs, scale: float) -> LossSums:
        """This rank's share of an update's gradient."""
        ranks = self.updater.snapshot
        return self._policy_gradient.backward(
            data, pairs, scale=scale, backward=self.updater.backward, rank=ranks.dp_rank, ranks=ranks.dp
        )

    def _log_probs(self, rollouts: Rollouts, cond: Conditioning, spec: SampleSpec, rows: Sequence[int]) -> Tensor:
        """Log-probabilities of some rows under the current weights, 0 elsewhere, [B, S]; the ranks share the rows."""
        ranks = self.updater.snapshot
        log_probs_BS = torch.zeros_like(rollouts.log_probs_BS)
        if own := list(rows[ranks.dp_rank :: ranks.dp]):
            log_probs_BS[own] = self._policy_gradient.log_probs(rollouts, cond, spec, own)
        total_BS: Tensor = self.updater.total(log_probs_BS)
        return total_BS

    # ---------------------------------------------------------------- for exploration (core.protocols.Explorable)

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.iteration)

    def publish(self) -> None:
        """Makes the current weights available to the workers, once per version."""
        if self.published != self.policy:
            self.cluster.publish(self.policy, self._save_weights)
            self.published = self.policy

    @contextmanager
    def averaged(self) -> Iterator[PolicyVersion]:
        """Inside, the model has the running average of its weights, which the workers know as the version given.

        That is older than the weights' own version, so it has to come before their publication.
        """
        assert self.ema is not None
        trained, average = self.adapter.trainable_state(), self.ema.average
        version = replace(self.policy, trained=False)
        self.adapter.load_trainable_state({name: average[name].to(own.dtype) for name, own in trained.items()})
        try:
            self.cluster.publish(version, self._save_weights)
            yield version
        finally:
            self.adapter.load_trainable_state(trained)

    def spec(self, iteration: int, steps: int | None = None) -> SampleSpec:
        """How the rollouts of an iteration are denoised, or would be with another number of steps."""
        steps = steps or self.geometry.steps
        return SampleSpec(steps, self._window.steps(steps, self.seed, iteration), self._guidance_scale)

    def exploration(self, iteration: int, prompts: Sequence[Prompt]) -> Exploration:
        """What the current weights may explore for an iteration's batch."""
        return Exploration(
            run=self.run,
            run_seed=self.seed,
            iteration=iteration,
            prompts=tuple(prompts),
            keep=self.geometry.rollouts_per_prompt,
            policy=self.policy,
            spec=self.spec(iteration),
            previews=tuple(self.spec(iteration, steps) for steps in self.geometry.previews),
        )

    def request(self, kind: RequestKind, iteration: int, instance: int, prompt: Prompt, seed: int) -> SampleRequest:
        """A sample of an iteration's batch under the current weights."""
        spec = self.spec(iteration)
        return SampleRequest(
            RequestKey(self.run, iteration, kind, instance, seed, self.policy, spec.steps), prompt, spec
        )

    def offer(self, iteration: int, explored: ExploredByInstance, version: PolicyVersion) -> None:
        """Takes what the policy `version` explored for the batch of `iteration`."""
        rows = explored_rows(explored)
        self.cluster.record("explored", iteration=iteration, version=str(version), results=rows)
        self.seed_bank.forget_before(iteration - 1)
        self.seed_bank.offer(iteration, explored)

    def audited_seeds(self, iteration: int) -> list[tuple[int, int]]:
        """(instance, seed) of the audit's seeds that are not rolled out anyway."""
        kept = {
            (instance, seed)
            for instance in range(self.geometry.prompts_per_iteration)
            for seed in self.seed_bank.take(iteration, instance, self.geometry.rollouts_per_prompt)
        }
        drawn = self._drawn(iteration)
        seeds = [(instance, found.seed) for instance, explored in drawn.items() for found in explored]
        return [pair for pair in seeds if pair not in kept]

    def audit(self, iteration: int, fresh: Mapping[tuple[int, int], float]) -> dict[str, float]:
        """Rank correlation of stale and fresh rewards, and the reward variance of the kept and of random seeds.

        A prompt counts only if all its drawn seeds have a fresh reward: kept seeds always have one, so leaving out
        those that came too late would leave the kept extremes, which correlate better than seeds in general.
        """
        known, drawn = {**self._rollout_rewards, **fresh}, self._drawn(iteration)
        pairs = [
            AuditPair(instance, found.seed, found.reward, known[instance, found.seed])
            for instance, explored in drawn.items()
            if all((instance, found.seed) in known for found in explored)
            for found in explored
        ]
        if not pairs:
            return {}
        self.cluster.record("audited", iteration=iteration, pairs=[vars(pair) for pair in pairs])
        kept: dict[int, list[float]] = {}
        for (instance, _), reward in self._rollout_rewards.items():
            kept.setdefault(instance, []).append(reward)
        statistics = audit_statistics(pairs)
        return {
            "explore/spearman": statistics.spearman,
            "explore/variance_kept": within_variance(kept.values()),
            "explore/variance_random": statistics.random_variance,
            "explore/audited": float(statistics.pairs),
            "explore/audit_cut": float(sum(map(len, drawn.values())) - len(pairs)),
        }

    def _drawn(self, iteration: int) -> dict[int, tuple[Explored, ...]]:
        return self.seed_bank.audit(iteration, self._audit.prompts, self._audit.seeds)

    # ---------------------------------------------------------------- Lightning

    @property
    def updater(self) -> Updater:
        return cast(Updater, self.trainer.strategy.updater)  # type: ignore[attr-defined]

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}

    def on_fit_start(self) -> None:
        if self.ema is not None:
            self.ema.start(self.trained)  # after the callbacks' hooks: a checkpoint has been loaded by now

    @property
    def parameters_trained(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.transformer.parameters() if p.requires_grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make_optimizer([p for p in self.transformer.parameters() if p.requires_grad])

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch  # prompts are text
