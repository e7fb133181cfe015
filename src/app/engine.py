"""Makes samples in any process: denoise, decode, score. The same class serves on the trainer and on spot workers."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from src.core.clock import monotonic_s
from src.core.protocols import OnStep, never, unwatched
from src.core.types import (
    MIXED_FINGERPRINT,
    Blob,
    Commit,
    Prompt,
    RequestKind,
    SampleRequest,
    SampleResult,
    Trajectory,
    WorkReport,
)
from src.models.adapter import Conditioning, DiTAdapter
from src.models.blobs import from_blob, to_blob
from src.models.sampler import Sampler, SamplerState
from src.models.sampler import Trajectory as SampledPath
from src.rl.rewards.reward import Reward, Score, ScoreError, score_samples

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Fingerprint:
    """All that decides the last bits of a sample: equal fingerprints compute bit-equal samples from equal seeds.

    Unequal ones agree within a tolerance. For other batch sizes on one CPU in fp32, before the first update: 1e-3 of a
    reward and of the gradient's norm (`tests/app/test_exactness.py`; measured 0 and 1e-7). Across devices, as root mean
    square of final latents: 1e-4 in fp32, 5e-2 in bf16 (`tests/gpu/test_engine.py`; measured on a CPU 5e-7 and 0.017).
    """

    device: str
    dtype: str
    sp_degree: int
    batch_size: int
    threads: int
    cpu: str
    libraries: str

    @classmethod
    def of(cls, adapter: DiTAdapter, batch_size: int, sp_degree: int = 1) -> Fingerprint:
        """The fingerprint of this process."""
        on_cpu = adapter.device.type == "cpu"
        name = platform.machine() if on_cpu else torch.cuda.get_device_name(adapter.device)
        return cls(
            device=f"{adapter.device.type}:{name}",
            dtype=str(adapter.dtype).removeprefix("torch."),
            sp_degree=sp_degree,
            batch_size=batch_size,
            threads=torch.get_num_threads() if on_cpu else 0,
            cpu=torch.backends.cpu.get_cpu_capability() if on_cpu else "",
            libraries=f"torch {torch.__version__}, diffusers {diffusers.__version__}",
        )

    def __str__(self) -> str:
        return (
            f"{self.device} {self.dtype} sp{self.sp_degree} batch{self.batch_size} threads{self.threads} "
            f"{self.cpu} {self.libraries}"
        )


@dataclass(frozen=True)
class _Scored:
    reward: Score | ScoreError
    judge: Score | ScoreError | None
    image_HWC: NDArray[np.uint8]

    @property
    def further(self) -> dict[str, float]:
        """Scores beside the reward, by name: of the judge, and those that the reward is made of."""
        terms = self.reward.terms if isinstance(self.reward, Score) else {}
        judge = {"judge": self.judge.value} if isinstance(self.judge, Score) else {}
        return judge | {f"reward/{name}": score for name, score in terms.items()}


class RolloutEngine:
    """The engine of one process (see `core.protocols.Engine`).

    Args:
        sampler: denoises with the process's model.
        reward: scores every image; a sample that it cannot score fails, it never counts as reward 0.
        judge: an independent scorer of rollouts and held-out images that nothing is optimised for.
        sp_degree: processes that share the model's sequences.
    """

    def __init__(self, *, sampler: Sampler, reward: Reward, judge: Reward, sp_degree: int = 1) -> None:
        self._sampler = sampler
        self._adapter = sampler.adapter
        self._reward = reward
        self._judge = judge
        self._checksum: str | None = None
        self.fingerprint = self.fingerprint_at(sp_degree)

    def fingerprint_at(self, sp_degree: int) -> str:
        """What it is when so many processes share the model's sequences."""
        return str(Fingerprint.of(self._adapter, self._sampler.batch_size, sp_degree))

    def share(self, sp_degree: int) -> None:
        """From now on so many processes share the model's sequences."""
        self.fingerprint = self.fingerprint_at(sp_degree)

    @property
    def batch_size(self) -> int:
        return self._sampler.batch_size

    def load_weights(self, folder: Path) -> str:
        self._adapter.load_trainable_state(load_file(folder / WEIGHTS_FILE))
        return self.weights_changed()

    def save_weights(self, folder: Path) -> str:
        """Writes the trained parameters as they are now into `folder`, and returns their checksum."""
        save_file(self._adapter.trainable_state(), folder / WEIGHTS_FILE)
        return self.weights_changed()

    def weights_changed(self) -> str:
        """Tells the engine that its model was updated in place; returns the new checksum."""
        self._checksum = self._adapter.checksum()
        return self._checksum

    def assist(
        self,
        requests: Sequence[SampleRequest],
        *,
        resume: Sequence[Commit] = (),
        should_yield: Callable[[], bool] = never,
    ) -> None:
        spec = requests[0].spec
        seeds, cond, begin = self._begin(requests, resume)
        self._sampler.advance(begin, seeds, cond, spec, until=spec.steps, should_stop=should_yield)
        should_yield()  # as in `serve` when the steps are done

    def serve(
        self,
        requests: Sequence[SampleRequest],
        worker: str,
        *,
        resume: Sequence[Commit] = (),
        commit_every: int = 0,
        on_step: OnStep = unwatched,
        should_yield: Callable[[], bool] = never,
    ) -> tuple[list[SampleResult], WorkReport]:
        started_s = self._now_s()
        spec = requests[0].spec
        seeds, cond, begin = self._begin(requests, resume)
        origins = self._origins(requests, resume)

        def tell(state: SamplerState, commit: bool) -> None:
            on_step(state.step, self._commits(requests, state, origins) if commit else ())

        def is_due(state: SamplerState) -> bool:
            return commit_every > 0 and state.step % commit_every == 0

        samples = self._sampler.advance(
            begin,
            seeds,
            cond,
            spec,
            until=spec.steps,
            on_step=lambda state: tell(state, is_due(state)),
            should_stop=should_yield,
        )
        if should_yield() and not is_due(samples) and samples.step > begin.step:
            tell(samples, True)
        denoised_s = self._now_s()
        steps = len(requests) * (samples.step - begin.step)
        if samples.step < spec.steps:
            return [], WorkReport(denoise_s=denoised_s - started_s, decode_s=0.0, score_s=0.0, steps=steps)
        images_BHWC = self._adapter.decode(samples.latents_BLC)
        decoded_s = self._now_s()
        prompts = [request.prompt for request in requests]
        rewards_B = self._score(self._reward, images_BHWC, prompts)
        judged = requests[0].key.kind in (RequestKind.EVAL, RequestKind.ROLLOUT)
        judge_B = self._score(self._judge, images_BHWC, prompts) if judged else None
        scored_s = self._now_s()
        results = []
        for row, request in enumerate(requests):
            scored = _Scored(rewards_B[row], judge_B[row] if judge_B else None, images_BHWC[row])
            results.append(self._result(request, samples, row, scored, worker, origins[row]))
        report = WorkReport(
            denoise_s=denoised_s - started_s,
            decode_s=decoded_s - denoised_s,
            score_s=scored_s - decoded_s,
            steps=steps,
        )
        return results, report

    def _begin(
        self, requests: Sequence[SampleRequest], resume: Sequence[Commit]
    ) -> tuple[list[int], Conditioning, SamplerState]:
        """Seeds and prompts of the requests, and where their denoising goes on."""
        seeds = [request.key.seed for request in requests]
        cond = self._adapter.encode([request.prompt.text for request in requests])
        return seeds, cond, self._resumed(resume) if resume else self._sampler.start(seeds)

    def _now_s(self) -> float:
        """The time when all that was asked of the device is done."""
        if self._adapter.device.type == "cuda":
            torch.cuda.synchronize(self._adapter.device)
        return monotonic_s()

    def _origins(self, requests: Sequence[SampleRequest], resume: Sequence[Commit]) -> list[str]:
        """The fingerprint of each sample, if it is finished here."""
        if not resume:
            return [self.fingerprint] * len(requests)
        for request, commit in zip(requests, resume, strict=True):
            if request.key != commit.key:
                raise ValueError(f"commits must be in the order of the requests, got {commit.key} for {request.key}")
        begun = [commit.trajectory.fingerprint for commit in resume]
        return [self.fingerprint if made_by == self.fingerprint else MIXED_FINGERPRINT for made_by in begun]

    def _resumed(self, commits: Sequence[Commit]) -> SamplerState:
        """The state that was committed; raises ValueError if the commits stand before different steps."""
        device = self._adapter.device
        paths = [commit.trajectory for commit in commits]
        trajectory = SampledPath(
            torch.stack([from_blob(path.before_SLC) for path in paths]).to(device),
            torch.stack([from_blob(path.after_SLC) for path in paths]).to(device),
            torch.stack([from_blob(path.log_probs_S) for path in paths]).to(device),
        )
        if len({commit.step for commit in commits}) != 1:
            raise ValueError(f"commits must stand before one step, got {sorted({c.step for c in commits})}")
        latents_BLC = torch.stack([from_blob(commit.latents_LC) for commit in commits]).to(device)
        return SamplerState(commits[0].step, latents_BLC, trajectory)

    def _commits(
        self, requests: Sequence[SampleRequest], samples: SamplerState, origins: Sequence[str]
    ) -> list[Commit]:
        """Where each sample stands. Only rollouts hand on their past, since only theirs is trained on."""
        checksum = self._checksum or self.weights_changed()
        host = samples.on_host()
        if requests[0].key.kind is not RequestKind.ROLLOUT:
            host = host.without_past()
        return [
            Commit(request.key, host.step, to_blob(host.latents_BLC[row]), _path(host, row, origins[row]), checksum)
            for row, request in enumerate(requests)
        ]

    def _score(
        self, reward: Reward, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]
    ) -> list[Score | ScoreError]:
        """Scores in chunks of exactly `batch_size` images, so that no score depends on who else was in the lease."""
        scores: list[Score | ScoreError] = []
        for start in range(0, len(prompts), self.batch_size):
            count = min(self.batch_size, len(prompts) - start)
            rows = [start + min(row, count - 1) for row in range(self.batch_size)]
            scores += score_samples(reward, images_BHWC[rows], [prompts[row] for row in rows])[:count]
        return scores

    def _result(
        self, request: SampleRequest, samples: SamplerState, row: int, scored: _Scored, worker: str, origin: str
    ) -> SampleResult:
        checksum = self._checksum or self.weights_changed()
        error = self._error(samples, row, scored)
        if error is not None:
            return SampleResult(key=request.key, worker=worker, weights_checksum=checksum, error=error)
        assert isinstance(scored.reward, Score)
        kind = request.key.kind
        image_HWC = scored.image_HWC
        return SampleResult(
            key=request.key,
            worker=worker,
            weights_checksum=checksum,
            reward=scored.reward.value,
            scores=scored.further,
            digest=to_blob(samples.latents_BLC[row]).digest,
            trajectory=_path(samples, row, origin) if kind is RequestKind.ROLLOUT else None,
            image=Blob("uint8", image_HWC.shape, image_HWC.tobytes()) if kind is RequestKind.EVAL else None,
        )

    def _error(self, samples: SamplerState, row: int, scored: _Scored) -> str | None:
        """Why the sample does not count: it never becomes reward 0."""
        if not bool(torch.isfinite(samples.latents_BLC[row]).all()):
            return "the latents are not finite"  # uint8 pixels would hide it from the scorer
        if isinstance(scored.reward, ScoreError):
            return f"{self._reward.name}: {scored.reward}"
        return None


def _path(samples: SamplerState, row: int, fingerprint: str) -> Trajectory:
    path = samples.trajectory
    return Trajectory(
        before_SLC=to_blob(path.before_BSLC[row]),
        after_SLC=to_blob(path.after_BSLC[row]),
        log_probs_S=to_blob(path.log_probs_BS[row]),
        fingerprint=fingerprint,
    )
