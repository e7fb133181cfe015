"""Weights that come from the coordinator instead of from a folder."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from src.core.folders import FolderError
from src.core.types import Member, RequestKind
from src.spot import weights
from src.spot.worker import Worker
from tests.spot.conftest import make_engine
from tests.spot.fakes import FakeEngine, saves
from tests.spot.test_worker import V0, V1, Script, lease


def test_a_fetched_policy_is_what_was_published_and_leaves_nothing_behind(run):
    from src.spot.transfer import fetched

    policy = run.publish()
    original = run.folder / "weights" / str(policy)
    with fetched(run.fleet.host, policy) as published:
        assert published.version == policy
        assert published.folder != original
        assert {path.name: path.read_bytes() for path in published.folder.iterdir()} == {
            path.name: path.read_bytes() for path in original.iterdir()
        }
        assert published.checksum == f"w{policy}"
    assert not published.folder.parent.exists()


def test_a_policy_that_is_not_there_is_an_error_at_the_worker(run):
    from src.spot.transfer import fetched

    newest = run.publish()
    absent = type(newest)(newest.incarnation, newest.iteration + 1)
    with pytest.raises(FileNotFoundError), fetched(run.fleet.host, absent):
        pass


def test_files_are_put_once_and_dropped_with_their_version(run, tmp_path):
    from src.spot.session import ray
    from src.spot.transfer import Shelf

    for version in (V0, V1):
        weights.publish(tmp_path, version, saves(str(version)))
    shelf = Shelf()
    files = shelf.files(tmp_path, V0)
    assert bytes(ray.get(files["weights.txt"])) == b"0.0"
    weights.remove(tmp_path, [V0])
    assert shelf.files(tmp_path, V0) is files
    shelf.drop([V0, V1])
    with pytest.raises(FileNotFoundError):
        shelf.files(tmp_path, V0)


def test_what_was_altered_on_the_way_is_not_loaded(run, tmp_path):
    from src.spot.session import ray
    from src.spot.transfer import Shelf, fetched

    weights.publish(tmp_path, V0, saves("abc"))

    class Altering:
        """A coordinator whose files do not arrive as they were sent."""

        @property
        def weights(self):
            return self

        def remote(self, version):
            files = Shelf().files(tmp_path, version)
            return ray.put({**files, "weights.txt": ray.put(np.frombuffer(b"abd", np.uint8))})

    with (
        pytest.raises(FolderError, match=r"weights\.txt is truncated or altered"),
        fetched(Altering(), V0) as published,
    ):
        weights.load(published, FakeEngine())


def test_a_worker_on_another_machine_loads_what_it_fetched(run, tmp_path):
    from src.spot.transfer import fetched

    policy = run.publish()
    transport = Script(tmp_path / "nothing is here", [lease(0, policy, 5)])
    engine = make_engine(lease_s=0.0)
    Worker(member=Member("n", 0), engine=engine, transport=transport, fetch=partial(fetched, run.fleet.host)).run()
    assert engine.weights == f"w{policy}"
    assert [key.kind for key in engine.served] == [RequestKind.EXPLORE]
