"""The vocabulary of Spotlight: what travels between the trainer, the coordinator and the workers.

Everything here is plain, frozen Python (no torch, no Ray), so that deciders, drivers, simulations and tests
speak of the same things. Arrays travel as `Blob`s.

Legend of shape suffixes, used in the whole code base:
    B samples   P prompts   G seeds per prompt that are trained on   N seeds per prompt that are explored
    T denoising steps   S stochastic (trained) steps   L tokens   C channels   H heads   D head width
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from src.core.seeds import sample_seed


class RequestKind(IntEnum):
    """What a sample is for. The value is the priority: a smaller one is served first."""

    ROLLOUT = 0
    """A trajectory to train on; only the newest policy may make it."""
    EVAL = 1
    """A held-out image; only the newest policy may make it."""
    AUDIT = 2
    """A uniformly drawn explored seed, made again with fresh weights: tells how well exploration ranked."""
    EXPLORE = 3
    """A candidate seed of the next batch; the previous policy may make it."""


AVERAGE = ".average"
"""At the end of the name of averaged weights."""


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Which weights. Ordered: a restarted job has a higher incarnation, so versions never go backwards.

    Of one iteration, the running average of the weights (not `trained`) comes before the weights themselves.
    """

    incarnation: int
    iteration: int
    trained: bool = True

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.iteration}{'' if self.trained else AVERAGE}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """The inverse of `str`. Raises ValueError for anything else."""
        incarnation, dot, iteration = text.removesuffix(AVERAGE).partition(".")
        if not (dot and incarnation.isdecimal() and iteration.isdecimal()):
            raise ValueError(
                f"policy version must look like 0.12 (incarnation.iteration) or 0.12{AVERAGE}, got {text!r}"
            )
        return cls(int(incarnation), int(iteration), trained=not text.endswith(AVERAGE))

    def __hash__(self) -> int:
        return self.iteration  # quick, and few have the same one


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt set: its index there, the text, and what the reward needs to judge its images."""

    id: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleSpec:
    """How a sample is denoised: how many steps, and which of them (indices into the grid) draw noise.

    Steps that are not stochastic are ODE steps. All members of a group share one spec.
    """

    steps: int
    stochastic_steps: tuple[int, ...] = ()
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"SampleSpec.steps must be at least 1, got {self.steps}")
        inside = all(0 <= k < self.steps for k in self.stochastic_steps)
        if not inside or list(self.stochastic_steps) != sorted(set(self.stochastic_steps)):
            raise ValueError(
                f"SampleSpec.stochastic_steps must be increasing indices below steps={self.steps}, "
                f"got {self.stochastic_steps}"
            )


@dataclass(frozen=True)
class Blob:
    """An array on the wire: C-order bytes with dtype name and shape; `digest` identifies its content."""

    dtype: str
    shape: tuple[int, ...]
    buffer: bytes = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the sha256 over dtype, shape and bytes."""
        sha = hashlib.sha256(f"{self.dtype}{self.shape}".encode())
        sha.update(self.buffer)
        return sha.hexdigest()[:16]


@dataclass(frozen=True)
class RequestKey:
    """Identity of a sample. A result is accepted once per key; a rollout never passes for an exploration."""

    run: str
    iteration: int
    """The iteration whose batch the sample belongs to (for EXPLORE the next one)."""
    kind: RequestKind
    instance: int
    """Position of the prompt in its batch: groups are told apart by it, not by equal text."""
    seed: int
    policy: PolicyVersion
    steps: int

    def __hash__(self) -> int:
        return self.seed  # quick, and of hardly two keys alike: queues look keys up at every turn


@dataclass(frozen=True)
class SampleRequest:
    """One sample to make: who it is, of what prompt, and how."""

    key: RequestKey
    prompt: Prompt
    spec: SampleSpec


@dataclass(frozen=True)
class Exploration:
    """What may be explored for the batch of `iteration`: all that decides the requests of its candidate seeds."""

    run: str
    run_seed: int
    iteration: int
    prompts: tuple[Prompt, ...]
    """P"""
    keep: int
    """G: seeds per prompt that will be trained on."""
    policy: PolicyVersion
    """The weights that explore: those of the iteration before."""
    spec: SampleSpec
    """How the batch will be rolled out."""
    previews: tuple[SampleSpec, ...] = ()
    """Specs of fewer steps, that a seed may be explored with instead."""

    def request(self, instance: int, index: int, steps: int) -> SampleRequest:
        """Candidate `index` of a prompt, explored with `steps` denoising steps."""
        (spec,) = (spec for spec in (self.spec, *self.previews) if spec.steps == steps)
        seed = sample_seed(self.run_seed, self.iteration, instance, index)
        key = RequestKey(self.run, self.iteration, RequestKind.EXPLORE, instance, seed, self.policy, steps)
        return SampleRequest(key, self.prompts[instance], spec)


@dataclass(frozen=True)
class Trajectory:
    """What training needs of one sample: S stochastic transitions, in the dtype in which they were scored.

    `before_SLC[j] -> after_SLC[j]` is denoising step `spec.stochastic_steps[j]`, with `log_probs_S[j]` under
    the policy that made it. `fingerprint` says with which arithmetic (see `Engine.fingerprint`).
    """

    before_SLC: Blob
    after_SLC: Blob
    log_probs_S: Blob
    fingerprint: str


MIXED_FINGERPRINT = "mixed"
"""Of a trajectory that was begun by one arithmetic and went on with another: nobody's log-probabilities are its."""


@dataclass(frozen=True)
class Commit:
    """A sample on its way, from which any worker with the same weights can go on.

    `trajectory` holds the stochastic steps before `step`; for kinds whose results carry none it is empty.
    """

    key: RequestKey
    step: int
    """The next denoising step; at `spec.steps` only decoding and scoring are left."""
    latents_LC: Blob
    """fp32, before that step."""
    trajectory: Trajectory
    weights_checksum: str


@dataclass(frozen=True)
class Lease:
    """Requests of one kind, policy and spec that stand before one step, and that a worker holds until its deadline."""

    id: int
    requests: tuple[SampleRequest, ...]
    deadline_s: float
    resume: tuple[Commit, ...] = ()
    """Where each request goes on; empty if they start from noise."""

    @property
    def kind(self) -> RequestKind:
        return self.requests[0].key.kind

    @property
    def policy(self) -> PolicyVersion:
        return self.requests[0].key.policy

    @property
    def step(self) -> int:
        """The step at which all of its requests go on."""
        return self.resume[0].step if self.resume else 0


@dataclass(frozen=True)
class SampleResult:
    """What a worker returns for a request.

    `error` is set if the sample could not be made or scored: it is then left out, and never gets reward 0.
    """

    key: RequestKey
    worker: str
    weights_checksum: str
    """Checksum of the weights that the worker really used; must equal the published one."""
    reward: float = float("nan")
    scores: Mapping[str, float] = field(default_factory=dict)
    """Further scores by name: `judge` (EVAL, ROLLOUT), and `reward/<term>` of a reward that is made of others."""
    digest: str = ""
    """Digest of the final latents: equal digests mean bit-equal samples."""
    trajectory: Trajectory | None = None
    image: Blob | None = None
    """uint8 HWC; only EVAL results carry it."""
    error: str | None = None


@dataclass(frozen=True)
class WorkReport:
    """Where a lease's time went, in seconds, and how many denoising steps (sample x step) were run."""

    denoise_s: float
    decode_s: float
    score_s: float
    steps: int


NO_WORK = WorkReport(denoise_s=0.0, decode_s=0.0, score_s=0.0, steps=0)
"""Of a lease that is given back."""


@dataclass(frozen=True)
class Member:
    """A process that serves requests: where it runs and which life of it this is."""

    node: str
    slot: int
    incarnation: int = 0
    role: str = "spot"
    """`spot` or `reserved`."""
    gpus: int = 1
    """That it serves with: more than one if they share sequences."""

    @cached_property
    def name(self) -> str:
        return f"{self.role}-{self.node}-{self.slot}.{self.incarnation}"


@dataclass(frozen=True)
class Generation:
    """One membership of an elastic group, in the order of ranks. Numbers rise and are never used twice."""

    number: int
    members: tuple[str, ...]
    stayed: int = 0
    """The first so many members were in the generation before; the others have joined."""


@dataclass(frozen=True)
class Snapshot:
    """Membership of the training ranks: generation, their number, and how they split into dp x sp."""

    generation: int = 0
    rank: int = 0
    world: int = 1
    sp_degree: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"Snapshot.rank must be in 0..world-1={self.world - 1}, got {self.rank}")
        if self.sp_degree < 1 or self.world % self.sp_degree:
            raise ValueError(f"Snapshot.sp_degree must divide world={self.world}, got {self.sp_degree}")

    @property
    def dp(self) -> int:
        return self.world // self.sp_degree

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sp_degree

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for the job (callbacks, checkpoints)."""
        return self.rank == 0


@dataclass(frozen=True)
class Batch:
    """The prompts of one iteration and of the next: exploration works one iteration ahead."""

    iteration: int
    prompts: tuple[Prompt, ...]
    next_prompts: tuple[Prompt, ...]
    """Empty for the last iteration: there is nothing to explore for."""


@dataclass(frozen=True)
class Explored:
    """An explored seed: its reward under the stale policy, and the digest of its sample."""

    seed: int
    reward: float
    digest: str


ExploredByInstance = Mapping[int, Sequence[Explored]]
"""Explored seeds of one batch by prompt position."""
