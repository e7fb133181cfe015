"""What the leader of a group tells the others survives the way."""

from __future__ import annotations

import pytest

from src.core.types import (
    Blob,
    Commit,
    PolicyVersion,
    Prompt,
    RequestKey,
    RequestKind,
    SampleRequest,
    SampleSpec,
    Trajectory,
)
from src.parallel.shared import Part

SPEC = SampleSpec(7, (1, 4), 3.5)
KEY = RequestKey("run\n", 3, RequestKind.EXPLORE, 1, 2**62, PolicyVersion(1, 2, trained=False), 7)
PROMPT = Prompt(4, "a »sign«\n", {"target": "065", "boxes": [[0.1, 2]], "nothing": None})
BLOBS = [Blob("float32", (2, 3), bytes(range(24))), Blob("int8", (0,), b""), Blob("uint8", (1,), b"\n")]
COMMIT = Commit(KEY, 3, BLOBS[0], Trajectory(BLOBS[1], BLOBS[2], BLOBS[0], "cpu sp2"), "sum")


@pytest.mark.parametrize("resume", [(), (COMMIT, COMMIT)])
def test_what_is_unpacked_is_what_was_packed(resume: tuple[Commit, ...]):
    part = Part((SampleRequest(KEY, PROMPT, SPEC), SampleRequest(KEY, Prompt(0, ""), SampleSpec(1))), resume)
    unpacked = Part.unpack(part.pack())
    assert unpacked == part
    assert isinstance(unpacked.requests[0].key.kind, RequestKind)


def test_what_cannot_travel_is_refused():
    with pytest.raises(TypeError):
        Part((SampleRequest(KEY, Prompt(0, "", {"thing": object()}), SPEC),), ()).pack()
