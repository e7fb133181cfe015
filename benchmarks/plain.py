"""GRPO as one would first write it: one group at a time, one forward pass per denoising and per replayed step.

It computes what the product's iteration computes, from the same noise, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from src.app.config import Config, build, geometry
from src.app.sampling import build_sampler
from src.core.clock import Stopwatch
from src.core.types import Batch, Prompt, SampleSpec
from src.models.adapter import Conditioning
from src.models.noise import initial_noise_for, noise_for
from src.models.steps import ODE
from src.rl.window import trained_steps


@dataclass(frozen=True)
class Group:
    """The G samples of one prompt: S stochastic transitions each, and their rewards."""

    instance: int
    prompt: Prompt
    seeds_G: Sequence[int]
    before_SGLC: list[Tensor]
    after_SGLC: list[Tensor]
    log_probs_SG: list[Tensor]
    rewards_G: list[float]


@dataclass(frozen=True)
class PlainIteration:
    """What an iteration gave: rewards by (instance, seed), the first update's clipped gradients, seconds by phase."""

    rewards: dict[tuple[int, int], float]
    gradients: list[Tensor]
    seconds: Mapping[str, float] = field(default_factory=dict)


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies of their gradients; zeros for a parameter that the loss does not depend on."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


class PlainLoop:
    """Has a model and an optimizer of its own; `config` is the product's."""

    def __init__(self, config: Config) -> None:
        algo, device, threads = config["algo"], config["trainer"]["accelerator"], config["parallel"]["threads"]
        self._sampler = build_sampler(config, device=device, threads=threads)
        self.adapter = self._sampler.adapter
        self.adapter.cache_prompts = False
        self._geometry = geometry(config)
        self._algo = algo
        self._run_seed: int = config["seed"]
        self._reward = build(config["reward"]["reward"], "reward.reward")
        self._judge = build(config["reward"]["judge"], "reward.judge")
        self._advantage = build(algo["advantage"], "algo.advantage")
        self._parameters = [p for p in self.adapter.transformer.parameters() if p.requires_grad]
        self._optimizer = build(algo["optimizer"], "algo.optimizer")(self._parameters)

    def iterate(self, batch: Batch, seeds_PG: Sequence[Sequence[int]], spec: SampleSpec) -> PlainIteration:
        """One iteration on the given seeds: roll out, score, train."""
        watch = Stopwatch()
        groups = [
            self._roll_out(instance, prompt, seeds_G, spec, watch)
            for instance, (prompt, seeds_G) in enumerate(zip(batch.prompts, seeds_PG, strict=True))
        ]
        gradients: list[list[Tensor]] = []
        with watch.phase("train"):
            for number in range(self._geometry.updates):
                gradients.append(self._update(batch.iteration, number, groups, spec))
            self._synchronise()
        rewards = {
            (group.instance, seed): reward
            for group in groups
            for seed, reward in zip(group.seeds_G, group.rewards_G, strict=True)
        }
        return PlainIteration(rewards, gradients[0], watch.seconds)

    @torch.no_grad()
    def _roll_out(
        self, instance: int, prompt: Prompt, seeds_G: Sequence[int], spec: SampleSpec, watch: Stopwatch
    ) -> Group:
        before, after, log_probs = [], [], []
        with watch.phase("rollout"):
            cond = self.adapter.encode([prompt.text] * len(seeds_G))
            schedule = self._sampler.schedule_for(spec.steps)
            shape, device = self.adapter.latent_shape, self.adapter.device
            x_GLC = initial_noise_for(seeds_G, shape).to(device)
            for step in range(spec.steps):
                rule = self._sampler.rule if step in spec.stochastic_steps else ODE()
                sigmas = schedule.at(torch.full((len(seeds_G),), step, device=device))
                v_GLC = self.adapter.velocity(x_GLC, sigmas[0], cond, guidance_scale=spec.guidance_scale)
                transition = rule.transition(x_GLC, v_GLC, *sigmas, schedule.guard)
                if step in spec.stochastic_steps:
                    before.append(x_GLC)
                    x_GLC = transition.sample(noise_for(seeds_G, [step], shape).to(device))
                    after.append(x_GLC)
                    log_probs.append(rule.log_prob(x_GLC, transition))
                else:
                    x_GLC = transition.mean_BLC
            images_GHWC = self.adapter.decode(x_GLC)
        with watch.phase("score"):
            prompts = [prompt] * len(seeds_G)
            rewards_G = [float(reward) for reward in self._reward.score(images_GHWC, prompts)]
            self._judge.score(images_GHWC, prompts)
        return Group(instance, prompt, seeds_G, before, after, log_probs, rewards_G)

    def _update(self, iteration: int, number: int, groups: Sequence[Group], spec: SampleSpec) -> list[Tensor]:
        mine = [groups[instance] for instance in self._geometry.groups_of_update(number)]
        count = sum(len(group.seeds_G) for group in mine) * self._geometry.trained_steps
        self._optimizer.zero_grad()
        for group in mine:
            advantages_G = torch.as_tensor(
                self._advantage([group.rewards_G]).groups[0], dtype=torch.float32, device=self.adapter.device
            )
            rows_of = self._trained_rows(iteration, group, spec)
            for slot, step in enumerate(spec.stochastic_steps):
                if rows_of[step]:
                    loss = self._loss(group, slot, step, rows_of[step], advantages_G, spec)
                    (loss / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, self._algo["grad_clip"])
        update = iteration * self._geometry.updates + number
        warmed = min(1.0, (update + 1) / max(self._algo["warmup_updates"], 1))
        for settings in self._optimizer.param_groups:
            settings["lr"] = self._algo["optimizer"]["lr"] * warmed
        self._optimizer.step()
        return gradients_of(self._parameters)

    def _trained_rows(self, iteration: int, group: Group, spec: SampleSpec) -> dict[int, list[int]]:
        rows_of: dict[int, list[int]] = {step: [] for step in spec.stochastic_steps}
        for row, seed in enumerate(group.seeds_G):
            for step in trained_steps(
                spec.stochastic_steps,
                self._geometry.trained_steps,
                run_seed=self._run_seed,
                iteration=iteration,
                instance=group.instance,
                seed=seed,
            ):
                rows_of[step].append(row)
        return rows_of

    def _loss(
        self, group: Group, slot: int, step: int, rows: list[int], advantages_G: Tensor, spec: SampleSpec
    ) -> Tensor:
        """The clipped loss summed over the group's samples that are trained on this step."""
        cond: Conditioning = self.adapter.encode([group.prompt.text] * len(rows))
        schedule = self._sampler.schedule_for(spec.steps)
        sigmas = schedule.at(torch.full((len(rows),), step, device=self.adapter.device))
        x_BLC = group.before_SGLC[slot][rows]
        v_BLC = self.adapter.velocity(x_BLC, sigmas[0], cond, guidance_scale=spec.guidance_scale)
        transition = self._sampler.rule.transition(x_BLC, v_BLC, *sigmas, schedule.guard)
        log_probs_B = self._sampler.rule.log_prob(group.after_SGLC[slot][rows], transition)
        ratio_B = (log_probs_B - group.log_probs_SG[slot][rows]).exp()
        clip, advantages_B = self._algo["loss"]["clip_range"], advantages_G[rows]
        return torch.maximum(-advantages_B * ratio_B, -advantages_B * ratio_B.clamp(1 - clip, 1 + clip)).sum()

    def _synchronise(self) -> None:
        if self.adapter.device.type == "cuda":
            torch.cuda.synchronize()
