"""Hardware profiles: those of conf/hardware, as Hydra composes them, and a made-up one with round numbers."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from src.sim.hardware import Hardware, profile

CONF = Path(__file__).parents[2] / "conf"
PROFILES = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))

VALUES = {
    "denoise": 0.5,
    "decode_score": 0.25,
    "train": 2.0,
    "train_gpus": 4.0,
    "train_overhead": 0.1,
    "sp1_latency": 8.0,
    "sp2_latency": 5.0,
    "sp4_latency": 3.2,
    "publish": 1.0,
    "load": 2.0,
    "regroup": 3.0,
    "cold_start": 100.0,
    "commit": 0.125,
}


def shipped(name: str) -> Hardware:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return instantiate(compose(f"hardware/{name}").hardware, _convert_="all")


def made(**changed: float) -> Hardware:
    figures = {
        name: {"value": value, "tag": "published" if name.startswith("sp") else "assumed", "source": f"of {name}"}
        for name, value in {**VALUES, **changed}.items()
    }
    return profile(name="made", figures=figures)
