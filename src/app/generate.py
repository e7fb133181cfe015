"""Images from a base model or a run, for given prompts and seeds; a run's stand beside those of its base model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray
from omegaconf import OmegaConf
from PIL import Image

from src.app import checkpoint
from src.app.config import Config, ConfigError, find_checkpoint, refusing
from src.app.sampling import build_sampler
from src.core.types import SampleSpec
from src.models.sampler import Sampler

GAP = 4
"""White pixels between the image of the base model and that of the run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `python -m src.generate`."""
    parser = argparse.ArgumentParser(prog="python -m src.generate", description=__doc__)
    parser.add_argument("--run", type=Path, help="run folder; its images stand to the right of the base model's")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder of the run (default: the newest)")
    parser.add_argument("--average", action="store_true", help="the running average of the weights (algo.ema)")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="each prompt is drawn with each seed")
    parser.add_argument("--steps", type=int, help="denoising steps (default: algo.eval_steps)")
    parser.add_argument("--out", type=Path, default=Path("images"), help="folder for the PNG files")
    parser.add_argument(
        "overrides", nargs="*", help="without --run: as for train.py, such as experiment=qwen_image_ocr"
    )
    options = parser.parse_args(arguments)
    if options.run and options.overrides:
        raise ConfigError(f"a run has its own configuration: {options.overrides} cannot be given with --run")
    config = run_config(options.run) if options.run else composed(options.overrides)
    sampler = build_sampler(config, device=config["trainer"]["accelerator"], threads=config["parallel"]["threads"])
    spec = SampleSpec(
        steps=options.steps or config["algo"]["eval_steps"], guidance_scale=config["algo"]["guidance_scale"]
    )
    pairs = [(prompt, seed) for prompt in options.prompt for seed in options.seed]
    columns = [generate(sampler, pairs, spec)]
    if options.run:
        load_weights(sampler, options.run, options.checkpoint, average=options.average)
        columns.append(generate(sampler, pairs, spec))
    for path in write(options.out, pairs, columns):
        print(path)


def generate(sampler: Sampler, pairs: Sequence[tuple[str, int]], spec: SampleSpec) -> NDArray[np.uint8]:
    """uint8 images [B, height, width, channels] of (prompt, seed) pairs."""
    cond = sampler.adapter.encode([prompt for prompt, _ in pairs])
    samples = sampler.sample([seed for _, seed in pairs], cond, spec)
    return sampler.adapter.decode(samples.latents_BLC)


def load_weights(sampler: Sampler, run: Path, chosen: Path | None, *, average: bool) -> None:
    """Gives the model the weights of a run's checkpoint.

    Raises:
        ConfigError: there is none, it is damaged, it holds no average, or it belongs to another model.
    """
    folder, _ = find_checkpoint(str(chosen or run), run)
    assert folder is not None
    tensors = checkpoint.load(folder).tensors
    name = "ema" if average else "policy"
    if name not in tensors:
        raise ConfigError(f"{folder} holds no running average: the run had algo.ema=null")
    own = sampler.adapter.trainable_state()
    with refusing(str(folder)):
        sampler.adapter.load_trainable_state(
            {key: tensor.to(own[key].dtype) if key in own else tensor for key, tensor in tensors[name].items()}
        )


def write(folder: Path, pairs: Sequence[tuple[str, int]], columns: Sequence[NDArray[np.uint8]]) -> list[Path]:
    """One PNG per pair, its images side by side, and `prompts.tsv` that tells which is which."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for row, (_, seed) in enumerate(pairs):
        images = [column[row] for column in columns]
        gap = np.full((images[0].shape[0], GAP, images[0].shape[2]), 255, np.uint8)
        joined = np.concatenate([part for image in images for part in (gap, image)][1:], axis=1)
        paths.append(folder / f"{row:03d}_seed{seed}.png")
        Image.fromarray(joined.squeeze(-1) if joined.shape[-1] == 1 else joined).save(paths[-1])
    lines = [f"{path.name}\t{seed}\t{prompt}" for path, (prompt, seed) in zip(paths, pairs, strict=True)]
    (folder / "prompts.tsv").write_text("\n".join(["file\tseed\tprompt", *lines]) + "\n", encoding="utf-8")
    return paths


def run_config(run: Path) -> Config:
    """The configuration of a run.

    Raises:
        ConfigError: it is no run folder.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"--run {run} is no run folder: it has no config.yaml")
    config: Config = yaml.safe_load(file.read_text(encoding="utf-8"))
    return config


def composed(overrides: Sequence[str]) -> Config:
    """The configuration of `python train.py <overrides>`."""
    root = Path(__file__).parents[2]
    os.environ.setdefault("SPOTLIGHT_ROOT", str(root))
    with initialize_config_dir(str(root / "conf"), version_base="1.3"):
        config = compose("train", ["paths.output_dir=.", *overrides])
    resolved: Config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return resolved
