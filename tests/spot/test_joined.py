"""What a Ray cluster must have before a job joins it. Jobs on a real one: tests/app/test_ray_cluster.py."""

from __future__ import annotations

import os
import time

import pytest

from src.app.processes import free_port
from src.spot.session import BEYOND_LOOPBACK, ClusterError


def joined(address: str = "auto", timeout_s: float = 0.1):
    from src.spot.joined import JoinedRay

    return JoinedRay(
        address=address,
        label="tier",
        reserved="reserved",
        spot="spot",
        timeout_s=timeout_s,
        grace_s=30.0,
        gpus_per_worker=0,
    )


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """No token anywhere."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_without_a_token_it_is_not_even_asked(homeless):
    with pytest.raises(ClusterError, match=r"there is no token for it in RAY_AUTH_TOKEN, .*\.ray/auth_token"):
        joined().check()


@pytest.mark.parametrize("where", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "home"])
def test_the_token_is_where_ray_looks_for_it_and_is_not_handed_on(homeless, monkeypatch, where):
    file = homeless / (".ray/auth_token" if where == "home" else "token")
    file.parent.mkdir(exist_ok=True)
    file.write_text("secret")
    if where != "home":
        monkeypatch.setenv(where, "secret" if where == "RAY_AUTH_TOKEN" else str(file))
    assert joined().check() == {BEYOND_LOOPBACK: "1"}


def test_where_nobody_listens_it_gives_up_in_time(monkeypatch, tmp_path):
    from src.spot.session import ray

    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)  # to be as it was in the end
    started_s = time.monotonic()
    with pytest.raises(ClusterError, match=r"no Ray cluster is reached there within 1\.5 s"):
        joined(f"127.0.0.2:{free_port()}", timeout_s=1.5).start(tmp_path, {})
    assert 1.5 <= time.monotonic() - started_s < 6


def test_a_job_of_its_own_has_a_token_of_its_own(monkeypatch):
    from src.spot.session import OwnRay

    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    settings = OwnRay().check()
    assert len(settings["RAY_AUTH_TOKEN"]) == 64
    assert settings[BEYOND_LOOPBACK] == "0"
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_workers_with_a_gpu_each_get_those_that_the_ranks_leave(monkeypatch):
    from src.spot.session import OwnRay

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    ray = OwnRay(reserved_gpus=1, spot_gpus=2)
    assert ray._left() == ["5", "6", "7"]
    assert ray.place("local").options == {"num_gpus": 1}
    assert ray.place(None).options == {}
    with pytest.raises(ClusterError, match=r"3 \+ 2 GPUs are needed, there are 4"):
        OwnRay(reserved_gpus=3, spot_gpus=2)._left()
