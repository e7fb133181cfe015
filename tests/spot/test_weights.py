from __future__ import annotations

import json

import pytest

from src.core.types import PolicyVersion
from src.spot import weights
from tests.spot.fakes import FakeEngine, saves

V0, V1, RESTARTED = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(1, 1)


def test_published_weights_read_back(tmp_path):
    published = weights.publish(tmp_path, V0, saves("abc"))
    assert published == weights.Published(V0, tmp_path / "0.0", "abc", bytes=3)
    assert weights.verify(tmp_path, V0) == published
    assert sorted(path.name for path in published.folder.iterdir()) == ["manifest.json", "weights.txt"]
    assert json.loads((published.folder / "manifest.json").read_text()) == {
        "version": "0.0",
        "checksum": "abc",
        "files": {"weights.txt": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    }


def test_versions_never_go_backwards(tmp_path):
    weights.publish(tmp_path, V0, saves("a"))
    weights.publish(tmp_path, RESTARTED, saves("c"))
    for version in (V0, V1, RESTARTED):
        with pytest.raises(ValueError, match=r"not newer than the published 1\.1"):
            weights.publish(tmp_path, version, saves("b"))
    assert weights.versions(tmp_path) == [V0, RESTARTED]


def test_a_publication_that_fails_half_way_is_not_seen_and_can_be_repeated(tmp_path):
    def fails(folder):
        (folder / "weights.txt").write_text("half of i")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        weights.publish(tmp_path, V0, fails)
    assert weights.versions(tmp_path) == []
    with pytest.raises(ValueError, match=r"weights 0\.0 in .*manifest\.json does not exist"):
        weights.verify(tmp_path, V0)
    weights.publish(tmp_path, V0, saves("all of it"))
    assert [path.name for path in tmp_path.iterdir()] == ["0.0"]


def test_while_a_version_is_written_readers_see_the_older_ones_only(tmp_path):
    seen = []

    def looks(folder):
        seen.extend(weights.versions(tmp_path))
        return saves("b")(folder)

    weights.publish(tmp_path, V0, saves("a"))
    weights.publish(tmp_path, V1, looks)
    assert seen == [V0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "weights.txt").write_text("abd"),
            r"weights 0\.0 in .*/0\.0: weights\.txt is truncated or altered",
        ),
        (lambda folder: (folder / "weights.txt").write_text(""), r"weights\.txt is truncated or altered"),
        (lambda folder: (folder / "weights.txt").unlink(), r"weights\.txt is missing"),
        (lambda folder: (folder / "manifest.json").write_text('{"version"'), r"manifest\.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), r"manifest\.json is damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json does not exist"),
        (lambda folder: folder.rename(folder.parent / "0.1"), r"manifest\.json does not exist"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    damage(weights.publish(tmp_path, V0, saves("abc")).folder)
    with pytest.raises(ValueError, match=message):
        weights.verify(tmp_path, V0)
    with pytest.raises(ValueError, match=message):
        weights.load(weights.find(tmp_path, V0), FakeEngine())


def test_an_engine_that_holds_something_else_than_it_read_is_refused(tmp_path):
    published = weights.publish(tmp_path, V0, saves("abc"))

    class Wrong(FakeEngine):
        def load_weights(self, folder):
            return "abd"

    with pytest.raises(ValueError, match=r"weights 0\.0: the engine holds abd after loading .* but abc was published"):
        weights.load(published, Wrong())
    weights.load(published, FakeEngine())


def test_a_folder_under_another_versions_name_is_refused(tmp_path):
    weights.publish(tmp_path, V0, saves("abc")).folder.rename(tmp_path / "0.1")
    with pytest.raises(ValueError, match=r"say that they are version 0\.0"):
        weights.verify(tmp_path, V1)


def test_old_versions_are_removed_whole(tmp_path):
    for version in (V0, V1):
        weights.publish(tmp_path, version, saves("abc"))
    weights.remove(tmp_path, [V0, PolicyVersion(0, 9)])
    assert [path.name for path in tmp_path.iterdir()] == ["0.1"]
