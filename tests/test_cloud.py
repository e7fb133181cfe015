"""The files of cloud/: what SkyPilot will make of them, and what they say to one another."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.app.processes import wait_for
from tests.app.raylets import STARTED

ROOT = Path(__file__).parents[1]
CLOUD = ROOT / "cloud"
PAGE = (ROOT / "docs" / "cloud.md").read_text(encoding="utf-8")
SKYPILOT = Path(os.environ.get("SKYPILOT_PYTHON", "/nowhere"))
"""The interpreter of an environment in which SkyPilot is installed: it does not fit into ours."""

TASKS = ["head.yaml", "spot.yaml"]
PARSE = """
import sys, yaml
from sky.task import Task
task = Task.from_yaml_config(yaml.safe_load(sys.stdin))
(resources,) = task.resources
print(task.name, task.num_nodes, resources.use_spot)
"""
COMMANDS = """
import json, sys
from sky.client.cli.command import cli
context = cli.make_context("sky", [], resilient_parsing=True)
for words in json.load(sys.stdin):
    command = cli
    while hasattr(command, "get_command"):  # of a group
        command = command.get_command(context, words.pop(0))
    command.make_context(command.name, words, parent=context)
"""
SETTINGS = """
import sys, jsonschema, yaml
from sky.utils import schemas
jsonschema.validate(yaml.safe_load(sys.stdin), schemas.get_config_schema())
"""
skypilot = pytest.mark.skipif(not SKYPILOT.is_file(), reason="SKYPILOT_PYTHON names no interpreter with SkyPilot")


def ask_skypilot(program: str, text: str) -> str:
    """Runs a program with SkyPilot; returns what it printed last."""
    secrets = dict.fromkeys(("RAY_AUTH_TOKEN", "WANDB_API_KEY", "HF_TOKEN"), "given")
    ended = subprocess.run(
        [SKYPILOT, "-c", program],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | secrets,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return (ended.stdout.splitlines() or [""])[-1]


def task(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CLOUD / name).read_text(encoding="utf-8"))
    return loaded


def script(name: str) -> str:
    return (CLOUD / name).read_text(encoding="utf-8")


def scripts_of(name: str) -> list[str]:
    return [command.split()[1] for command in (task(name)["setup"], task(name)["run"])]


@skypilot
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "said"), [("head.yaml", "spotlight-head 1 False"), ("spot.yaml", "spotlight-spot 1 True")]
)
def test_skypilot_reads_the_tasks(name, said):
    given = task(name)
    for section in ("secrets", "envs"):  # as by --secret and --env
        given[section] = {key: value or "given" for key, value in given.get(section, {}).items()}
    assert ask_skypilot(PARSE, yaml.safe_dump(given)) == said


def sky_commands() -> Iterator[list[str]]:
    """All calls of SkyPilot in the page and in our scripts."""
    for text in (PAGE, script("spot_nodes.sh")):
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip().startswith("sky "):
                yield shlex.split(line, comments=True)[1:]


@skypilot
@pytest.mark.timeout(120)
def test_skypilot_knows_the_commands_and_their_options():
    commands = list(sky_commands())
    assert {command[0] for command in commands} >= {"check", "launch", "jobs", "down", "status", "cost-report"}
    ask_skypilot(COMMANDS, json.dumps(commands))


@skypilot
@pytest.mark.timeout(120)
def test_skypilot_knows_the_settings_of_the_page():
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    ask_skypilot(SETTINGS, settings)


def test_one_task_is_reserved_and_one_is_spot_in_the_same_network():
    head, spot = (task(name)["resources"] for name in TASKS)
    assert (head["use_spot"], spot["use_spot"]) == (False, True)
    assert head["infra"] == spot["infra"]
    assert task("head.yaml")["workdir"] == task("spot.yaml")["workdir"] == "."


@pytest.mark.parametrize("name", TASKS)
def test_no_secret_has_a_value_and_the_token_is_one(name):
    assert set(task(name)["secrets"].values()) == {None}
    assert "RAY_AUTH_TOKEN" in task(name)["secrets"]
    assert "RAY_AUTH_TOKEN" not in task(name).get("envs", {})


@pytest.mark.parametrize("name", TASKS)
def test_the_scripts_are_there_and_bash_can_read_them(name):
    for path in scripts_of(name):
        subprocess.run(["bash", "-n", ROOT / path], check=True)


@pytest.mark.parametrize("name", TASKS)
def test_scripts_use_the_variables_that_their_task_declares(name):
    declared = {*task(name)["secrets"], *task(name).get("envs", {})}
    told = declared | {"HOME", "PATH", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "WANDB_API_KEY"}
    text = script("environment.sh") + "".join((ROOT / path).read_text() for path in scripts_of(name))
    assert set(re.findall(r"\$\{?([A-Z_]{4,})", text)) <= told


@pytest.fixture
def account(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an empty home folder."""
    return {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def put_command(account: Mapping[str, str], name: str, text: str) -> None:
    file = Path(account["HOME"], "bin", name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    file.chmod(0o755)


def run_script(account: Mapping[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=account, capture_output=True, text=True, check=False, timeout=100)


def test_each_spot_node_is_a_job_that_knows_the_head(account):
    put_command(account, "ssh", 'echo "$@" >> ~/asked; echo 10.0.0.1:6379')
    put_command(account, "sky", 'echo "$@" >> ~/asked')
    assert run_script(account, "bash", "cloud/spot_nodes.sh", "2").returncode == 0
    asked = Path(account["HOME"], "asked").read_text().splitlines()
    assert asked[0] == "spotlight cat spotlight_head"
    assert [line.split("--name ")[1].split()[0] for line in asked[1:]] == ["spotlight-spot-1", "spotlight-spot-2"]
    for line in asked[1:]:
        assert "--env HEAD_ADDRESS=10.0.0.1:6379 " in line
        assert line.endswith(" cloud/spot.yaml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("spot_nodes.sh", "how many spot nodes"),
        ("setup.sh", "needs uv"),
        ("start_head.sh", "the Ray cluster needs a token"),
        ("join.sh", "the Ray cluster needs a token"),
    ],
)
def test_what_a_script_needs_is_said_in_one_line(account, tmp_path, name, message):
    (tmp_path / "cloud").symlink_to(CLOUD)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    env = account | {"PATH": account["HOME"]}  # no uv
    ended = subprocess.run(
        ["/bin/bash", f"cloud/{name}"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert message in ended.stderr.splitlines()[-1]


def test_the_environment_is_made_once_and_filled(account, tmp_path):
    put_command(
        account,
        "uv",
        'echo "$@" >> ~/asked; [ "$1" != venv ] || install -D /dev/null .venv/bin/python',
    )
    for _ in range(2):
        subprocess.run(["bash", CLOUD / "setup.sh"], cwd=tmp_path, env=account, check=True)
    install = "pip install --python .venv/bin/python -r requirements.txt"
    assert (tmp_path / "asked").read_text().splitlines() == ["venv --python 3.11 .venv", install, install]


@contextmanager
def going(account: Mapping[str, str], name: str, **variables: str) -> Iterator[None]:
    """A script of cloud/ that stays; inside, it has started a node of Ray."""
    log = Path(account["HOME"], f"{name}.log")
    with log.open("w") as output:
        node = subprocess.Popen(
            ["bash", f"cloud/{name}"],
            cwd=ROOT,
            env={**account, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"the start of {name}", lambda: node.poll() is not None or STARTED in log.read_text())
        assert node.poll() is None, log.read_text()
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the scripts want the environment in .venv")
def test_the_scripts_start_a_head_that_a_node_joins(account):
    """And the page's own command sees them both."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 6379)) == 0:
            pytest.skip("somebody listens on Ray's port")
    sockets = tempfile.mkdtemp(prefix="ray-")  # their paths must be short
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": sockets}
    try:
        with going(account, "start_head.sh", **token, WANDB_API_KEY="key"):
            home = Path(account["HOME"])
            assert home.joinpath(".netrc").stat().st_mode & 0o077 == 0
            assert home.joinpath(".ray", "auth_token").stat().st_mode & 0o077 == 0
            address = home.joinpath("spotlight_head").read_text().strip()
            with going(account, "join.sh", **token, HEAD_ADDRESS=address):
                (status,) = re.findall(r"^RAY_AUTH_MODE=token ray status .*$", PAGE, re.M)
                ended = run_script(account, "bash", "-c", f"source .venv/bin/activate; {status}")
                assert len(re.findall(r"^ 1 node_\w+$", ended.stdout, re.M)) == 2, ended.stdout + ended.stderr
                stranger = {**account, "RAY_AUTH_TOKEN": "0" * 64}
                refused = run_script(stranger, "bash", "-c", f"source .venv/bin/activate; {status}")
                assert "InvalidAuthToken" in refused.stderr
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def test_the_labels_are_those_that_the_configuration_expects():
    cluster = yaml.safe_load((ROOT / "conf" / "cluster" / "ray.yaml").read_text(encoding="utf-8"))
    assert f'--labels="{cluster["label"]}={cluster["reserved"]}"' in script("start_head.sh")
    assert f'--labels="{cluster["label"]}={cluster["spot"]}"' in script("join.sh")


def test_skypilots_own_ray_is_left_alone():
    for path in CLOUD.glob("*.sh"):
        commands = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert not any("ray stop" in line or "6380" in line for line in commands)


def test_every_file_that_the_page_names_is_there():
    for path in set(re.findall(r"\b((?:cloud|tests|src|conf)/[\w/]+\.\w+)", PAGE)):
        assert (ROOT / path).is_file(), path
