"""Memory and durations that are told before a run, and the headers of the experiments that quote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.app.config import ConfigError
from src.app.estimate import iteration, lines, main, measure, memory_of
from src.app.generate import composed
from tests.app.runs import ROOT
from tests.app.test_published import FAMILY

PROMPT = "# $ python -m src.estimate "
QWEN = "experiment=qwen_image_ocr"


def quoted(file: Path) -> dict[str, list[str]]:
    """The commands in an experiment's header, and what is said to be their output."""
    commands: dict[str, list[str]] = {}
    output: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(PROMPT):
            output = commands.setdefault(line.removeprefix(PROMPT), [])
        elif line.startswith("#   "):
            output.append(line.removeprefix("#   "))
    return commands


@pytest.mark.timeout(300)
@pytest.mark.parametrize("experiment", FAMILY)
def test_headers_quote_what_the_command_prints(experiment: str) -> None:
    commands = quoted(ROOT / "conf" / "experiment" / f"{experiment}.yaml")
    assert len(commands) == (3 if experiment.startswith("flux") else 2)
    assert any("model.load.height=1280" in command for command in commands)
    for command, output in commands.items():
        assert f"experiment={experiment}" in command
        assert lines(composed(command.split())) == output


def test_bytes_are_the_sum_of_what_the_job_keeps() -> None:
    config = composed([QWEN])
    measured, batch = measure(config), iteration(config)
    memory = memory_of(config, batch, measured)
    adapter_bytes = measured.adapter * 4
    assert measured.adapter == 60 * 2 * 64 * (4 * (3072 + 3072) + 2 * (3072 + 4 * 3072))
    assert memory.resident == {
        "transformer": measured.parameters * 2,
        "LoRA": adapter_bytes,
        "EMA": adapter_bytes,
        "moments": 2 * adapter_bytes,
        "encoded prompts": (32 * 16 + 32 + 128) * 256 * 3584 * 2,
        "trajectories": 32 * 16 * 2 * 2 * 1024 * 64 * 4,
    }
    assert memory.phases["train"] == {"gradients": adapter_bytes, "activations": measured.checkpointed_bytes}
    assert memory.peak_bytes == sum(memory.resident.values()) + measured.encoder_bytes


def test_settings_move_their_part() -> None:
    base = composed([QWEN])
    measured, batch = measure(base), iteration(base)

    def told(*overrides: str):
        return memory_of(composed([QWEN, *overrides]), batch, measured)

    before = told()
    assert "EMA" not in told("algo.ema=null").resident
    assert told("model.load.offload=false").resident["text encoders"] == before.phases["encode"]["text encoders"]
    assert told("model.load.gradient_checkpointing=false").phases["train"]["activations"] == measured.plain_bytes
    one_moment = told("algo.optimizer._target_=torch.optim.RMSprop", "~algo.optimizer.betas")
    assert one_moment.resident["moments"] == before.resident["moments"] / 2
    shared = told("parallel=ulysses", "trainer.devices=4", "parallel.sp_degree=2", "parallel.strategy.stage=2")
    assert shared.resident["moments"] == before.resident["moments"] / 4
    assert shared.phases["train"] == {
        "gradients": before.phases["train"]["gradients"] / 4,
        "activations": before.phases["train"]["activations"] / 2,
    }


def test_an_iteration_takes_what_the_profile_s_source_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The profile was fitted to 326 s on 4 GPUs, beside the publication of weights."""
    main([QWEN, "+hardware=qwen_image_h100", "parallel=ulysses", "trainer.devices=4"])
    told = capsys.readouterr().out.splitlines()
    assert told[-3:] == [
        "512 images on 4 reserved GPUs of qwen_image_h100 without spot workers: 327 s and 3.80 usd per iteration",
        "  seconds: denoising 100, decoding and scoring 60, training 166, publication 1",
        "  fastest sp_degree: 1; for a single image that everybody waits for 2",
    ]


def test_sequences_are_shared_where_memory_asks_for_it() -> None:
    """1280 x 1280 without gradient checkpointing: 54 GB that sharing leaves as they are, and 169 GB in activations."""
    config = composed(
        [
            *("experiment=qwen_image_ocr", "+hardware=qwen_image_h100_1280", "parallel=ulysses", "trainer.devices=4"),
            *("model.load.height=1280", "model.load.width=1280", "model.batch_size=1"),
            "model.load.gradient_checkpointing=false",
        ]
    )
    told = [lines(config, gpu_bytes=gigabytes * 1e9)[-1] for gigabytes in (500, 141, 100)]
    assert [line.partition(";")[0].rpartition(" ")[2] for line in told] == ["1", "2", "4"]
    with pytest.raises(ConfigError, match=r"--gpu-gb: one sample needs .* at degree 4, memory_bytes is 8e\+10"):
        lines(config, gpu_bytes=80e9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=tiny_text"], "model.path must be one of"),
        ([QWEN, "model.lora=null"], "model.lora must not be null"),
        ([QWEN, "model.load.height=500"], "model: height must be a positive multiple of 16, got 500"),
        ([QWEN, "algo.group_size=0"], "group_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(overrides)
