"""The event log of a run: append-only JSON lines, one object each with `time_s`, `kind`, and the event's fields.

Everything that a report, a cost or a replay needs can be recomputed from it. Kinds and fields:

    run_started      run, incarnation, iteration, start_wall_s           (iteration: where a resumed run goes on)
    worker_joined    worker, role, node, slot, pid, incarnation, fingerprint
    worker_lost      worker, reason (killed | frozen | left), requests   (number of requests that were held)
    policy_published version, checksum, bytes, publish_s
    submitted        request_kind, iteration, count
    lease_granted    lease, worker, request_kind, iteration, count, version
    lease_done       lease, worker, request_kind, iteration, count, steps, denoise_s, decode_s, score_s
    lease_lost       lease, worker, request_kind, iteration, count, reason
    result_rejected  worker, request_kind, iteration, instance, seed, reason
    request_failed   request_kind, iteration, instance, seed, attempts, error
    closed           request_kind, iteration, accepted, dropped
    explored         iteration, version, results: [{instance, seed, reward, digest}]   (what counts for the choice)
    kept             iteration, seeds: {instance: [seed, ...]}
    audited          iteration, pairs: [{instance, seed, stale, fresh}]
    phase            name, iteration, start_s, end_s                     (what the trainer did)
    evaluated        iteration, reward, judge, images
    checkpoint_saved iteration, path, bytes, save_s
    stop_requested   signal
    run_ended        status, iteration
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

Event = Mapping[str, Any]


class JsonLines:
    """Appends objects to a JSON-lines file, each flushed at once. A torn last line of a killed writer is cut off."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        _cut_torn_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":"), allow_nan=True) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; a torn last line (a writer was killed) is left out.

    Raises ValueError naming file and line for anything else that is not JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])
