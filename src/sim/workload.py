"""How work of a tiny job stands for work of a real one.

A virtual run trains a tiny model and is charged for a large one. An iteration of the tiny job that everything is
compared with (`tiny`) costs what an iteration of the real job (`real`) costs:

    images per tiny sample     P_real G_real / (P_tiny G_tiny)
    steps per tiny step        T_real / T_tiny
    trained steps per tiny one S_real / S_tiny

The ratios belong to the pair of jobs and not to a system. A system that explores N = 4 G seeds per prompt is charged
for 4 G_real images per prompt, and one that trains on all of them trains 4 times as long.

    Example: Qwen-Image has P=32, G=16, T=10, S=2, the tiny text job P=12, G=8, T=6, S=3. A tiny sample stands for
    512 / 96 = 5.33 images and its 6 steps for 10: all 96 are 512 images with 10 steps. Training on 96 x 3 tiny
    (sample, step) pairs is training on 512 x 2 real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from src.sim.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The size of a job's iteration without exploration.

    Args:
        prompts: P.
        group_size: G, samples per prompt.
        steps: T, denoising steps of a sample.
        trained_steps: S, those of them that a sample is trained on.
    """

    prompts: int
    group_size: int
    steps: int
    trained_steps: int

    def __post_init__(self) -> None:
        for spec in fields(self):
            if getattr(self, spec.name) < 1:
                raise ValueError(f"{spec.name} must be at least 1, got {getattr(self, spec.name)}")

    @property
    def samples(self) -> int:
        """P G."""
        return self.prompts * self.group_size


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Seconds that tiny work stands for; see the top of this module.

    Args:
        real: the job that is charged for.
        guidance: whether the real job samples and trains with classifier-free guidance. The tiny one need not.
        tiny: the job that is run, without exploration and with the group size that all systems are compared at.
        hardware: what the real job runs on.
    """

    real: Iteration
    guidance: bool
    tiny: Iteration
    hardware: Hardware

    @property
    def images_per_sample(self) -> float:
        return self.real.samples / self.tiny.samples

    @property
    def steps_per_step(self) -> float:
        return self.real.steps / self.tiny.steps

    def denoise_s(self, samples: float, steps: float, *, degree: int = 1) -> float:
        """One worker of `degree` GPUs takes `samples` tiny samples through `steps` tiny steps."""
        return self.hardware.denoise_s(
            samples * self.images_per_sample, steps * self.steps_per_step, degree=degree, guidance=self.guidance
        )

    def decode_score_s(self, samples: float) -> float:
        """One GPU gives `samples` tiny samples their rewards."""
        return self.hardware.decode_score_s(samples * self.images_per_sample)

    def train_s(self, samples: float, trained_steps: float, *, gpus: int) -> float:
        """`gpus` GPUs train on `trained_steps` tiny steps of each of `samples` tiny samples."""
        return self.hardware.train_s(
            samples * self.images_per_sample,
            trained_steps * self.real.trained_steps / self.tiny.trained_steps,
            gpus=gpus,
            guidance=self.guidance,
        )


@dataclass(frozen=True, kw_only=True)
class WorkDurations:
    """How long everything takes in a job on a virtual cluster (`shape.Durations`).

    Args:
        workload: what the job's work stands for.
        samples: of the job that are trained on per iteration; its own group size counts.
        trained_steps: of each of them.
        updates: that share them out.
        elastic: GPUs that are there form a new group from running processes; if False, these are started anew.
    """

    workload: Workload
    samples: int
    trained_steps: int
    updates: int
    elastic: bool

    @property
    def publish_s(self) -> float:
        return self.workload.hardware.publish_s

    @property
    def load_s(self) -> float:
        return self.workload.hardware.load_s

    @property
    def regroup_s(self) -> float:
        return self.workload.hardware.regroup_s if self.elastic else self.start_s

    @property
    def start_s(self) -> float:
        """A node that comes holds nothing: it starts cold in either case."""
        return self.workload.hardware.cold_start_s

    def denoise_s(self, samples: int, steps: int, degree: int) -> float:
        return self.workload.denoise_s(samples, steps, degree=degree)

    @property
    def commit_s(self) -> float:
        return self.workload.hardware.commit_s

    def finish_s(self, samples: int, degree: int) -> float:
        """The GPUs of a group share the images out."""
        return self.workload.decode_score_s(samples) / degree

    def update_s(self, gpus: int) -> float:
        """Groups without contrast are charged for, too, though no gradient is computed for them."""
        return self.workload.train_s(self.samples, self.trained_steps, gpus=gpus) / self.updates
