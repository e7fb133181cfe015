"""Images from the command line: of a base model, and of a run beside its base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from src.app.config import ConfigError
from src.app.generate import GAP, main
from tests.app.runs import EXPLORED, LORA, Run, configuration
from tests.app.runs import TINY as TINY_RUN

TINY = ("model=tiny_digits", "algo.eval_steps=3", "model.batch_size=4")


def with_config(run: Run, *overrides: str) -> Run:
    """An inline run has no config.yaml, which a job writes when it is planned."""
    config = configuration(run.folder, *TINY_RUN, EXPLORED, *overrides)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def test_a_base_model_draws_each_prompt_with_each_seed(tmp_path: Path, capsys):
    main(["--prompt", "123", "--prompt", "456", "--seed", "0", "7", "--out", str(tmp_path), *TINY])
    files = sorted(tmp_path.glob("*.png"))
    assert [file.name for file in files] == ["000_seed0.png", "001_seed7.png", "002_seed0.png", "003_seed7.png"]
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    assert pixels(files[0]).shape == (12, 24)
    assert not np.array_equal(pixels(files[0]), pixels(files[1]))
    assert (tmp_path / "prompts.tsv").read_text().splitlines()[3] == "002_seed0.png\t0\t456"
    again = tmp_path / "again"
    main(["--prompt", "456", "--seed", "7", "--out", str(again), *TINY])
    assert np.array_equal(pixels(again / "000_seed7.png"), pixels(files[3]))


def test_a_run_stands_beside_its_base(inline, tmp_path: Path):
    ema = "algo.ema={_target_: src.rl.ema.EMA, decay: 0.5, every: 1}"
    chosen = ("trainer.max_steps=2", LORA, ema, "algo.optimizer.lr=0.01")
    run = with_config(inline(*chosen), *chosen)
    asked = ["--run", str(run.folder), "--prompt", "123", "--seed", "3"]
    main([*asked, "--out", str(tmp_path / "policy")])
    main([*asked, "--average", "--out", str(tmp_path / "ema")])
    main(["--prompt", "123", "--seed", "3", "--steps", "3", "--out", str(tmp_path / "base"), *TINY[:1], TINY[2]])
    policy, ema_, base = (pixels(tmp_path / name / "000_seed3.png") for name in ("policy", "ema", "base"))
    assert policy.shape == (12, 2 * 24 + GAP)
    left, right = policy[:, :24], policy[:, 24 + GAP :]
    assert np.abs(left.astype(int) - base).max() <= 1, "the base model's, up to the batch size's rounding"
    assert not np.array_equal(left, right)
    assert np.array_equal(ema_[:, :24], left)
    assert (run.folder / "pytorch_lora_weights.safetensors").is_file()
    assert (run.folder / "ema" / "pytorch_lora_weights.safetensors").is_file()
    assert "rank 4, alpha 8" in (run.folder / "README.md").read_text()


def test_what_cannot_be_drawn_is_said(inline, tmp_path: Path):
    with pytest.raises(ConfigError, match="is no run folder"):
        main(["--run", str(tmp_path), "--prompt", "123"])
    with pytest.raises(ConfigError, match="cannot be given with --run"):
        main(["--run", str(tmp_path), "--prompt", "123", "model=sd3"])
    run = with_config(inline("trainer.max_steps=1"), "trainer.max_steps=1")
    with pytest.raises(ConfigError, match=r"holds no running average: the run had algo\.ema=null"):
        main(["--run", str(run.folder), "--prompt", "123", "--average", "--out", str(tmp_path)])
    assert not (run.folder / "README.md").exists(), "only adapters are exported"
