"""Runs in this process, in folders of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.app.runs import EXPLORED, TINY, Run, run_inline

torch.set_num_threads(1)


@pytest.fixture
def inline(tmp_path: Path) -> Callable[..., Run]:
    """Makes tiny runs that explore, unless they are given another planner; see `runs.run_inline`."""
    number = itertools.count()

    def inline(*overrides: str, folder: Path | None = None, **arguments: Any) -> Run:
        planner = () if any(text.startswith("planner=") for text in overrides) else (EXPLORED,)
        folder = folder or tmp_path / f"run{next(number)}"
        return run_inline(folder, *TINY, *planner, *overrides, **arguments)

    return inline


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny run of four iterations, to compare others with."""
    return run_inline(tmp_path_factory.mktemp("plain") / "run", *TINY, EXPLORED, "trainer.max_steps=4")
