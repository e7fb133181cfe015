"""Who may import whom. Imports are read from the source, so those inside functions count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS: dict[str, tuple[str, ...]] = {
    "src.core": (),
    "src.tasks": ("src.core",),
    "src.models": ("src.core",),
    "src.parallel": ("src.core", "src.models"),
    "src.rl": ("src.core", "src.models", "src.tasks"),
    "src.spot": ("src.core",),
    "src.sim": ("src.core", "src.spot", "src.parallel.plan"),
    "src.report": ("src.core", "src.spot.cost", "src.spot.prices"),
    "src.pretrain": ("src.core", "src.models", "src.tasks", "src.rl.rewards"),
    "src.app": (
        "src.core",
        "src.tasks",
        "src.models",
        "src.parallel",
        "src.rl",
        "src.spot",
        "src.sim",
        "src.pretrain",
    ),
    "src.estimate": ("src.app",),
    "src.generate": ("src.app",),
    "train": ("src.app",),
}
"""What each layer may import of the project, besides itself."""

TORCH = (
    "torch",
    "pytorch_lightning",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "safetensors.torch",
)
TORCH_FREE = (
    "src.core",
    "src.tasks",
    "src.report",
    "src.parallel.plan",
    "src.spot.scheduler",
    "src.spot.queue",
    "src.spot.membership",
    "src.spot.teams",
    "src.spot.records",
    "src.spot.sizing",
    "src.spot.planning",
    "src.spot.exploring",
    "src.spot.traces",
    "src.spot.market",
    "src.spot.prices",
    "src.spot.cost",
    "src.sim",
)
"""Vocabulary, readers and deciders: they start fast, and simulations run thousands of them."""

HOMES: dict[str, tuple[str, ...]] = {
    "pytorch_lightning": (
        "src.rl.module",
        "src.rl.data",
        "src.spot.callback",
        "src.parallel.strategy",
        "src.app",
    ),
    "hydra": ("train", "src.app"),
    "omegaconf": ("train", "src.app"),
}
"""The only places of packages that would otherwise spread."""


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that the source imports: `from a.b import c` gives `a.b.c`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def violations(module: str, source: str) -> list[str]:
    """One line per import that breaks a rule."""
    found = []
    layer = next((name for name in LAYERS if inside(module, (name,))), None)
    if layer is None:
        return [f"{module} belongs to no layer"]
    for line, name in imported(source):
        if name.startswith("."):
            found.append(f"{module}:{line} imports {name}: imports are absolute")
        if inside(name, ("src",)) and not inside(name, (layer, *LAYERS[layer])):
            found.append(f"{module}:{line} imports {name}: {layer} may import {LAYERS[layer] or 'nothing'}")
        if inside(name, TORCH) and inside(module, TORCH_FREE):
            found.append(f"{module}:{line} imports {name}: {module} stays free of torch")
        for package, homes in HOMES.items():
            if inside(name, (package,)) and not inside(module, homes):
                found.append(f"{module}:{line} imports {name}: {package} lives in {homes}")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("train.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != "src":
            yield name, path


def test_every_import_respects_the_layers() -> None:
    checked = list(modules())
    assert {name for name, _ in checked} >= {"src.core.types", "src.report.read"}
    assert [line for name, path in checked for line in violations(name, path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("src.core.types", "from src.spot.cost import total"),
        ("src.spot.worker", "from src.rl import loss"),
        ("src.rl.loss", "import src.parallel.group"),
        ("src.parallel.plan", "def late():\n    import src.spot.client"),
        ("src.report.read", "from src.spot.scheduler import Scheduler"),
        ("src.sim.hardware", "from src.parallel.group import Group"),
        ("src.sim.statistics", "import torch"),
        ("src.pretrain.base", "from src.rl import loss"),
        ("src.app.job", "from src.report.html import page"),
        ("train", "from src.core.clock import wall_s"),
        ("src.core.stats", "import torch"),
        ("src.tasks.text", "from torch.nn import functional"),
        ("src.spot.scheduler", "import pytorch_lightning as pl"),
        ("src.report.html", "if TYPE_CHECKING:\n    import torch"),
        ("src.rl.loss", "from pytorch_lightning import LightningModule"),
        ("src.rl.module", "from omegaconf import DictConfig"),
        ("src.models.lora", "import hydra.utils"),
        ("src.models.lora", "from . import adapter"),
        ("src.novelty.thing", ""),
        ("src.corelike", ""),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("src.report.html", "from src.spot.cost import total"),
        ("src.report.measure", "from src.spot.prices import FixedPrices"),
        ("src.sim.cluster", "from src.parallel.plan import groups_of"),
        ("src.pretrain.base", "from src.rl.rewards import reward"),
        ("src.pretrain.base", "from src.rl import rewards"),
        ("src.rl.module", "from pytorch_lightning import LightningModule"),
        ("src.spot.worker", "import torch"),
        ("src.app.job", "from omegaconf import OmegaConf"),
    ],
)
def test_what_is_allowed_is_not_caught(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.timeout(60)
def test_torch_free_modules_really_load_without_torch() -> None:
    names = [name for name, _ in modules() if inside(name, TORCH_FREE)]
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
    code += "print([name for name in ('torch', 'ray', 'hydra') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
