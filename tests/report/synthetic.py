"""A run folder that looks like a real one: two spot workers, one of which is killed and returns."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

CONFIG = """\
seed: 1
experiment: tiny_text
model:
  name: tiny_text
  lora:
    rank: 16
algo:
  noise_level: 0.7
  clip_range: 0.0001
  learning_rate: 0.0004
explore:
  seeds: 32
  sync: race
planner:
  _target_: src.spot.planning.simple.Fixed
  seeds_per_prompt: 32
market:
  zone: ''
  trace: null
prices:
  _target_: src.spot.prices.FixedPrices
  reserved_usd_per_gpu_hour: 10.0
  spot_usd_per_gpu_hour: 2.5
paths:
  root_dir: /project
  output_dir: RUN
trainer:
  max_steps: 24
  devices: 1
callbacks:
- one
- two
"""

PROMPTS = ("KITE", "R2D2", "OPEN", "7 UP", "HELLO", "NO 42", "SALE", "a <b> & c")


def write_run(
    folder: Path,
    *,
    iterations: int = 24,
    finished: bool = True,
    images: bool = True,
    seed: int = 1,
    changes: Mapping[str, str] | None = None,
) -> Path:
    """Writes the run folder and returns it. `changes` replaces pieces of the configuration."""
    folder.mkdir(parents=True)
    config = CONFIG.replace("seed: 1", f"seed: {seed}").replace("RUN", str(folder))
    for old, new in (changes or {}).items():
        assert old in config
        config = config.replace(old, new)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    rng = random.Random(seed)
    events, metrics = [], []
    time_s = 0.0

    def event(at_s: float, kind: str, **fields: Any) -> None:
        events.append({"time_s": round(at_s, 3), "kind": kind, **fields})

    def evaluate(step: int) -> None:
        nonlocal time_s
        progress = 1 - math.exp(-step / 10)
        reward = 0.4 + 0.27 * progress + rng.uniform(-0.01, 0.01)
        judge = 0.36 + 0.22 * progress + rng.uniform(-0.01, 0.01)
        event(time_s + 0.9, "phase", name="evaluate", iteration=step, start_s=time_s, end_s=time_s + 0.9)
        event(time_s, "evaluated", iteration=step, reward=reward, judge=judge, images=64)
        metrics.append(
            {
                "step": step,
                "time_s": time_s,
                "eval/reward": reward,
                "eval/judge": judge,
                "time/evaluate_s": 0.9,
                "images/mean": 0.5,
                "images/edge_energy": 0.2,
            }
        )
        time_s += 0.9

    event(0, "run_started", run="r", incarnation=0, iteration=0, start_wall_s=1.7e9)
    event(1.0, "node_came", node="local", gpus=2)
    worker = dict.fromkeys((0, 1), 0)
    for slot in worker:
        join(event, 2.0 + slot / 10, slot, 0)
    time_s = 4.0
    evaluate(0)
    lease = 0
    for iteration in range(iterations):
        rollout_s, train_s = 3 + rng.random(), 4 + rng.random()
        middle_s, end_s = time_s + rollout_s, time_s + rollout_s + train_s
        event(middle_s, "phase", name="rollout", iteration=iteration, start_s=time_s, end_s=middle_s)
        batch = {"iteration": iteration + 1}
        event(middle_s, "exploration_opened", **batch, version=f"0.{iteration}", prompts=4, keep=4, steps=10)
        event(middle_s, "explore_asked", **batch, seeds=[[0, 4, 10], [1, 8, 10], [2, 2 + iteration % 3, 5]])
        event(middle_s, "explore_asked", **batch, seeds=[[0, 2, 10], [3, 4, 10]])
        reason = "time is up" if iteration % 4 else "everything is asked for"
        event(middle_s + 1, "explore_stopped", **batch, reason=reason)
        for slot in worker:
            if iteration == 6 and slot == 1:
                continue
            for kind, start_s, length_s in (
                ("rollout", time_s, rollout_s - 0.1),
                ("audit", middle_s, 0.6),
                ("explore", middle_s + 0.7, train_s / 2 - 0.5),
                ("explore", middle_s + 0.4 + train_s / 2, train_s / 2 - 0.6),
            ):
                if iteration == 5 and slot == 1 and start_s > middle_s + 1:
                    continue
                held = {"lease": lease, "worker": f"spot-local-{slot}.{worker[slot]}", "request_kind": kind}
                held |= {"iteration": iteration + (kind != "rollout"), "count": 8}
                event(start_s, "lease_granted", **held, version=f"0.{iteration}")
                if iteration == 7 and kind == "explore":
                    event(start_s, "lease_resumed", **held, step=4, after=[lease - 9])
                if iteration == 5 and slot == 1 and kind == "explore":
                    event(start_s + 0.3, "notice", worker=held["worker"], grace_s=2.0, requests=8)
                    event(start_s + 1.1, "lease_lost", **held, reason="killed")
                    event(start_s + 1.1, "worker_lost", worker=held["worker"], reason="killed", requests=8)
                    worker[slot] += 1
                else:
                    event(
                        start_s + length_s,
                        "lease_done",
                        **held,
                        steps=80,
                        denoise_s=length_s,
                        decode_s=0,
                        score_s=0,
                    )
                lease += 1
        if iteration == 6:
            join(event, end_s - 1, 1, worker[1])
        event(end_s, "phase", name="train", iteration=iteration, start_s=middle_s, end_s=end_s)
        results = [{"instance": i, "seed": i * 99 + iteration, "reward": 0.5, "digest": "d"} for i in range(16)]
        event(end_s, "explored", iteration=iteration + 1, version=f"0.{iteration}", results=results)
        time_s = end_s
        metrics.append(training_row(rng, iteration + 1, time_s, rollout_s, train_s))
        if (iteration + 1) % 4 == 0:
            evaluate(iteration + 1)
    if finished:
        event(time_s, "run_ended", status="done", iteration=iterations)
        summary = {"eval_reward_start": 0.4, "eval_reward_end": 0.646, "steps": iterations, "wall_s": time_s}
        summary |= {"usd": 0.0312, "seeds_explored": 16 * iterations, "preemptions": 1, "lost_steps": 0}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    for name, rows in (("events", sorted(events, key=lambda row: row["time_s"])), ("metrics", metrics)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    if images:
        write_images(folder / "images", iterations)
    return folder


def join(event: Any, at_s: float, slot: int, incarnation: int) -> None:
    place = {"role": "spot", "node": "local", "slot": slot, "pid": 1000 + slot, "incarnation": incarnation}
    event(at_s, "worker_joined", worker=f"spot-local-{slot}.{incarnation}", fingerprint="cpu", **place)


def training_row(rng: random.Random, step: int, time_s: float, rollout_s: float, train_s: float) -> dict[str, float]:
    progress = 1 - math.exp(-step / 10)
    return {
        "step": step,
        "time_s": time_s,
        "train/reward": 0.38 + 0.28 * progress + rng.uniform(-0.05, 0.05),
        "train/ratio_first": 1.0,
        "train/ratio_rollout": 1 + rng.uniform(-1e-6, 1e-6),
        "train/clip_fraction": 0.2 + 0.1 * rng.random(),
        "train/grad_norm": 0.5 + 0.2 * rng.random(),
        "train/zero_variance_groups": rng.randrange(3),
        "train/kl": 0.002 * step * (1 + 0.1 * rng.random()),
        "explore/spearman": math.nan if step == 1 else 0.7 + 0.2 * rng.random(),
        "explore/variance_kept": 0.07 + 0.01 * rng.random(),
        "explore/variance_random": 0.03 + 0.01 * rng.random(),
        "explore/explored": 256 - rng.randrange(30),
        "explore/requested": 256,
        "time/rollout_s": rollout_s,
        "time/train_s": train_s,
        "time/recompute_s": 0.3 * rng.random(),
    }


def write_images(folder: Path, last: int) -> None:
    folder.mkdir()
    rows = []
    rng = random.Random(1)
    for iteration in (0, last):
        for index, prompt in enumerate(PROMPTS):
            image = Image.new("RGB", (32, 32), "white" if iteration else "lightgrey")
            draw = ImageDraw.Draw(image)
            draw.text((1 + rng.randrange(3), 8 + rng.randrange(6)), prompt[:5], fill="black")
            if iteration == 0:
                for _ in range(120):
                    draw.point((rng.randrange(32), rng.randrange(32)), fill="grey")
            file = f"{iteration:03d}_{index:02d}.png"
            image.save(folder / file)
            reward = round(min(1.0, 0.2 + 0.6 * (iteration > 0) + 0.3 * rng.random()), 3)
            rows.append({"iteration": iteration, "index": index, "prompt": prompt, "reward": reward})
            rows[-1] |= {"judge": None if index == 0 else reward / 2, "file": file}
    (folder / "manifest.json").write_text(json.dumps(rows), encoding="utf-8")
