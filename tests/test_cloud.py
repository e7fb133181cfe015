"""The files of cloud/: what SkyPilot will make of them, and what they say to one another."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    told = declared | {"RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "WANDB_API_KEY"}
    text = script("environment.sh") + "".join((ROOT / path).read_text() for path in scripts_of(name))
    assert set(re.findall(r"\$\{?([A-Z_]{4,})", text)) <= told


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
