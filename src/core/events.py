"""The event log of a run: append-only JSON lines, each an object of `time_s`, `kind` and the event's fields.

Everything that a report, a cost or a replay needs can be recomputed from it. Kinds and fields:

    run_started      run, incarnation, iteration, start_wall_s     (iteration: where a resumed run goes on)
    node_came        node, gpus, machine           (a spot node is paid for from now on, while it starts as well;
                     its address, if it is a machine of its own)
    node_went        node
    worker_joined    worker, role, node, slot, gpus, pid, incarnation, fingerprint, batch_size
                     (of those that share sequences the leader, once for each generation of the group)
    notice           worker, grace_s, requests             (it will be gone so soon; how many requests it holds)
    worker_lost      worker, reason (preempted | killed | frozen | failed | left), requests     (how many it held)
                     (preempted: it was under notice, however it ended then; left: or its group changes)
    regrouped        team, generation, members, stayed, regroup_s
                     (an elastic group; the first `stayed` members were in it before; regroup_s since that one ended)
    rank_started     rank, worker, node     (a process of an elastic job; node: the spot node that it is on, or null)
    rank_ended       rank, worker, reason (killed | failed | frozen | left), restarts
                     (a training rank of an elastic job; restarts: whether another one takes its place)
    rank_recovered   generation, operation, world, sp_degree, form_s, engine_s, resume_s, checksum
                     (the ranks go on: groups are formed, engines made anew, the operation that was interrupted is done;
                     resume_s since its error was seen; checksum of weights and optimizer, equal on all ranks)
    worker_failed    worker, error                                 (its own fault; the next one is started)
    policy_published version, checksum, bytes, publish_s
    submitted        request_kind, iteration, count
    lease_granted    lease, worker, request_kind, iteration, count, version
                     start_s in the first lease of a worker: since it was wanted (its place became free or came back)
    lease_resumed    lease, worker, request_kind, iteration, count, step, after: [lease, ...]
                     (follows lease_granted: it goes on before denoising step `step`, with what those leases committed)
    lease_done       lease, worker, request_kind, iteration, count, steps, denoise_s, decode_s, score_s
    lease_lost       lease, worker, request_kind, iteration, count, reason, committed_steps, lost_steps
                     (denoising steps, sample x step, of this lease that were kept and that must be repeated; reasons
                     are those of worker_lost, `deadline`, `given back` without a notice, and `dropped`: nobody waited
                     for it any more)
    results_accepted worker, request_kind, iteration, results: [[instance, seed, reward], ...]    (as they come)
    result_rejected  worker, request_kind, iteration, instance, seed, reason
    request_failed   request_kind, iteration, instance, seed, attempts, error
    closed           request_kind, iteration, accepted, dropped
    wait_given_up    request_kind, iteration, missing     (no worker is left, or to come, who could make the rest)
    exploration_opened  iteration, version, prompts, keep, steps, previews, reserved_usd_per_hour, spot_usd_per_hour
                     (the planner may ask for seeds of this batch; prices of all training GPUs and of one worker)
    explore_asked    iteration, seeds: [[instance, count, steps], ...]      (the next candidates of each prompt)
    explore_stopped  iteration, reason                     (nothing more is asked for, unless workers come or go)
    exploration_closed  iteration, asked, came
    explored         iteration, version, results: [{instance, seed, reward, digest}]   (to choose from)
    kept             iteration, seeds: {instance: [seed, ...]}
    audited          iteration, pairs: [{instance, seed, stale, fresh}]
    phase_started    name, iteration                                     (what the trainer does)
    phase            name, iteration, start_s, end_s                     (what it did)
    spot_trained     iteration, nodes: [node, ...], gpus, start_s, end_s, lost
                     (an update in which spot nodes took part; lost: one of them went, and it is made again without. Of
                     real ranks: a part of the train phase, as long as the ranks were the same)
    evaluated        iteration, reward, judge, images: rows of images/manifest.json
    checkpoint_saved iteration, path, bytes, save_s
    stop_requested   signal
    run_ended        status, iteration
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from src.core.types import Explored, ExploredByInstance

Event = Mapping[str, Any]

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class JsonLines:
    """Appends objects to a JSON-lines file, each flushed at once.

    A last line that a killed writer left without its newline is cut off first. Floats read back exactly. JSON has
    no NaN and no infinity: fields with such a value are left out, as if they had not been measured.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        _cut_torn_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> None:
        known = {name: value for name, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
        self._file.write(_ENCODER.encode(known) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line without newline is not written yet, or torn, and left out.

    Raises ValueError naming file and line for anything else that is not a JSON object.
    """
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: not a JSON object: {line.strip()}")
            yield row


def explored_rows(explored: ExploredByInstance) -> list[dict[str, Any]]:
    """The `results` field of an `explored` event, by prompt position."""
    return [
        {"instance": instance, "seed": seed.seed, "reward": seed.reward, "digest": seed.digest}
        for instance in sorted(explored)
        for seed in explored[instance]
    ]


def read_explored_rows(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Explored]]:
    """The inverse of `explored_rows`."""
    explored: dict[int, list[Explored]] = {}
    for row in rows:
        seed = Explored(seed=row["seed"], reward=row["reward"], digest=row["digest"])
        explored.setdefault(row["instance"], []).append(seed)
    return explored


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)  # in place: a kill in the middle of this must not cost the log
