"""Jobs on virtual clusters: the same training, on another clock."""

from __future__ import annotations

import warnings

import pytest

from src.app.virtual import EngineSamples, build_durations, rehearse, train
from src.core.events import read_jsonl
from src.core.types import PolicyVersion, RequestKind, SampleResult
from src.spot import messages as m
from tests.app.processes import train as command
from tests.app.runs import TINY, Run, assert_same_run, configuration, run_inline
from tests.spot.fakes import requests

SMALL = (*TINY, "callbacks.evaluate.every=2")
CALM = ("market=none", "cluster.spot_nodes=2", "planner.seeds_per_prompt=8")


def run_virtual(folder, *overrides, how=train):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")  # as the command does
        how(configuration(folder, *overrides), folder).shutdown()
    return Run(folder)


def times(run):
    return {row["step"]: row["time_s"] for row in read_jsonl(run.folder / "metrics.jsonl")}


class Batches:
    """An engine that remembers the seeds of its batches."""

    batch_size = 4

    def __init__(self):
        self.served = []

    def load_weights(self, folder):
        return folder.name

    def serve(self, requests, worker):
        self.served.append([request.key.seed for request in requests])
        return [SampleResult(request.key, worker, "0.0", reward=1.0) for request in requests], None


def test_samples_are_made_in_whole_batches_and_only_while_somebody_waits_for_them(tmp_path):
    rank, worker = Batches(), Batches()
    samples = EngineSamples(rank=rank, worker=worker, weights_root=tmp_path)
    explores = requests(RequestKind.EXPLORE, 10, policy=PolicyVersion(0, 0), iteration=1)
    samples.heard(m.Submit(explores))
    for request in explores[:5]:
        (result,) = samples.make([request])
        assert (result.key, result.reward) == (request.key, 1.0)
    assert worker.served == [[0, 1, 2, 3], [4, 5, 6, 7]]
    samples.heard(m.Close([request.key for request in explores]))
    assert [result.error for result in samples.make(explores[5:])] == ["nobody waits for it"] * 5
    assert worker.served == [[0, 1, 2, 3], [4, 5, 6, 7]]
    held_out = requests(RequestKind.EVAL, 2, policy=PolicyVersion(0, 0))
    assert [result.reward for result in samples.make(held_out)] == [1.0, 1.0]
    assert rank.served == [[0, 1]]


def test_a_virtual_job_learns_what_a_real_one_learns(tmp_path):
    """With everything awaited, what is explored depends on no clock."""
    virtual = run_virtual(tmp_path / "virtual", "system=spotlight", *SMALL, *CALM)
    real = run_inline(tmp_path / "real", *SMALL, "planner.seeds_per_prompt=8")
    assert [e["results"] for e in virtual.events("explored")] == [e["results"] for e in real.events("explored")]
    assert_same_run(virtual, real)


def test_a_virtual_run_is_the_same_to_the_byte(tmp_path):
    market = ("system=spotlight", *SMALL, "explore.sync=race", "market.time_scale=200", "planner=ucb")
    runs = [run_virtual(tmp_path / name / "run", *market) for name in ("a", "b")]
    for name in ("events.jsonl", "metrics.jsonl"):
        one, other = ((run.folder / name).read_bytes() for run in runs)
        assert one == other
    assert runs[0].events("notice")


def test_a_rehearsal_takes_as_long_as_the_run_of_a_system_that_does_not_explore(tmp_path):
    system = ("system=rlboost", *SMALL, "market.time_scale=50")
    real, rehearsed = (run_virtual(tmp_path / how.__name__, *system, how=how) for how in (train, rehearse))
    publish_s = 0.6  # of the weights that are evaluated at the end
    assert times(rehearsed)[2] == pytest.approx(times(real)[2] - publish_s)


def test_spot_gpus_that_train_change_the_pace_and_nothing_else(tmp_path):
    plain = run_virtual(tmp_path / "plain", "system=flow_grpo", *SMALL)
    elastic = run_virtual(tmp_path / "elastic", "system=elastic", *SMALL, "market=none", "cluster.spot_nodes=4")
    durations = build_durations(configuration(tmp_path, "system=elastic", *SMALL))
    assert [event["gpus"] for event in elastic.events("spot_trained")] == [8] * (2 * durations.updates)
    for name, tensor in plain.policy.items():
        assert tensor.equal(elastic.policy[name])
    assert times(elastic)[2] < times(plain)[2] / 2


@pytest.mark.parametrize("system", ["elastic", "elastic_pods"])
def test_a_rehearsal_takes_as_long_where_spot_gpus_train(tmp_path, system):
    overrides = (f"system={system}", *SMALL, "algo.rollouts_per_prompt=6", "market.time_scale=50")
    real, rehearsed = (run_virtual(tmp_path / how.__name__, *overrides, how=how) for how in (train, rehearse))
    assert times(rehearsed)[2] == pytest.approx(times(real)[2] - 0.6)


def test_fresh_exploration_is_on_the_critical_path(tmp_path):
    sol_rl = run_virtual(tmp_path / "sol_rl", "system=sol_rl", *SMALL, "planner.seeds_per_prompt=8")
    plain = run_virtual(tmp_path / "plain", "system=flow_grpo", *SMALL)
    durations = build_durations(configuration(tmp_path, "system=sol_rl", *SMALL))
    exploring_s = (durations.denoise_s(1, 3, 1) + durations.finish_s(1, 1) + 3 * durations.commit_s) * 3 * 8 / 4
    assert times(sol_rl)[2] == pytest.approx(times(plain)[2] + 2 * exploring_s, rel=1e-6)
    assert [len(event["results"]) for event in sol_rl.events("explored")] == [24, 24]
    assert [event["version"] for event in sol_rl.events("explored")] == ["0.0", "0.1"]
    assert sol_rl.metric("explore/explored") == [24, 24]


def test_training_on_more_samples_takes_longer_in_proportion(tmp_path):
    plain, all_ = (
        build_durations(configuration(tmp_path, f"system={name}", "experiment=tiny_text"))
        for name in ("flow_grpo", "flow_grpo_all")
    )
    assert plain.updates * plain.update_s(4) == pytest.approx(166.0, rel=0.01)  # as was published, see conf/hardware
    assert all_.update_s(4) == pytest.approx(4 * plain.update_s(4))


def test_the_command_ends_with_the_summary_and_cannot_resume(tmp_path):
    done = command(tmp_path / "run", "system=flow_grpo", *SMALL, "callbacks.evaluate.every=2")
    assert done.returncode == 0, done.stderr
    assert "2 iterations in" in done.stdout
    paid = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "cost/usd" in row]
    assert [row["cost/usd"] for row in paid] == pytest.approx([4 * 83.79 / 8 * row["time_s"] / 3600 for row in paid])
    again = command(tmp_path / "run", "system=flow_grpo", *SMALL, "ckpt_path=last")
    assert again.returncode == 2
    assert "cannot be gone on with" in again.stderr


def test_gpus_that_train_cannot_explore(tmp_path):
    done = command(tmp_path / "run", "system=elastic", "planner=fixed", "planner.seeds_per_prompt=24")
    assert done.returncode == 2
    assert "cluster.spot_trains=true needs planner=none" in done.stderr
    assert "24 seeds per prompt" in done.stderr


def test_a_misspelt_key_of_a_virtual_cluster_is_named(tmp_path):
    done = command(tmp_path / "run", "system=flow_grpo", "cluster.reserved_gpus=0", "+cluster.spot_gpu=2")
    assert done.returncode == 2
    assert "cluster.spot_gpu: there is no such key" in done.stderr
    assert "cluster.reserved_gpus" in done.stderr
