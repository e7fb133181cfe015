"""Several training ranks: what is refused before they start, and what they then compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from src.app import ranks as processes
from src.app.config import ConfigError, RunPlan
from src.app.errors import JobFailed
from src.spot import market as mk
from tests.app.processes import assert_gone, events, living, scratch_of, started, wait_for
from tests.app.runs import LORA, ROOT, TINY, Run, configuration
from tests.sockets import LOOPBACK, listening

ULYSSES = "parallel=ulysses"
SPOT_TRAINS = (ULYSSES, "parallel.elastic=true", "cluster.spot_trains=true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.devices=2",), r"trainer.devices must be 1 for one rank .*, got 2"),
        ((ULYSSES, "trainer.devices=3", "parallel.sp_degree=2"), r"parallel.sp_degree must divide .*=3, got 2"),
        ((ULYSSES, "trainer.devices=8", "parallel.sp_degree=8"), r"at most the model's \d attention heads, got 8"),
        ((ULYSSES, "trainer.devices=100"), r"an update trains on \d+ .* pairs, too few for 100 data-parallel ranks"),
        ((ULYSSES, "parallel.strategy.stage=3"), r"parallel.strategy.stage must be 0, 1 or 2: .*, got 3"),
        (
            (ULYSSES, "trainer.devices=2", "parallel.sp_degree=2", "model.compile=true"),
            "model.compile cannot be combined with parallel.sp_degree=2",
        ),
        (("parallel.elastic=true",), "parallel.elastic=true needs parallel=ulysses"),
        (("+callbacks.checkpoint.deepspeed=true",), "callbacks.checkpoint.deepspeed=true needs parallel=ulysses"),
        ((ULYSSES, "parallel.elastic=true"), "parallel.elastic=true needs ranks .*, got trainer.devices=1"),
        (
            (ULYSSES, "trainer.devices=2", "parallel.elastic=true", "parallel.strategy.stage=1"),
            "parallel.elastic=true needs parallel.strategy.stage=0, got 1",
        ),
        (("cluster.spot_trains=true", "market=replay"), "cluster.spot_trains=true needs ranks that may go"),
        ((*SPOT_TRAINS, "planner=none"), "cluster.spot_trains=true .*, got .* market.decider=None"),
        ((*SPOT_TRAINS, "market=replay"), "cluster.spot_trains=true needs planner=none"),
        (
            (*SPOT_TRAINS, "market=replay", "planner=none", "cluster.workers_per_node=99"),
            r"an update trains on \d+ .* pairs, too few for 199 ranks \(trainer.devices \+ market.nodes",
        ),
    ],
)
def test_wrong_geometry_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        configuration(tmp_path, *TINY, *overrides)


def test_torchrun_must_have_as_many_processes_as_the_job_has_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")
    configuration(tmp_path, *TINY, ULYSSES, "trainer.devices=3")
    with pytest.raises(ConfigError, match=r"trainer.devices must be torchrun's 3 processes, got 2"):
        configuration(tmp_path, *TINY, ULYSSES, "trainer.devices=2")


@pytest.mark.parametrize("degree", [1, 2])
def test_right_geometry_is_accepted(tmp_path: Path, degree: int):
    configuration(tmp_path, *TINY, ULYSSES, "trainer.devices=2", f"parallel.sp_degree={degree}")


def train(folder: Path, *overrides: str, start: Sequence[str] = ("train.py",)) -> Run:
    """Runs `python train.py` without spot workers."""
    quiet = ("planner=none", "explore.sync=race", "cluster.spot_workers=0")
    command = [sys.executable, *start, *TINY, *quiet, f"paths.output_dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    return Run(folder)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("one") / "run")


def assert_same_curve(run: Run, other: Run) -> None:
    """Rounding apart: which may turn a borderline reward, so rewards are not compared to the last digit."""
    for name in ("train/reward", "eval/reward"):
        assert run.metric(name) == pytest.approx(other.metric(name), abs=0.1)
    assert run.metric("train/grad_norm")[0] == pytest.approx(other.metric("train/grad_norm")[0], rel=0.05)
    assert run.policy.keys() == other.policy.keys()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("devices", "degree", "stage"), [(2, 2, 0), (2, 1, 1), (2, 2, 2)])
def test_two_ranks_train_like_one(tmp_path: Path, one_rank: Run, devices: int, degree: int, stage: int):
    run = train(
        tmp_path / "run",
        ULYSSES,
        f"trainer.devices={devices}",
        f"parallel.sp_degree={degree}",
        f"parallel.strategy.stage={stage}",
    )
    assert_same_curve(run, one_rank)
    leaders = {event["worker"] for event in run.events("lease_done")}
    assert len(leaders) <= devices // degree, "ranks that share sequences are one worker"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_starts_the_job_once(tmp_path: Path, one_rank: Run):
    two = (ULYSSES, "trainer.devices=2", "parallel.sp_degree=2")
    run = train(tmp_path / "run", *two, start=("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"))
    assert_same_curve(run, one_rank)
    assert len(run.events("run_started")) == 1
    assert not [path for path in tmp_path.iterdir() if path != run.folder]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path):
    """And one of ZeRO partitions: what is saved is whole."""
    two = (ULYSSES, "trainer.devices=2", "parallel.sp_degree=2", "parallel.strategy.stage=1", LORA)
    train(tmp_path / "run", *two, "trainer.max_steps=1")
    run = train(tmp_path / "run", LORA, "trainer.max_steps=2", "ckpt_path=last")
    assert [row["step"] for row in run.metrics if "train/reward" in row] == [1, 2]
    assert run.checkpoint.state["iteration"] == 2
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "done"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 2])
def test_checkpoints_in_deepspeeds_own_form_lie_beside_ours(tmp_path: Path, stage: int):
    ranks = (ULYSSES, "trainer.devices=2", "parallel.sp_degree=2", f"parallel.strategy.stage={stage}")
    run = train(tmp_path / "run", *ranks, "+callbacks.checkpoint.deepspeed=true", "callbacks.checkpoint.keep=1")
    folder = run.folder / "checkpoints" / "deepspeed"
    assert (folder / "latest").read_text() == "iteration_000002"
    assert [path.name for path in folder.glob("iteration_*")] == ["iteration_000002"]
    parts = {path.name.partition("_mp_rank")[0] for path in (folder / "iteration_000002").glob("*_states.pt")}
    assert len(parts) == (3 if stage else 1), "of the model, and of each rank's part of the optimizer"
    assert run.checkpoint.state["iteration"] == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_servers_of_a_job_with_two_ranks_listen_on_loopback(tmp_path: Path):
    """The ranks' store, and what gloo listens on, too."""
    two = (*TINY, ULYSSES, "trainer.devices=2", "parallel.sp_degree=2", "trainer.max_steps=400")
    with started(tmp_path / "run", *two) as parent:
        scratch = scratch_of(parent.pid)
        wait_for("training", lambda: any(event["kind"] == "kept" for event in events(tmp_path / "run")))
        ranks = [pid for pid, command in living(scratch).items() if "src.app.rank" in command]
        assert len(ranks) == 2
        for rank in ranks:
            assert listening([rank])
        addresses = listening([parent.pid, *living(scratch)])
    assert addresses.keys() <= LOOPBACK
    assert_gone(scratch)


# ---------------------------------------------------------------------------- how they end

STARTED_WITH = "from pathlib import Path\nimport os, signal, sys, time\nrank = int(os.environ['RANK'])\n"


def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, devices: int = 3) -> Exception | None:
    """Why ranks that run `program` instead of the product failed."""
    replace_program(tmp_path, monkeypatch, program)
    config = {"trainer": {"devices": devices}, "parallel": {"threads": 1}}
    with processes.Ranks(RunPlan(config, tmp_path)) as ranks:
        ranks.send_start("nowhere")
        while ranks.running():
            time.sleep(0.01)
        return ranks.failure()


def replace_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(STARTED_WITH + program)
    start = subprocess.Popen

    def popen(command: list[str], **arguments: Any) -> subprocess.Popen[str]:
        return start([sys.executable, str(script)], **arguments)

    monkeypatch.setattr(processes.subprocess, "Popen", popen)


def test_ranks_that_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = "[os.environ[name] for name in ('LOCAL_RANK', 'WORLD_SIZE')]"
    program = f"print({place}, sys.stdin.readline(), file=sys.stderr)"
    assert outcome(tmp_path, monkeypatch, program) is None
    for rank, name in enumerate(("rank.log", "rank1.log", "rank2.log")):
        assert (tmp_path / name).read_text().startswith(f'[\'{rank}\', \'3\'] {{"address": "nowhere", "resume": null}}')


def test_the_rank_that_failed_is_named_and_not_those_that_we_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failure = outcome(tmp_path, monkeypatch, "if rank == 1:\n    print('no memory')\n    sys.exit(1)\ntime.sleep(60)")
    assert str(failure).startswith("training rank 1 failed: no memory (see ")


def test_bad_input_is_what_the_user_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failure = outcome(tmp_path, monkeypatch, "print('model.path is wrong')\nsys.exit(2)")
    assert isinstance(failure, ConfigError)
    assert str(failure) == "model.path is wrong"


# ---------------------------------------------------------------------------- how they are replaced


class ToldFleet:
    """Keeps what it is told; `frozen` names are there once the ranks have been started."""

    incarnation = 2

    def __init__(self, *frozen: str) -> None:
        self.frozen = deque(frozen)
        self.moves: deque[mk.Action] = deque()
        self.noticed: list[tuple[str, float]] = []
        self.started: list[tuple[int, str, str | None]] = []
        self.left: list[tuple[str, str]] = []
        self.restarts: list[tuple[int, bool]] = []

    def leave(self, process: str, reason: str) -> None:
        self.left.append((process, reason))

    def notice(self, process: str, grace_s: float) -> None:
        self.noticed.append((process, grace_s))

    def record(self, kind: str, **fields: Any) -> None:
        if kind == "rank_started":
            self.started.append((fields["rank"], fields["worker"], fields["node"]))
        else:
            assert kind == "rank_ended"
            self.restarts.append((fields["rank"], fields["restarts"]))


def elastic_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, fleet: ToldFleet, restarts: int = 1
) -> Exception | None:
    """As `outcome`, of two ranks that may be replaced."""
    replace_program(tmp_path, monkeypatch, "import json\nstart = json.loads(sys.stdin.readline())\n" + program)
    config = {"trainer": {"devices": 2}, "parallel": {"threads": 1, "restarts": restarts}}
    with processes.ElasticRanks(RunPlan(config, tmp_path), fleet) as ranks:  # type: ignore[arg-type]
        ranks.send_start("nowhere")
        while ranks.running():
            time.sleep(0.01)
        return ranks.failure()


WAIT_FOR_NUMBER_2 = """
from pathlib import Path
sign = Path(__file__).with_name("joined")
while start["number"] != 2 and not sign.exists():
    time.sleep(0.01)
"""


def test_a_killed_rank_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a process of another number, in the same place, that joins the others."""
    kill = "import time\nif start['number'] == 1:\n    os.kill(os.getpid(), 9)\n"
    join = "if start['joins']:\n    print(rank, start, file=sys.stderr)\n    sys.stderr.flush()\n    sign.touch()\n"
    fleet = ToldFleet()
    assert elastic_outcome(tmp_path, monkeypatch, kill + WAIT_FOR_NUMBER_2 + join, fleet) is None
    assert fleet.left[0] == ("reserved-local-1.2", "killed")
    assert fleet.restarts[0] == (1, True)
    assert sorted(fleet.left[1:]) == [("reserved-local-0.2", "left"), ("reserved-local-2.2", "left")]
    expected = {"address": "nowhere", "resume": None, "number": 2, "spot": None, "joins": True}
    assert (tmp_path / "rank1.log").read_text().strip() == f"1 {expected}"


def test_a_frozen_rank_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    freeze = "import signal, time\nif start['number'] == 0:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    fleet = ToldFleet("reserved-local-0.2", "spot-local-0.0")
    program = freeze + WAIT_FOR_NUMBER_2 + "sign.touch()"
    assert elastic_outcome(tmp_path, monkeypatch, program, fleet) is None
    assert fleet.left[0] == ("reserved-local-0.2", "frozen")


def test_ranks_on_spot_nodes_come_and_go_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first process of node a has time to leave in, the second has none; nobody is started while it is away, and
    reserved ranks are never touched. At the end nobody waits for who has not come in yet."""
    spot = "if start['spot'] == ['a', 0] and start['number'] == 2:\n    sys.exit(3 * signal.sigwait({15}) // 15)\n"
    wait = "sign = Path(__file__).with_name('over')\nwhile start['spot'] or not sign.exists():\n    time.sleep(0.01)\n"
    replace_program(tmp_path, monkeypatch, "import json\nstart = json.loads(sys.stdin.readline())\n" + spot + wait)
    config = {"trainer": {"devices": 2}, "parallel": {"threads": 1, "restarts": 1}}
    fleet = ToldFleet()
    with processes.ElasticRanks(RunPlan(config, tmp_path), fleet, [("a", 0), ("b", 0)]) as ranks:  # type: ignore[arg-type]
        ranks.send_start("nowhere")

        def play(*moves: mk.Action, until_left: int) -> None:
            fleet.moves.extend(moves)
            while len(fleet.left) < until_left:
                assert ranks.running()
                time.sleep(0.01)

        play(mk.Return("a"), mk.Return("b"), mk.Notice("a", 2.0), until_left=1)
        play(mk.Kill("a"), mk.Return("a"), mk.Notice("a", 2.0), mk.Kill("a"), mk.Return("a"), until_left=2)
        (tmp_path / "over").touch()
        while ranks.running():
            time.sleep(0.01)
        assert ranks.failure() is None
    reserved = [(0, "reserved-local-0.2", None), (1, "reserved-local-1.2", None)]
    assert fleet.started[:4] == [*reserved, (2, "spot-a-0.2", "a"), (3, "spot-b-0.3", "b")]
    assert fleet.started[4:] == [(2, "spot-a-0.4", "a"), (2, "spot-a-0.5", "a")]
    assert fleet.noticed == [("spot-a-0.2", 2.0), ("spot-a-0.4", 2.0)]
    assert fleet.left[:2] == [("spot-a-0.2", "left"), ("spot-a-0.4", "killed")]
    assert not any(again for _, again in fleet.restarts)


def test_a_place_stays_empty_after_too_many_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fleet = ToldFleet()
    program = "import time\nif rank == 1:\n    print('no memory')\n    sys.exit(1)\ntime.sleep(1.5)"
    assert elastic_outcome(tmp_path, monkeypatch, program, fleet, restarts=2) is None
    assert fleet.restarts == [(1, True), (1, True), (1, False), (0, False)]


def test_the_job_fails_when_no_rank_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = "print('no memory')\nsys.exit(1)"
    failure = elastic_outcome(tmp_path, monkeypatch, program, ToldFleet(), restarts=1)
    assert isinstance(failure, JobFailed)
    assert "failed: no memory (see " in str(failure)


def test_the_job_fails_when_nobody_knows_how_far_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is told is what happened before."""
    program = "if start['joins']:\n    print('all are gone')\n    sys.exit(4)\nos.kill(os.getpid(), 9)"
    failure = elastic_outcome(tmp_path, monkeypatch, program, ToldFleet(), restarts=5)
    assert isinstance(failure, JobFailed)
    assert "was killed by SIGKILL" in str(failure)


def test_bad_input_of_an_elastic_job_is_what_the_user_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fleet = ToldFleet()
    failure = elastic_outcome(tmp_path, monkeypatch, "print('model.path is wrong')\nsys.exit(2)", fleet)
    assert isinstance(failure, ConfigError)
    assert all(not again for _, again in fleet.restarts)
