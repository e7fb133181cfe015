"""Reads the event log of a run while it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Follower:
    """Hands out each event once. A line that is not finished yet waits for the next call."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._offset = 0

    def fresh(self) -> list[dict[str, Any]]:
        """What was logged since the last call."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in data[:whole].splitlines()]
