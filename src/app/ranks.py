"""The processes of the training ranks, as the job's parent process sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.app.config import ConfigError, RunPlan
from src.app.errors import JobFailed
from src.app.processes import BAD_INPUT, DONE, LEFT, LOST, free_port
from src.spot import market as mk
from src.spot.fleet import Fleet
from src.spot.members import rank_member
from src.spot.session import sigterm_blocked

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All ranks are on this machine; left to themselves, gloo and NCCL listen on the interface of its host name."""

NCCL_REPORTS = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Has NCCL report an error where it happens: so no step follows a reduction that failed."""


class Ranks:
    """The processes of the training ranks, each in a session of its own, so that Ctrl-C reaches the parent only.

    They find their place in the environment variables that `torchrun` sets too. What they log goes to rank.log and
    rank1.log, rank2.log, ... in the run folder; one line on standard output tells why one failed. Then all end.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._world: int = plan.config["trainer"]["devices"]
        self._processes: list[subprocess.Popen[str]] = []
        self._codes: list[int | None] = []
        """Exit codes when they were last looked at: later ones may be of our own killing."""

    def __enter__(self) -> Ranks:
        port = free_port()
        for rank in range(self._plan.config["trainer"]["devices"]):
            self._processes.append(self._spawn(rank, port))
        return self

    def _spawn(self, rank: int, port: int) -> subprocess.Popen[str]:
        """Starts a process in the place of this rank."""
        threads = self._plan.config["parallel"]["threads"]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._world)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **LOOPBACK_ONLY}
        # A SIGTERM to all processes at once is for the parent, or waited for: Lightning would end the rank unsaved.
        with self._log(rank).open("a", encoding="utf-8") as log, sigterm_blocked():
            return subprocess.Popen(
                [sys.executable, "-m", "src.app.rank", str(self._plan.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**self._environment(), **place, **meeting, "OMP_NUM_THREADS": str(threads)},
            )

    def _environment(self) -> dict[str, str]:
        # Lightning would take what torchrun says of its processes for what is true of ours.
        return {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with process:  # waits, and closes its pipes
                pass

    def send_start(self, address: str) -> None:
        """Tells the ranks where Ray is, and from which checkpoint to go on."""
        for process in self._processes:
            self._send(process, address)

    def _send(self, process: subprocess.Popen[str], address: str, **more: Any) -> None:
        start = {"address": address, "resume": str(self._plan.resume) if self._plan.resume else None, **more}
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended already: its exit code tells why
            process.stdin.write(json.dumps(start) + "\n")

    def running(self) -> bool:
        """Whether some rank still trains, and none has failed."""
        self._codes = [process.poll() for process in self._processes]
        return None in self._codes and all(code in (None, DONE) for code in self._codes)

    def failure(self) -> Exception | None:
        """Why the job failed. Ranks that wait for a dead one fail too: the likeliest cause of all is told."""
        failed = [(rank, code) for rank, code in enumerate(self._codes) if code]
        if not failed:
            return None
        rank, code = min(failed, key=lambda each: (each[1] != BAD_INPUT, each[1] >= 0, each[0]))
        return self._failure(rank, self._processes[rank], code)

    def _failure(self, rank: int, process: subprocess.Popen[str], code: int) -> Exception:
        """What the user is told of a rank that ended with this code."""
        assert process.stdout is not None
        said = process.stdout.read().strip() or "it said nothing"
        if code == BAD_INPUT:
            return ConfigError(said)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed: {said}"
        name = "the training rank" if self._world == 1 else f"training rank {rank}"
        return JobFailed(f"{name} {how} (see {self._log(rank)}); go on with: {self._plan.resume_hint}")

    def _log(self, rank: int) -> Path:
        return self._plan.folder / f"rank{rank or ''}.log"


@dataclass
class _Place:
    """Where a rank runs: its GPU and log."""

    rank: int
    process: subprocess.Popen[str]
    number: int
    """Of the process: no two of a job share one."""
    spot: tuple[str, int] | None = None
    """Spot node and slot; None on a reserved GPU."""
    restarts: int = 0
    code: int | None = None
    """With which the last process in this place ended."""
    frozen: bool = False

    def is_on(self, node: str) -> bool:
        return self.spot is not None and self.spot[0] == node


class ElasticRanks(Ranks):
    """Ranks that may end while the others go on. The coordinator is told at once, and another one takes the place.

    The job has failed when no rank is left, or none that knows how far the training was.

    On spot nodes ranks come and go as the nodes do: at a notice they are told to leave, and they do at the end of the
    iteration if that comes before they are killed.

    Args:
        fleet: knows the coordinator, which ranks are frozen, and what becomes of spot nodes.
        spot: node and slot of each rank on a spot node, in the order of ranks; reserved ones come first.
    """

    def __init__(self, plan: RunPlan, fleet: Fleet, spot: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(plan)
        self._spot = dict(enumerate(spot, start=self._world))
        self._next = self._world
        self._world += len(spot)
        self._fleet = fleet
        self._restarts = plan.config["parallel"]["restarts"]
        self._places: list[_Place] = []
        self._failures: list[tuple[int, subprocess.Popen[str], int]] = []
        self._there: set[str] = set()
        """Spot nodes that are not about to go."""
        self._address = ""

    def send_start(self, address: str) -> None:
        self._address = address
        self._places = [_Place(rank, process, rank) for rank, process in enumerate(self._processes)]
        for place in self._places:
            self._tell(place, joins=False)

    def running(self) -> bool:
        """Looks after the ranks; whether some still train."""
        while self._fleet.frozen:
            self._end_frozen(self._fleet.frozen.popleft())
        while self._fleet.moves:
            self._follow(self._fleet.moves.popleft())
        for place in self._places:
            if place.code is None and (code := place.process.poll()) is not None:
                self._ended(place, code)
        codes = [place.code for place in self._places if place.spot is None or not self._is_finished]
        return None in codes and not {BAD_INPUT, LOST} & {*codes}

    @property
    def _is_finished(self) -> bool:
        """Whether the training is over: who has not come in yet will not be needed."""
        return any(place.code == DONE for place in self._places)

    def failure(self) -> Exception | None:
        if self._is_finished:
            return None
        if not self._failures:
            return JobFailed(f"all training ranks were told to leave; go on with: {self._plan.resume_hint}")
        # Those that found nobody are a consequence; before them, the last one to fail was the last that was left.
        refused = [each for each in self._failures if each[2] == BAD_INPUT]
        rank, process, code = [*self._failures[:1], *(each for each in self._failures if each[2] != LOST), *refused][-1]
        return self._failure(rank, process, code)

    def _end_frozen(self, worker: str) -> None:
        for place in self._places:
            if place.code is None and self._name(place) == worker:
                place.frozen = True
                place.process.kill()

    def _follow(self, action: mk.Action) -> None:
        """Does to the ranks of a spot node what the market does to it."""
        match action:
            case mk.Return(node):
                self._there.add(node)
                if not self._is_finished:
                    self._places = [place for place in self._places if not place.is_on(node)]
                    self._occupy(node)
            case mk.Notice(node, grace_s):
                self._there.discard(node)
                for place in self._on(node):
                    self._fleet.notice(self._name(place), grace_s)
                    place.process.send_signal(signal.SIGTERM)
            case mk.Kill(node):
                self._there.discard(node)
                for place in self._on(node):
                    place.process.kill()
                    self._ended(place, place.process.wait())

    def _occupy(self, node: str) -> None:
        """Starts the ranks of a spot node."""
        for rank, spot in self._spot.items():
            if spot[0] == node:
                self._places.append(place := _Place(rank, self._spawn(rank, 0), self._number(), spot))
                self._processes.append(place.process)
                self._tell(place, joins=True)

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _on(self, node: str) -> list[_Place]:
        """Ranks on a spot node that run."""
        return [place for place in self._places if place.is_on(node) and place.code is None]

    def _ended(self, place: _Place, code: int) -> None:
        """Tells the coordinator, and starts another process in the place if there is to be one."""
        place.code = code
        left = code in (DONE, LEFT) and not place.frozen
        reason = "left" if left else "frozen" if place.frozen else "killed" if code < 0 else "failed"
        gone = place.spot is not None and place.spot[0] not in self._there
        over = left or gone or self._is_finished or code in (BAD_INPUT, LOST)
        again = not over and place.restarts < self._restarts
        self._fleet.leave(self._name(place), reason)
        self._fleet.record("rank_ended", rank=place.rank, worker=self._name(place), reason=reason, restarts=again)
        if left or gone:
            self._processes.remove(place.process)
            with place.process:  # closes its pipes: a market may bring any number of them
                pass
        else:
            self._failures.append((place.rank, place.process, code))
        if again:
            self._replace(place)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **NCCL_REPORTS}

    def _replace(self, place: _Place) -> None:
        place.process, place.number, place.code, place.frozen = self._spawn(place.rank, 0), self._number(), None, False
        place.restarts += 1
        self._processes.append(place.process)
        self._tell(place, joins=True)

    def _tell(self, place: _Place, *, joins: bool) -> None:
        self._send(place.process, self._address, number=place.number, spot=place.spot, joins=joins)
        node = place.spot[0] if place.spot else None
        self._fleet.record("rank_started", rank=place.rank, worker=self._name(place), node=node)

    def _name(self, place: _Place) -> str:
        return rank_member(place.number, self._fleet.incarnation, place.spot).name
