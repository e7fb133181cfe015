"""Makes samples in any process: denoise, decode, score. The same class serves on the trainer and on spot workers."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from src.core.clock import monotonic_s
from src.core.types import Blob, Prompt, RequestKind, SampleRequest, SampleResult, Trajectory, WorkReport
from src.models.adapter import DiTAdapter
from src.models.blobs import to_blob
from src.models.sampler import Sampler, SamplerState
from src.rl.rewards.reward import Reward, ScoreError, score_samples

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Fingerprint:
    """All that decides the last bits of a sample: equal fingerprints compute bit-equal samples from equal seeds."""

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
        parameter = next(adapter.transformer.parameters())
        on_cpu = parameter.device.type == "cpu"
        name = platform.machine() if on_cpu else torch.cuda.get_device_name(parameter.device)
        return cls(
            device=f"{parameter.device.type}:{name}",
            dtype=str(parameter.dtype).removeprefix("torch."),
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
    reward: float | ScoreError
    judge: float | ScoreError | None
    image_HWC: NDArray[np.uint8]


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
        self.fingerprint = str(Fingerprint.of(sampler.adapter, sampler.batch_size, sp_degree))

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

    def assist(self, requests: Sequence[SampleRequest]) -> None:
        self._denoise(requests)

    def serve(self, requests: Sequence[SampleRequest], worker: str) -> tuple[list[SampleResult], WorkReport]:
        started_s = monotonic_s()
        spec = requests[0].spec
        samples = self._denoise(requests)
        denoised_s = monotonic_s()
        images_BHWC = self._adapter.decode(samples.latents_BLC)
        decoded_s = monotonic_s()
        prompts = [request.prompt for request in requests]
        rewards_B = self._score(self._reward, images_BHWC, prompts)
        judged = requests[0].key.kind in (RequestKind.EVAL, RequestKind.ROLLOUT)
        judge_B = self._score(self._judge, images_BHWC, prompts) if judged else None
        scored_s = monotonic_s()
        results = []
        for row, request in enumerate(requests):
            scored = _Scored(rewards_B[row], judge_B[row] if judge_B else None, images_BHWC[row])
            results.append(self._result(request, samples, row, scored, worker))
        report = WorkReport(
            denoise_s=denoised_s - started_s,
            decode_s=decoded_s - denoised_s,
            score_s=scored_s - decoded_s,
            steps=len(requests) * spec.steps,
        )
        return results, report

    def _denoise(self, requests: Sequence[SampleRequest]) -> SamplerState:
        cond = self._adapter.encode([request.prompt.text for request in requests])
        return self._sampler.sample([request.key.seed for request in requests], cond, requests[0].spec)

    def _score(
        self, reward: Reward, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]
    ) -> list[float | ScoreError]:
        """Scores in chunks of exactly `batch_size` images, so that no score depends on who else was in the lease."""
        scores: list[float | ScoreError] = []
        for start in range(0, len(prompts), self.batch_size):
            count = min(self.batch_size, len(prompts) - start)
            rows = [start + min(row, count - 1) for row in range(self.batch_size)]
            scores += score_samples(reward, images_BHWC[rows], [prompts[row] for row in rows])[:count]
        return scores

    def _result(
        self, request: SampleRequest, samples: SamplerState, row: int, scored: _Scored, worker: str
    ) -> SampleResult:
        checksum = self._checksum or self.weights_changed()
        error = self._error(samples, row, scored)
        if error is not None:
            return SampleResult(key=request.key, worker=worker, weights_checksum=checksum, error=error)
        assert isinstance(scored.reward, float)
        kind = request.key.kind
        image_HWC = scored.image_HWC
        return SampleResult(
            key=request.key,
            worker=worker,
            weights_checksum=checksum,
            reward=scored.reward,
            scores={"judge": scored.judge} if isinstance(scored.judge, float) else {},
            digest=to_blob(samples.latents_BLC[row]).digest,
            trajectory=self._trajectory(samples, row) if kind is RequestKind.ROLLOUT else None,
            image=Blob("uint8", image_HWC.shape, image_HWC.tobytes()) if kind is RequestKind.EVAL else None,
        )

    def _error(self, samples: SamplerState, row: int, scored: _Scored) -> str | None:
        """Why the sample does not count: it never becomes reward 0."""
        if not bool(torch.isfinite(samples.latents_BLC[row]).all()):
            return "the latents are not finite"  # uint8 pixels would hide it from the scorer
        if isinstance(scored.reward, ScoreError):
            return f"{self._reward.name}: {scored.reward}"
        return None

    def _trajectory(self, samples: SamplerState, row: int) -> Trajectory:
        path = samples.trajectory
        return Trajectory(
            before_SLC=to_blob(path.before_BSLC[row]),
            after_SLC=to_blob(path.after_BSLC[row]),
            log_probs_S=to_blob(path.log_probs_BS[row]),
            fingerprint=self.fingerprint,
        )
