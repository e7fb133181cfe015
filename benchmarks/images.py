"""Better images? Two systems at equal hours, and at equal usd: independent judge, diversity, statistics, and a grid.

python -m benchmarks.images                     # three learning seeds, at what flow_grpo needs to the middle target
python -m benchmarks.images --hours 2 --seeds 1

How far each system had come by then is read from the rows of `python -m benchmarks.evidence`; it is trained again that
far, and both draw the same held-out prompts with the same seeds, without step noise. The grid shows them side by side
in random order; which is which stands apart, in key.json, so that a reader can judge first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.evidence.runs import Row, Run
from benchmarks.evidence.systems import BASELINES
from benchmarks.evidence.tables import effort_of, goals
from benchmarks.job import quiet, resolved
from benchmarks.output import print_figures, say, spread
from src.app.config import build, task
from src.app.generate import generate, load_weights
from src.app.sampling import build_sampler
from src.app.virtual import train
from src.core.events import read_jsonl
from src.core.stats import mean
from src.core.types import Prompt, SampleSpec
from src.rl.rewards.image_stats import image_statistics

SYSTEMS = ("flow_grpo", "spotlight")
TRACE = "parcae_segment_hh_55_65.txt"
PROMPTS, SEEDS = 64, 4
"""Held-out prompts, and images of each: diversity is that among images of one prompt."""
ROWS, ZOOM, GAP = 24, 3, 6
"""Of the grid."""


def tuned(rows: Sequence[Row], system: str) -> list[Row]:
    """The learnt rows of a system at the learning rate that it was compared at: most of its runs have it."""
    learnt = [row for row in rows if row["system"] == system and row["learnt"]]
    if not learnt:
        raise SystemExit(f"no run of {system}: run python -m benchmarks.evidence first")
    ((rate, _),) = Counter(row["learning_rate"] for row in learnt).most_common(1)
    return [row for row in learnt if row["learning_rate"] == rate]


def chosen(rows: Sequence[Row], system: str, seed: int) -> Row:
    """Its run with a learning seed, on the market if it has one."""
    fitting = [row for row in tuned(rows, system) if row["seed"] == seed and row["trace"] in ("", TRACE)]
    if not fitting:
        raise SystemExit(f"no run of {system} with seed {seed}: run python -m benchmarks.evidence first")
    return max(fitting, key=lambda row: row["trace"] == TRACE)


def iteration_at(row: Row, name: str, budget: float) -> int:
    """The last evaluation of a run at which no more than `budget` of `name` (seconds, usd) had been used."""
    return max(point["iteration"] for point in row["curve"] if point[name] <= budget)


def images_of(row: Row, iterations: int) -> tuple[NDArray[np.uint8], list[Prompt], Mapping[str, Any]]:
    """Trains as the row's run did, and draws: images [prompts x seeds], their prompts, and the scores."""
    fields = ("system", "overrides", "learning_rate", "seed", "trace")
    run = replace(Run(iterations=iterations, **{name: row[name] for name in fields}), overrides=tuple(row["overrides"]))
    overrides = [each for each in run.all_overrides if each != "~callbacks.checkpoint"]
    config = resolved([*overrides, "callbacks.evaluate.every=1000", "callbacks.checkpoint.every=1000"])
    prompts = [prompt for prompt in task(config).heldout_prompts[:PROMPTS] for _ in range(SEEDS)]
    pairs = [(prompt.text, 10_000 + number) for number, prompt in enumerate(prompts)]
    sampler = build_sampler(config, device="cpu", threads=1)
    if iterations:
        with tempfile.TemporaryDirectory() as name:
            train(config, Path(name)).shutdown()
            load_weights(sampler, Path(name), None, average=False)
    algo = config["algo"]
    images_BHWC = generate(sampler, pairs, SampleSpec(steps=algo["eval_steps"], guidance_scale=algo["guidance_scale"]))
    scores = {
        name: mean(list(build(config["reward"][name], f"reward.{name}").score(images_BHWC, prompts)))
        for name in ("reward", "judge")
    }
    return images_BHWC, prompts, {**scores, "diversity": diversity(images_BHWC), **image_statistics(images_BHWC)}


def diversity(images_BHWC: NDArray[np.uint8]) -> float:
    """Root mean square difference of pixels between two images of one prompt, averaged over pairs and prompts."""
    pixels = images_BHWC.reshape(-1, SEEDS, *images_BHWC.shape[1:]) / 255.0
    gaps = [np.mean((pixels[:, one] - pixels[:, two]) ** 2) ** 0.5 for one in range(SEEDS) for two in range(one)]
    return float(np.mean(gaps))


def grid(pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]], left_is_first: Sequence[bool]) -> Image.Image:
    """Two columns of pairs, the sides of each as drawn."""
    rows = []
    for (one, two), keeps in zip(pairs, left_is_first, strict=True):
        left, right = (one, two) if keeps else (two, one)
        gap = np.full((left.shape[0], GAP // ZOOM, left.shape[2]), 255, np.uint8)
        rows.append(np.pad(np.concatenate([left, gap, right], axis=1), ((0, 2), (0, 2), (0, 0)), constant_values=255))
    half = (len(rows) + 1) // 2
    columns = [np.concatenate(part, axis=0) for part in (rows[:half], rows[half:])]
    height = max(column.shape[0] for column in columns)
    padded = [np.pad(c, ((0, height - c.shape[0]), (0, 4), (0, 0)), constant_values=255) for c in columns]
    joined = np.concatenate(padded, axis=1)
    image = Image.fromarray(joined.squeeze(-1) if joined.shape[-1] == 1 else joined)
    return image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST)


def compare(rows: Sequence[Row], name: str, budget: float, seed: int, out: Path) -> dict[str, Any]:
    """Both systems' figures when each has used `budget` seconds or usd; writes the grid of this learning seed."""
    figures: dict[str, Any] = {}
    drawn = []
    for system in SYSTEMS:
        row = chosen(rows, system, seed)
        iterations = iteration_at(row, name, budget)
        images_BHWC, prompts, measured = images_of(row, iterations)
        figures[system] = {"iterations": iterations, **measured}
        drawn.append(images_BHWC)
        say(f"{name} {budget:.0f}, seed {seed}, {system}: judge {measured['judge']:.3f} after {iterations} iterations")
    rng = np.random.default_rng(seed)
    picked = sorted(rng.choice(len(prompts), ROWS, replace=False).tolist())
    keeps = [bool(flip) for flip in rng.integers(2, size=ROWS)]
    folder = out / f"equal_{name}_seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    grid([(drawn[0][index], drawn[1][index]) for index in picked], keeps).save(folder / "grid.png")
    key = [
        {"row": place, "prompt": prompts[index].text, "left": SYSTEMS[0 if keep else 1]}
        for place, (index, keep) in enumerate(zip(picked, keeps, strict=True))
    ]
    (folder / "key.json").write_text(json.dumps(key, indent=1), encoding="utf-8")
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("results/evidence/runs.jsonl"), help="of benchmarks.evidence")
    parser.add_argument("--hours", type=float, help="default: what flow_grpo needs to the middle target, on average")
    parser.add_argument("--seeds", type=int, default=3, help="learning seeds")
    parser.add_argument("--out", type=Path, default=Path("outputs/images"), help="for grids and their keys")
    options = parser.parse_args(arguments)
    quiet()
    rows = list(read_jsonl(options.rows))
    base = [chosen(rows, SYSTEMS[0], seed) for seed in range(options.seeds)]
    teachers = {system.learns: system.name for system in reversed(BASELINES)}
    target = goals({name: tuned(rows, name) for name in teachers.values()})[1]
    seconds = options.hours * 3600 if options.hours else mean([effort_of(row, target).seconds for row in base])
    usd = mean([point["usd"] / point["seconds"] for row in base for point in row["curve"][-1:]]) * seconds
    line: dict[str, Any] = {"hours": seconds / 3600, "usd": usd, "prompts": PROMPTS, "images_per_prompt": SEEDS}
    for name, budget in (("seconds", seconds), ("usd", usd)):
        found = [compare(rows, name, budget, seed, options.out) for seed in range(options.seeds)]
        line[f"equal_{name}"] = {
            system: {figure: spread([each[system][figure] for each in found]) for figure in found[0][system]}
            for system in SYSTEMS
        }
    print_figures("images", line)


if __name__ == "__main__":
    main()
