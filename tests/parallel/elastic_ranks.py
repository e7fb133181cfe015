"""Training ranks that die, freeze and join, without Ray and Lightning: real processes, groups and DeepSpeed engines.

The test process stands for launcher and coordinator: it watches the ranks, and a `Referee` decides by the product's own
rules who is in the next generation. Processes are kept between stories, since importing torch takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.managers import BaseManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from src.core.types import Generation
from src.parallel.elastic import ElasticWorld, Recovery
from src.parallel.group import connect_store, serve_store
from src.spot.teams import Teams

START_S = 280.0
ALARM = 0
"""In place of a signal: an error, as of a lost group, of a rank that lives on."""
HEARTBEAT_S, FROZEN_S = 0.1, 4.0


class Referee:
    """What the coordinator knows of one team, with waiting: one object that all ranks call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._teams = Teams(heartbeat_timeout_s=FROZEN_S)
        self.regroups = 0

    def found(self, members: list[str]) -> None:
        with self._changed:
            self._teams = Teams(heartbeat_timeout_s=FROZEN_S)
            self._teams.found("ranks", members, window_s=60.0, hold_state=True)
            self.regroups = 0

    def next(self, member: str, after: int) -> Generation | None:
        with self._changed:
            self._teams.enlist(time.monotonic(), "ranks", member)
            self._advance()
            ready = lambda: self._teams.generation(member, after) or self._teams.is_out(member)  # noqa: E731
            self._changed.wait_for(ready, 100.0)
            return self._teams.generation(member, after)

    def broken(self, member: str, generation: int) -> None:
        with self._changed:
            self._teams.broken(time.monotonic(), member, generation)
            self._advance()

    def boundary(self, member: str, generation: int, admits: bool) -> bool:
        with self._changed:
            leave = self._teams.boundary(time.monotonic(), member, generation, admits=admits)
            self._advance()
            return leave

    def heartbeat(self, member: str) -> None:
        with self._changed:
            self._teams.heartbeat(time.monotonic(), member)

    def notice(self, member: str) -> None:
        with self._changed:
            self._teams.notice(time.monotonic(), member)

    def dead(self, member: str) -> None:
        with self._changed:
            self._teams.dead(time.monotonic(), member)
            self._advance()

    def silence(self) -> list[str]:
        with self._changed:
            return self._teams.silence(time.monotonic())

    def _advance(self) -> None:
        if formed := self._teams.advance(time.monotonic()):
            self.regroups += len(formed)
            self._changed.notify_all()


class Office(BaseManager):
    """Lets other processes call the referee."""


@dataclass(frozen=True)
class _Team:
    referee: Any
    member: str

    def next(self, after: int) -> Generation | None:
        generation: Generation | None = self.referee.next(self.member, after)
        return generation

    def broken(self, generation: int) -> None:
        self.referee.broken(self.member, generation)

    def boundary(self, generation: int, *, admits: bool = True) -> bool:
        return bool(self.referee.boundary(self.member, generation, admits))


@dataclass(frozen=True)
class Fault:
    """What happens to one rank: a signal to itself, at a point of an update."""

    rank: int
    update: int
    point: str
    signal: int = signal.SIGKILL

    def strike(self) -> None:
        if self.signal == ALARM:
            raise RuntimeError("false alarm")
        os.kill(os.getpid(), self.signal)


@dataclass(frozen=True)
class Story:
    """What the ranks do, and what happens meanwhile."""

    world: int
    sp_degree: int
    updates: int
    faults: tuple[Fault, ...] = ()
    joins_at_s: tuple[float, ...] = ()
    """When processes join, in seconds after the first death."""
    lora: bool = False
    misfit: int | None = None
    """A rank that cannot be in a second generation."""
    folder: str = ""


class Stage:
    """Processes that play stories."""

    def __init__(self) -> None:
        self._referee = Referee()
        self._store = serve_store()
        Office.register("referee", callable=lambda: self._referee)
        office = Office(("127.0.0.1", 0), authkey=b"tests")
        server = office.get_server()
        self._address = server.address
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._context = multiprocessing.get_context("forkserver")  # imports once, for all ranks that will be needed
        self._context.set_forkserver_preload(["tests.parallel.preload"])
        self._idle: list[tuple[Any, Connection]] = []
        self._played = 0

    def warm(self, count: int) -> None:
        """Has so many processes ready."""
        while len(self._idle) < count:
            ours, theirs = self._context.Pipe()
            arguments = (theirs, self._store.port, self._address)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._idle.append((process, ours))
        for _, pipe in self._idle:
            pipe.send("ready?")
            assert pipe.poll(START_S), "a rank did not start"
            pipe.recv()

    def play(self, story: Story, program: Callable[..., Any], *, timeout_s: float) -> dict[int, Any]:
        """What the program returned on each rank that came to its end, by number; who joins has numbers from `world`.

        Raises TimeoutError if the end does not come in time, and AssertionError with the traceback of a rank that fails
        by itself.
        """
        self.warm(story.world + len(story.joins_at_s))
        self._played += 1
        self._referee.found([f"r{number}" for number in range(story.world)])
        playing: dict[int, tuple[Any, Connection]] = {}
        results: dict[int, Any] = {}
        try:
            for number in range(story.world):
                self._send(playing, number, story, program, joins=False)
            deadline, died_s, joined = time.monotonic() + timeout_s, None, 0
            while playing:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{story}: ranks {sorted(playing)} did not end within {timeout_s} s")
                died = self._look(playing, results)
                died_s = time.monotonic() if died and died_s is None else died_s
                due = died_s is not None and joined < len(story.joins_at_s)
                if due and time.monotonic() - died_s > story.joins_at_s[joined]:
                    self._send(playing, story.world + joined, story, program, joins=True)
                    joined += 1
        finally:
            for process, _ in playing.values():
                process.kill()
        return results

    @property
    def regroups(self) -> int:
        return self._referee.regroups

    def close(self) -> None:
        for process, _ in self._idle:
            process.kill()

    def _send(self, playing: Any, number: int, story: Story, program: Any, *, joins: bool) -> None:
        playing[number] = self._idle.pop(0)
        playing[number][1].send((program, self._played, number, story, joins))

    def _look(self, playing: dict[int, tuple[Any, Connection]], results: dict[int, Any]) -> bool:
        """Waits a moment for ranks to end; returns whether one died."""
        died = False
        by_waitable = {
            thing: number for number, (process, pipe) in playing.items() for thing in (process.sentinel, pipe)
        }
        for thing in wait(list(by_waitable), timeout=0.02):
            number = by_waitable[thing]
            if number not in playing:
                continue
            process, pipe = playing[number]
            try:
                good, value = pipe.recv() if pipe.poll() else (None, None)
            except (EOFError, OSError):
                good = None
            if good is None and process.is_alive():
                process.join(0.5)
            playing.pop(number)
            if good is None:
                died = True
            else:
                assert good, value
                results[number] = value
                self._idle.append((process, pipe))
            self._referee.dead(f"r{number}")
        for member in self._referee.silence():
            number = int(member[1:])
            if number in playing:
                playing[number][0].kill()
        return died


def _serve(pipe: Connection, port: int, address: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    Office.register("referee")
    office = Office(address, authkey=b"tests")
    office.connect()
    referee = office.referee()  # type: ignore[attr-defined]
    store = connect_store("127.0.0.1", port)
    while True:
        message = pipe.recv()
        if message == "ready?":
            pipe.send("ready")
            continue
        program, played, number, story, joins = message
        ended = threading.Event()
        threading.Thread(target=_pulse, args=(referee, f"r{number}", ended), daemon=True).start()
        try:
            world = Watched(
                team=_Team(referee, f"r{number}"),
                member=f"r{number}",
                store=PrefixStore(f"story{played}", store),
                sp_degree=story.sp_degree,
                device="cpu",
                timeout_s=60.0,
                joins=joins,
            )
            outcome = (True, program(world, number, story, joins))
        except Exception:
            outcome = (False, f"rank {number}:\n{traceback.format_exc()}")
        ended.set()
        pipe.send(outcome)
        if dist.is_initialized():
            dist.destroy_process_group()


def _pulse(referee: Any, member: str, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_S):
        referee.heartbeat(member)


class Watched(ElasticWorld):
    """Keeps what is reported, on every rank."""

    def __init__(self, **arguments: Any) -> None:
        self.recoveries: list[dict[str, Any]] = []
        super().__init__(**arguments, report=self._keep)

    def _keep(self, recovery: Recovery) -> None:
        self.recoveries.append(asdict(recovery))
