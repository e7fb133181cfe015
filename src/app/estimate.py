"""What an experiment takes: memory of each GPU by part (GB of 10^9 bytes), and seconds and usd of an iteration.

No weights are loaded. Models of rewards that share the GPU, CUDA's context and gaps in its memory come on top.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from src.app.config import Config, ConfigError, build, refusing
from src.app.generate import composed
from src.models.adapter import CACHED_TEXTS
from src.models.footprint import ARCHITECTURES, Footprint, footprint
from src.models.pipelines import DTYPES, PipelineSettings
from src.parallel import plan
from src.sim.hardware import Hardware
from src.sim.workload import Iteration

FP32_BYTES = 4
LARGEST_DEGREE = 4
"""Of a group of GPUs, that hardware profiles know the speed of."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `python -m src.estimate`."""
    parser = argparse.ArgumentParser(prog="python -m src.estimate", description=__doc__)
    parser.add_argument("overrides", nargs="+", help="as for train.py: experiment=qwen_image_ocr +hardware=...")
    parser.add_argument("--gpu-gb", type=float, default=math.inf, help="memory of a GPU")
    options = parser.parse_args(arguments)
    print("\n".join(lines(composed(options.overrides), gpu_bytes=options.gpu_gb * 1e9)))


def lines(config: Config, *, gpu_bytes: float = math.inf) -> list[str]:
    """The estimate, a few lines of text."""
    batch, measured = iteration(config), measure(config)
    memory = memory_of(config, batch, measured)
    return [
        *memory.lines(),
        *duration_lines(config, batch, measured.passes == 2),
        *degree_lines(config, batch, memory, gpu_bytes),
    ]


def iteration(config: Config) -> Iteration:
    """The size of an iteration without exploration; it needs no prompts, as `config.geometry` does."""
    algo = config["algo"]
    with refusing():
        return Iteration(
            prompts=config["data"]["prompts_per_iteration"],
            group_size=algo["group_size"],
            steps=algo["steps"],
            trained_steps=algo["trained_steps"],
        )


def measure(config: Config) -> Footprint:
    """The sizes of the experiment's model.

    Raises:
        ConfigError: it is no published model, or is not trained with a LoRA adapter.
    """
    model, algo = config["model"], config["algo"]
    if model["path"] not in ARCHITECTURES:
        raise ConfigError(f"model.path must be one of {sorted(ARCHITECTURES)} to be estimated, got {model['path']}")
    if model["lora"] is None:
        raise ConfigError("model.lora must not be null: estimates are for adapters")
    with refusing("model"):
        return footprint(
            ARCHITECTURES[model["path"]],
            PipelineSettings(**{name: value for name, value in model["load"].items() if name != "revision"}),
            model["lora"],
            rows=algo["micro_batch"],
            guidance_scale=algo["guidance_scale"],
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU of a training rank.

    Args:
        measured: sizes of model, passes, decoding and encoding.
        resident: what is there all the time, by part.
        phases: what comes on top of it in each phase of an iteration, by part.
        alternative_bytes: activations with gradient checkpointing the other way. checkpointing: which way it is.
    """

    measured: Footprint
    resident: Mapping[str, float]
    phases: Mapping[str, Mapping[str, float]]
    checkpointing: bool
    alternative_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Of the phase that takes most."""
        return sum(self.resident.values()) + max(sum(parts.values()) for parts in self.phases.values())

    def lines(self) -> list[str]:
        it, other = self.measured, "without" if self.checkpointing else "with"
        return [
            f"{it.parameters / 1e9:.2f} B parameters, {it.adapter / 1e6:.0f} M of LoRA, {it.tokens} tokens a row",
            f"GB per GPU: {_gb(self.peak_bytes)} at most; always {_gb(sum(self.resident.values()))}: "
            + _listed(self.resident),
            *(f"  to {phase}: {_listed(parts)}" for phase, parts in self.phases.items()),
            f"  activations {other} gradient checkpointing: {_gb(self.alternative_bytes)}",
        ]


def memory_of(config: Config, batch: Iteration, it: Footprint) -> Memory:
    """Bytes by part. ZeRO shares moments (stage 1) and gradients (2), sequence parallelism activations."""
    model, devices = config["model"], config["trainer"]["devices"]
    stage, degree = config["parallel"]["strategy"].get("stage", 0), config["parallel"]["sp_degree"]
    adapter_bytes = it.adapter * FP32_BYTES
    stochastic_steps = len(build(config["algo"]["window"], "algo.window").steps(batch.steps, 0, 0))
    encoders = {"text encoders": it.encoder_bytes}
    vae = {"VAE": it.vae_bytes}
    resting: bool = model["load"]["offload"]
    made = _images(config, batch)
    texts = made + min(CACHED_TEXTS, batch.prompts + config["data"]["eval_prompts"])
    with_, without = it.checkpointed_bytes / degree, it.plain_bytes / degree
    checkpointing: bool = model["load"]["gradient_checkpointing"]
    stored_bytes = DTYPES[model["stored_dtype"]].itemsize
    return Memory(
        measured=it,
        resident={
            "transformer": it.transformer_bytes,
            "LoRA": adapter_bytes,
            **({"EMA": adapter_bytes} if config["algo"]["ema"] else {}),
            "moments": adapter_bytes * _moments(config) / (devices if stage else 1),
            **({} if resting else encoders | vae),
            "encoded prompts": texts * it.prompt_bytes,
            "trajectories": made * 2 * stochastic_steps * it.latent_values * stored_bytes,
        },
        phases={
            "encode": encoders if resting else {},
            "decode": {**(vae if resting else {}), "pixels and features": it.decode_bytes},
            "train": {
                "gradients": adapter_bytes / (devices if stage == 2 else 1),
                "activations": with_ if checkpointing else without,
            },
        },
        checkpointing=checkpointing,
        alternative_bytes=without if checkpointing else with_,
    )


def duration_lines(config: Config, batch: Iteration, guidance: bool) -> list[str]:
    """Seconds and usd of an iteration without exploration and evaluation, if there is a hardware profile."""
    if config["hardware"] is None:
        return []
    hardware: Hardware = build(config["hardware"], "hardware")
    gpus: int = config["trainer"]["devices"]
    made = _images(config, batch)
    parts = {
        "denoising": hardware.denoise_s(made, batch.steps, guidance=guidance) / gpus,
        "decoding and scoring": hardware.decode_score_s(made) / gpus,
        "training": hardware.train_s(batch.samples, batch.trained_steps, gpus=gpus, guidance=guidance),
        "publication": hardware.publish_s,
    }
    prices = build(config["prices"], "prices")
    total_s = sum(parts.values())
    with refusing("market.zone"):
        usd = gpus * prices.usd_per_gpu(config["market"]["zone"], "reserved", 0.0, total_s)
    where = f"{gpus} reserved GPU{'s' * (gpus > 1)} of {hardware.name} without spot workers"
    return [
        f"{made} images on {where}: {total_s:.0f} s and {usd:.2f} usd per iteration",
        "  seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in parts.items()),
    ]


def _images(config: Config, batch: Iteration) -> int:
    """That an iteration makes; `batch.samples` of them are trained on."""
    per_prompt: int = config["algo"]["rollouts_per_prompt"]
    return batch.prompts * per_prompt


def degree_lines(config: Config, batch: Iteration, memory: Memory, gpu_bytes: float) -> list[str]:
    """By how many GPUs a sequence is best shared, if there is a hardware profile and any choice.

    Raises:
        ConfigError: training fits into `gpu_bytes` at no degree.
    """
    gpus: int = config["trainer"]["devices"]
    shape = plan.Shape(memory.measured.tokens, ARCHITECTURES[config["model"]["path"]].heads)
    degrees = plan.allowed_degrees(shape, members=gpus, largest=LARGEST_DEGREE)
    if config["hardware"] is None or degrees == [1]:
        return []
    hardware: Hardware = build(config["hardware"], "hardware")
    training = memory.phases["train"]
    footprint = plan.Footprint(
        fixed_bytes=sum(memory.resident.values()) + training["gradients"],
        activation_bytes=training["activations"] * config["parallel"]["sp_degree"],
    )

    def best(samples: int) -> int:
        with refusing("--gpu-gb"):
            return plan.best_degree(
                degrees,
                {degree: 1 / hardware.sp_speedup(degree) for degree in degrees},
                samples=samples,
                members=gpus,
                footprint=footprint,
                memory_bytes=gpu_bytes,
            )

    many, one = best(_images(config, batch)), best(1)
    return [f"  fastest sp_degree: {many}; for a single image that everybody waits for {one}"]


def _moments(config: Config) -> int:
    """Values that the optimizer keeps per parameter, besides scalars."""
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.zeros(2)
    with refusing("algo.optimizer"):
        optimizer: torch.optim.Optimizer = build(config["algo"]["optimizer"], "algo.optimizer")([parameter])
    optimizer.step()
    kept: Mapping[str, Any] = optimizer.state[parameter]
    return sum(torch.is_tensor(value) and value.shape == parameter.shape for value in kept.values())


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_gb(size_bytes)}" for name, size_bytes in parts.items()) or "nothing more"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"
