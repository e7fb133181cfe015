"""The arithmetic of a batch: how prompts, seeds, steps and updates divide, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchGeometry:
    """Sizes of one iteration. Any number of training ranks fits: they share the pairs of each update.

    Args:
        prompts_per_iteration: P, prompt instances of a batch, each with one group.
        prompts_available: prompts in the train set.
        group_size: G, samples per prompt that are trained on.
        rollouts_per_prompt: R, samples per prompt that are made under the current weights, G of which are kept.
        explored_per_prompt: N, seeds per prompt that are explored, or at most; 0 for no exploration.
        steps: T, denoising steps of a sample.
        stochastic_steps: S, steps that draw noise.
        trained_steps: stochastic steps of a sample that are trained on.
        updates: optimizer updates per iteration; they share out the groups.
        micro_batch: (sample, step) pairs per forward and backward pass.
        previews: fewer steps that exploration may denoise with.

    Raises:
        ValueError: one message that names every argument that does not fit, with its value.
    """

    prompts_per_iteration: int
    prompts_available: int
    group_size: int
    rollouts_per_prompt: int
    explored_per_prompt: int
    steps: int
    stochastic_steps: int
    trained_steps: int
    updates: int
    micro_batch: int
    previews: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        P, G, R = self.prompts_per_iteration, self.group_size, self.rollouts_per_prompt
        N = self.explored_per_prompt
        T, S = self.steps, self.stochastic_steps
        rules = {
            "prompts_per_iteration": (
                1 <= P <= self.prompts_available,
                f"in 1..{self.prompts_available} (train set)",
            ),
            "group_size": (G >= 2, "at least 2, since a sample is compared with its group"),
            "rollouts_per_prompt": (R >= G, f"at least group_size={G}"),
            "explored_per_prompt": (N == 0 or N >= R, f"0 or at least rollouts_per_prompt={R}"),
            "steps": (T >= 2, "at least 2, since the last one is not trained"),
            "stochastic_steps": (1 <= S < T, f"in 1..{T - 1} (all of steps={T} but the last)"),
            "trained_steps": (1 <= self.trained_steps <= S, f"in 1..{S} (stochastic_steps)"),
            "updates": (
                1 <= self.updates <= P,
                f"in 1..{P} (prompts_per_iteration, whose groups they share)",
            ),
            "micro_batch": (self.micro_batch >= 1, "at least 1"),
            "previews": (
                all(1 <= steps < T and T % steps == 0 for steps in self.previews),
                f"divisors of steps={T} below it, whose noise is part of the full one",
            ),
        }
        broken = [
            f"{name} must be {rule}, got {getattr(self, name)}" for name, (holds, rule) in rules.items() if not holds
        ]
        if broken:
            raise ValueError("; ".join(broken))

    @property
    def samples(self) -> int:
        """Samples per iteration that are trained on, P G."""
        return self.prompts_per_iteration * self.group_size

    @property
    def pairs(self) -> int:
        """Trained (sample, step) pairs per iteration, if no sample fails."""
        return self.samples * self.trained_steps

    def groups_of_update(self, update: int) -> range:
        """The prompt instances of one of an iteration's updates: all in turn, as evenly as possible."""
        P, U = self.prompts_per_iteration, self.updates
        return range(update * P // U, (update + 1) * P // U)

    def pairs_of_update(self, update: int) -> int:
        """Trained pairs of an update, if no sample fails."""
        return len(self.groups_of_update(update)) * self.group_size * self.trained_steps
