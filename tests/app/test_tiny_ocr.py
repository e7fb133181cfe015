"""The tiny text model with a real OCR engine as its reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.runs import run_inline

SMALL = ("debug=fast", "data.prompts_per_iteration=2", "data.eval_prompts=8", "planner.seeds_per_prompt=6")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_iterations_with_a_real_ocr_engine(tmp_path: Path) -> None:
    run = run_inline(tmp_path / "run", "experiment=tiny_ocr", *SMALL)
    assert len(run.metric("eval/reward")) == 3
    assert run.metric("eval/failed") == [0.0, 0.0, 0.0]
    assert min(run.metric("eval/reward")) > 0.2, "the base model writes words that can be read in part"
    assert run.metric("train/failed_samples") == [0.0, 0.0]
    assert run.metric("explore/explored")[0] == 12
