"""The sampler: resumable, and bit-equal for a seed whatever batch the sample travels in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from src.core.types import SampleSpec
from src.models.adapter import Conditioning, DiTAdapter
from src.models.noise import initial_noise_for, noise_for
from src.models.schedule import Schedule
from src.models.steps import ODE, StepRule, Transition

StepCallback = Callable[["SamplerState"], None]


@dataclass(frozen=True)
class Trajectory:
    """The stochastic steps taken so far, in order, in the dtype in which they were scored.

    `before_BSLC[:, j] -> after_BSLC[:, j]` is step `spec.stochastic_steps[j]`; `log_probs_BS` are fp32.
    """

    before_BSLC: torch.Tensor
    after_BSLC: torch.Tensor
    log_probs_BS: torch.Tensor

    def extended(self, before_BLC: torch.Tensor, after_BLC: torch.Tensor, log_probs_B: torch.Tensor) -> Trajectory:
        """With one more step."""
        return Trajectory(
            torch.cat([self.before_BSLC, before_BLC[:, None]], dim=1),
            torch.cat([self.after_BSLC, after_BLC[:, None]], dim=1),
            torch.cat([self.log_probs_BS, log_probs_B[:, None]], dim=1),
        )

    def select(self, rows: torch.Tensor) -> Trajectory:
        """The given samples."""
        return Trajectory(self.before_BSLC[rows], self.after_BSLC[rows], self.log_probs_BS[rows])


@dataclass(frozen=True)
class SamplerState:
    """All that is needed to go on: the latents before step `step` (at T the final ones), and the past."""

    step: int
    latents_BLC: torch.Tensor
    trajectory: Trajectory

    def __len__(self) -> int:
        return len(self.latents_BLC)

    def select(self, rows: Sequence[int]) -> SamplerState:
        """The given samples."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.latents_BLC.device)
        return SamplerState(self.step, self.latents_BLC[index], self.trajectory.select(index))

    def on_host(self) -> SamplerState:
        """The same in main memory: one copy per tensor, however many samples are then taken apart."""
        path = self.trajectory
        past = Trajectory(path.before_BSLC.cpu(), path.after_BSLC.cpu(), path.log_probs_BS.cpu())
        return SamplerState(self.step, self.latents_BLC.cpu(), past)

    def without_past(self) -> SamplerState:
        """The same as if no stochastic step had been taken yet."""
        path = self.trajectory
        nothing = Trajectory(path.before_BSLC[:, :0], path.after_BSLC[:, :0], path.log_probs_BS[:, :0])
        return SamplerState(self.step, self.latents_BLC, nothing)

    @staticmethod
    def cat(parts: Sequence[SamplerState]) -> SamplerState:
        """All samples of all parts.

        Raises:
            ValueError: the parts do not stand before the same step.
        """
        steps = {part.step for part in parts}
        if len(steps) != 1:
            raise ValueError(f"only states before the same step can be joined, got steps {sorted(steps)}")
        paths = [part.trajectory for part in parts]
        trajectory = Trajectory(
            torch.cat([path.before_BSLC for path in paths]),
            torch.cat([path.after_BSLC for path in paths]),
            torch.cat([path.log_probs_BS for path in paths]),
        )
        return SamplerState(steps.pop(), torch.cat([part.latents_BLC for part in parts]), trajectory)


@dataclass(frozen=True)
class _Chunk:
    """`count` samples of a batch, padded to the fixed number of rows with repeats of the first of them."""

    count: int
    rows: torch.Tensor
    seeds: tuple[int, ...]
    cond: Conditioning


class Sampler:
    """Denoises samples in batches of one fixed shape.

    Every forward pass has exactly `batch_size` rows: short batches are padded, long ones are cut. Matrix
    kernels differ in the last bits between some batch sizes, so this is what makes a sample bit-equal however
    requests are grouped.

    At every stochastic step the latents before and after are rounded to `stored_dtype`, the log-probability
    is that of the rounded values, and sampling goes on from them: what is trained on is exactly what was
    sampled, and the ratio before the first update is 1.

    Args:
        adapter: the model.
        rule: how stochastic steps are taken; all others are ODE steps.
        schedule_for: the schedule for a number of steps.
        noise_steps: T of the grid that indexes step noise. A spec with stochastic steps has T/m steps, m
            whole, and each of them sums the noise of m steps of the grid.
        batch_size: rows of a forward pass (twice as many with guidance).
        stored_dtype: dtype of trajectories.
    """

    def __init__(
        self,
        *,
        adapter: DiTAdapter,
        rule: StepRule,
        schedule_for: Callable[[int], Schedule],
        noise_steps: int,
        batch_size: int,
        stored_dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in (("noise_steps", noise_steps), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.adapter = adapter
        self.rule = rule
        self.schedule_for = schedule_for
        self.noise_steps = noise_steps
        self.batch_size = batch_size
        self.stored_dtype = stored_dtype

    def start(self, seeds: Sequence[int]) -> SamplerState:
        """The state before step 0: the initial noise of each seed."""
        latents_BLC = initial_noise_for(seeds, self.adapter.latent_shape).to(self.adapter.device)
        nothing = latents_BLC.new_empty(len(seeds), 0, *self.adapter.latent_shape, dtype=self.stored_dtype)
        return SamplerState(0, latents_BLC, Trajectory(nothing, nothing, latents_BLC.new_empty(len(seeds), 0)))

    # Not inference_mode: diffusers caches its rotary tables at first use, and tables made in inference mode
    # cannot take part in a training step.
    @torch.no_grad()
    def advance(
        self,
        state: SamplerState,
        seeds: Sequence[int],
        cond: Conditioning,
        spec: SampleSpec,
        *,
        until: int,
        on_step: StepCallback | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> SamplerState:
        """Take the steps from `state.step` to just before `until`; `on_step` sees the state after each.

        Before each step `should_stop` is asked; once it is true, the state as it stands is returned.

        Raises:
            ValueError: `until` is out of range, the numbers of samples differ, or the spec is stochastic with
                a number of steps that does not divide `noise_steps`.
        """
        if not state.step <= until <= spec.steps:
            raise ValueError(f"until must lie in {state.step}..{spec.steps}, got {until}")
        if not len(state) == len(seeds) == len(cond):
            raise ValueError(f"got {len(state)} states, {len(seeds)} seeds and {len(cond)} prompts")
        if spec.stochastic_steps and self.noise_steps % spec.steps:
            raise ValueError(
                f"SampleSpec.steps must divide the sampler's noise_steps={self.noise_steps}, got {spec.steps}"
            )
        schedule = self.schedule_for(spec.steps)
        chunks = self._chunks(seeds, cond)
        while state.step < until and not should_stop():
            state = self._step(state, chunks, spec, schedule)
            if on_step is not None:
                on_step(state)
        return state

    def sample(
        self,
        seeds: Sequence[int],
        cond: Conditioning,
        spec: SampleSpec,
        on_step: StepCallback | None = None,
    ) -> SamplerState:
        """Denoise from noise to image: the state at step T. See `advance`."""
        return self.advance(self.start(seeds), seeds, cond, spec, until=spec.steps, on_step=on_step)

    def _chunks(self, seeds: Sequence[int], cond: Conditioning) -> list[_Chunk]:
        chunks = []
        for first in range(0, len(seeds), self.batch_size):
            count = min(self.batch_size, len(seeds) - first)
            rows = [*range(first, first + count), *[first] * (self.batch_size - count)]
            index = torch.tensor(rows, device=self.adapter.device)
            chunks.append(_Chunk(count, index, tuple(seeds[row] for row in rows), cond.select(index)))
        return chunks

    def _step(
        self, state: SamplerState, chunks: Sequence[_Chunk], spec: SampleSpec, schedule: Schedule
    ) -> SamplerState:
        stochastic = state.step in spec.stochastic_steps
        rule = self.rule if stochastic else ODE()
        before_BLC = state.latents_BLC.to(self.stored_dtype) if stochastic else state.latents_BLC
        after, log_probs = [], []
        for chunk in chunks:
            step_B = torch.full_like(chunk.rows, state.step)
            transition = step_transition(
                self.adapter,
                rule,
                schedule,
                before_BLC[chunk.rows],
                step_B,
                chunk.cond,
                guidance_scale=spec.guidance_scale,
            )
            if stochastic:
                noise_BLC = self._noise(chunk.seeds, state.step, spec).to(self.adapter.device)
                next_BLC = transition.sample(noise_BLC).to(self.stored_dtype)
                log_probs.append(rule.log_prob(next_BLC, transition)[: chunk.count])
            else:
                next_BLC = transition.mean_BLC
            after.append(next_BLC[: chunk.count])
        after_BLC = torch.cat(after)
        trajectory = state.trajectory
        if stochastic:
            trajectory = trajectory.extended(before_BLC, after_BLC, torch.cat(log_probs))
        return SamplerState(state.step + 1, after_BLC.float(), trajectory)

    def _noise(self, seeds: Sequence[int], step: int, spec: SampleSpec) -> torch.Tensor:
        stride = self.noise_steps // spec.steps
        return noise_for(seeds, range(step * stride, (step + 1) * stride), self.adapter.latent_shape)


def step_transition(
    adapter: DiTAdapter,
    rule: StepRule,
    schedule: Schedule,
    before_BLC: torch.Tensor,
    step_B: torch.Tensor,
    cond: Conditioning,
    *,
    guidance_scale: float,
) -> Transition:
    """The distribution of the latents after step `step_B[b]` of sample b, with gradient if it is enabled."""
    x_BLC = before_BLC.float()
    sigma_B, sigma_next_B = schedule.at(step_B)
    v_BLC = adapter.velocity(x_BLC, sigma_B, cond, guidance_scale=guidance_scale)
    return rule.transition(x_BLC, v_BLC, sigma_B, sigma_next_B, schedule.guard)


def log_probs_at(
    adapter: DiTAdapter,
    rule: StepRule,
    schedule: Schedule,
    before_BLC: torch.Tensor,
    after_BLC: torch.Tensor,
    step_B: torch.Tensor,
    cond: Conditioning,
    *,
    guidance_scale: float = 1.0,
) -> tuple[torch.Tensor, Transition]:
    """Replay steps for training: log-probabilities [B] under the current weights, and the transitions.

    Rows are any (sample, step) pairs. With the same weights, machine and number of rows they are bit-equal to
    the sampler's own log-probabilities.
    """
    transition = step_transition(adapter, rule, schedule, before_BLC, step_B, cond, guidance_scale=guidance_scale)
    return rule.log_prob(after_BLC, transition), transition
