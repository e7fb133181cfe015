"""Each benchmark prints one JSON line on standard output, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.output import deviation, machine, print_figures

ROOT = Path(__file__).parents[2]


def line_of(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_the_line_holds_name_figures_and_machine_and_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures("some", {"speed_ratio": float("nan"), "rows": [{"mean": 1 / 3}]})
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "name": "some",
        "speed_ratio": None,
        "rows": [{"mean": 0.333333}],
        "machine": machine(),
    }
    assert deviation([1.0, 3.0]) == pytest.approx(2**0.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_iteration_compares_two_loops_that_compute_the_same() -> None:
    found = line_of("benchmarks.iteration", "--quick")
    assert found["name"] == "iteration"
    assert found["plain_over_spotlight_ratio"] > 0
    assert found["gradient_relative_error"] < 1e-3
    assert found["rewards_different_share"] == 0
    assert {"publish", "rollout", "score", "exchange", "train", "iteration"} == found["spotlight_s"].keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recovery_reaches_both_end_points_of_every_kind_of_event() -> None:
    found = line_of("benchmarks.recovery", "--quick")["20MB"]
    assert found.keys() >= {"killed", "warned", "warm", "pause", "new", "cold", "copy"}
    for kind in ("killed", "warned", "warm", "new", "cold"):
        assert 0 < found[kind]["collective_s"]["p50"] <= found[kind]["step_s"]["p50"]
    assert found["copy"]["network_10"]["p50"] >= 15e6 * 8 / 1e10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hardware_measures_what_a_profile_asks_for() -> None:
    found = line_of("benchmarks.hardware", "--quick")
    assert found["name"] == "hardware"
    assert all(0 < found[figure] < 1 for figure in ("denoise", "decode_score", "train", "publish"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_selection_runs_every_arm_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    arguments = ("benchmarks.selection", "--quick", "--out", str(tmp_path))
    line_of(*arguments, "--arms", "random", "stale_4g")
    partly = (tmp_path / "results.jsonl").read_text("utf-8")
    found = line_of(*arguments)
    assert (tmp_path / "results.jsonl").read_text("utf-8").startswith(partly)
    assert len((tmp_path / "results.jsonl").read_text("utf-8").splitlines()) == 14
    assert found["seeds"] == 2
    assert len(found["curves"]) == 7
    assert all(len(curve) == 3 for curve in found["curves"].values())
    assert {"spearman_stale", "variance_share_stale", "variance_share_random"} <= found["ranking"].keys()
    starts = [curve[0]["reward"]["mean"] for curve in found["curves"].values()]
    assert len(set(starts)) == 1  # the same model on the same held-out prompts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_market_runs_every_arm_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    found = line_of("benchmarks.market", "--quick", "--out", str(tmp_path))
    assert (tmp_path / "results.jsonl").read_text("utf-8").count("\n") == 4
    assert line_of("benchmarks.market", "--quick", "--out", str(tmp_path)) == found
    assert found["problems"] == []
    assert found["arms"].keys() == {"undisturbed", "market", "market_pairs", "market_random"}
    assert found["arms"]["market"]["regroups"] == [0]
    assert found["arms"]["market_random"]["seeds_explored"]["mean"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overhead_compares_exploring_and_idle_spot_workers() -> None:
    found = line_of("benchmarks.overhead", "--quick")
    assert found["exploration_overhead_ratio"] > 0
    assert found["idle"]["seeds_explored"] == 0
    assert found["idle"]["spot_idle_share"] == 1
    assert found["neighbour"]["seeds_explored"] == 0
    assert found["exploring"]["spot_idle_share"] < 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_staleness_ranks_by_older_policies_and_previews(tmp_path: Path) -> None:
    found = line_of("benchmarks.staleness", "--quick", "--out", str(tmp_path))
    (figures,) = found["settings"].values()
    assert {"spearman_lag 1", "spearman_lag 2", "spearman_3 steps", "spearman_random"} <= figures.keys()
    assert found["rows"] == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scaling_runs_faster_than_its_clock() -> None:
    found = line_of("benchmarks.scaling", "--quick")
    assert [row["workers"] for row in found["rows"]] == [10, 100]
    assert found["virtual_over_wall_ratio"] > 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moved", ["assumed", "design"])
def test_sensitivity_times_the_system_and_the_baseline(moved: str) -> None:
    found = line_of("benchmarks.sensitivity", "--quick", "--of", moved)
    as_it_is, other = found["rows"]
    assert as_it_is["moved"] == "as it is"
    assert as_it_is["seconds_ratio"] > 1
    assert as_it_is["seeds"] > 8
    assert (other["seconds"] != as_it_is["seconds"]) == (moved == "design")  # 4 GPUs have no overhead of more


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fidelity_compares_a_real_and_a_virtual_job() -> None:
    (found,) = line_of("benchmarks.fidelity", "--quick")["by_seeds_per_prompt"].values()
    assert found["iteration_s_ratio"] > 0
    assert 0 < found["virtual"]["idle_share"] < 1
    assert 0 < found["real"]["idle_share"]["mean"] < 1
    assert 0 < found["virtual"]["explored"] <= 2 * 4
    assert 0 < found["real"]["explored"]["mean"] <= 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ulysses_measures_time_and_bytes_of_three_ways() -> None:
    found = line_of("benchmarks.ulysses", "--quick")
    (row,) = found["rows"]
    qkv_bytes = 4 * 64 // 2 * 12 * 32  # fp32, of one rank
    # Three inputs and the output, forward and backward.
    assert row["ours"]["exchanged_bytes"] == row["deepspeed"]["exchanged_bytes"] == 2 * 4 * qkv_bytes
    assert row["diffusers"]["exchanged_bytes"] == 2 * 4 * qkv_bytes
    assert 0.4 < row["kept_over_alone_ratio"] < 1
    assert all(row[way]["seconds"] > 0 for way in ("ours", "deepspeed", "diffusers"))
