"""Whole jobs on a GPU, with spot workers on it and beside it, and what their checkpoints hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from src.app.callbacks import random_state, set_random_state
from tests.app.processes import EAGER, train
from tests.app.runs import EXPLORED, TINY, Run, run_inline

ROUNDING, GRADIENT = 1e-2, 0.05
"""By how much rewards before the first update, and the relative norm of its gradient, may differ between devices."""

RATIO = 1e-5
"""By how much the ratio before the first update may differ from 1."""

JOBS = [
    pytest.param("cpu", "cpu", marks=pytest.mark.slow),
    pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("trainer", "workers"), JOBS)
def test_a_job_with_its_trainer_and_its_workers_on_given_devices(tmp_path: Path, trainer: str, workers: str):
    """Workers of another device explore as ever; the log-probabilities of their rollouts are computed again."""
    devices = (f"trainer.accelerator={trainer}", f"cluster.device={workers}")
    done = train(tmp_path / "run", *TINY, EXPLORED, EAGER, *devices, timeout_s=240)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    joined = {(event["role"], event["fingerprint"].split(":")[0]) for event in run.events("worker_joined")}
    assert joined == {("reserved", trainer), ("spot", workers)}
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=RATIO)
    assert all(norm > 0 for norm in run.metric("train/grad_norm"))
    rollouts = [event for event in run.events("lease_done") if event["request_kind"] == "rollout"]
    foreign = sum(event["count"] for event in rollouts if event["worker"].startswith("spot") and trainer != workers)
    assert sum(run.metric("train/recomputed")) == foreign
    assert run.metric("explore/explored") == [24]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of two ranks")
def test_two_ranks_on_two_gpus_share_every_sequence(tmp_path: Path):
    ranks = ("parallel=ulysses", "trainer.devices=2", "parallel.sp_degree=2", "trainer.accelerator=cuda")
    done = train(tmp_path / "run", *TINY, EXPLORED, EAGER, *ranks, timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "run").metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=RATIO)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="a GPU for the rank, and one for each of two spot workers")
def test_two_spot_workers_on_two_gpus_share_every_sequence(tmp_path: Path):
    teams = ("trainer.accelerator=cuda", "cluster.sp_degree=2", "cluster.spot_workers=2", "cluster.spares=0")
    done = train(tmp_path / "run", *TINY, EXPLORED, EAGER, *teams, timeout_s=340)
    assert done.returncode == 0, done.stderr
    joined = Run(tmp_path / "run").events("worker_joined")
    assert 2 in {event["gpus"] for event in joined if event["role"] == "spot"}


@pytest.mark.parametrize("old_logprob", ["auto", "recompute"])
def test_an_iteration_on_every_device_is_that_of_the_cpu(tmp_path: Path, device: str, old_logprob: str):
    """Compared where nothing has been trained yet; the CPU takes other batches, to have another arithmetic too."""
    where = (f"trainer.accelerator={device}", f"algo.old_logprob={old_logprob}")
    run = run_inline(tmp_path / "run", *TINY, EXPLORED, "model.batch_size=5", *where)
    reference = run_inline(tmp_path / "reference", *TINY, EXPLORED)
    for name in ("eval/reward", "train/reward"):
        assert run.metric(name)[0] == pytest.approx(reference.metric(name)[0], abs=ROUNDING)
    assert run.metric("train/grad_norm")[0] == pytest.approx(reference.metric("train/grad_norm")[0], rel=GRADIENT)
    assert run.metric("train/ratio_first") == pytest.approx([1.0] * 2, abs=RATIO)


def test_a_resumed_run_draws_the_random_numbers_that_would_have_come_next(device: str):
    torch.rand(3, device=device)
    states = random_state()
    assert states.keys() >= ({"torch"} if device == "cpu" else {"torch", "cuda0"})
    expected = torch.rand(8, device=device)
    torch.rand(5, device=device)
    set_random_state(states)
    assert torch.equal(torch.rand(8, device=device), expected)


def test_checkpoints_hold_the_generators_of_the_devices_in_use(tmp_path: Path, device: str):
    """And a run goes on from them."""
    where = (*TINY, EXPLORED, f"trainer.accelerator={device}", "trainer.max_steps=3")
    run = run_inline(tmp_path / "run", *where, stop_after=1)
    assert run.checkpoint.tensors["random"].keys() >= ({"torch"} if device == "cpu" else {"torch", "cuda0"})
    resumed = run_inline(run.folder, *where, ckpt_path="last")
    assert [row["step"] for row in resumed.metrics if "train/reward" in row] == [1, 2, 3]
