"""The engine of a process whose sequences are shared with others that come and go (`core.protocols.TeamEngine`).

Model and weights stay; a generation brings a group, and with it a place among the tokens and heads. What the leader
tells the others travels over the group, so that its death is noticed at once, like any other member's:

    announce  a header with the number of bytes that follow, and these      remind, release  a header alone
    serve     before each step and once after the last one whether to stop there

Followers wait in a collective for the leader. So the group's timeout is longer than anything that a member does between
two collectives: loading weights, decoding, scoring. Frozen members are found by their heartbeats, and killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from src.core.protocols import Engine, OnStep, never, unwatched
from src.core.types import Commit, Generation, PolicyVersion, SampleRequest, SampleResult, WorkReport
from src.parallel.group import ElasticGroup, connect_store
from src.parallel.shared import EngineOfGroup, Part
from src.parallel.ulysses import SequenceGroup

PATIENCE_S = 60.0
ARRIVAL_S = 10.0
"""Who belongs to a generation has left the one before, or waits: it comes at once, or has died."""

_NOTHING, _END = 0, -1
"""Headers that nothing follows."""


class Shareable(Engine, Protocol):
    """An engine whose fingerprint tells how many processes share its sequences."""

    def share(self, sp_degree: int) -> None:
        """From now on so many do."""


class ElasticEngine(EngineOfGroup):
    """See the top of this module.

    Args:
        engine: this process's.
        sequence: whom its model shares sequences with; to be used by nobody else.
        device: of the model.
        patience_s, arrival_s: how long a collective may take, and the others' arrival in a new group.
    """

    def __init__(
        self,
        *,
        engine: Shareable,
        sequence: SequenceGroup,
        device: torch.device,
        patience_s: float = PATIENCE_S,
        arrival_s: float = ARRIVAL_S,
    ) -> None:
        super().__init__(engine)
        self.patience_s = patience_s
        self._arrival_s = arrival_s
        self._shareable = engine
        self._sequence = sequence
        self._device = device
        self._group: ElasticGroup | None = None
        self._store: Store | None = None

    def form(
        self,
        team: str,
        generation: Generation,
        rank: int,
        *,
        store_port: int,
        is_over: Callable[[], bool] = never,
    ) -> None:
        size = len(generation.members)
        if size > 1:
            store = self._store or connect_store("127.0.0.1", store_port)
            self._store = None  # unless all comes well: a group that does not form may wait on it for a while
            self._group = ElasticGroup(
                store,
                name=team,
                generation=generation.number,
                rank=rank,
                size=size,
                timeout_s=self.patience_s,
                arrival_s=self._arrival_s,
                is_over=is_over,
                device=self._device,
            )
            self._store = store
        self._sequence.enter(self._group)
        self._shareable.share(size)

    def drop(self) -> None:
        if self._group is not None:
            self._group.drop()
        self._group = None
        self._sequence.enter(None)
        self._shareable.share(1)

    def announce(self, requests: Sequence[SampleRequest], *, resume: Sequence[Commit] = ()) -> None:
        if self._group is not None:
            part = Part(tuple(requests), tuple(resume)).pack()
            self._first(len(part))
            self._group.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(self._device))

    def remind(self) -> None:
        self._first(_NOTHING)

    def release(self) -> None:
        self._first(_END)

    def follow(self, prepare: Callable[[PolicyVersion], None]) -> None:
        assert self._group is not None, "who is alone leads"
        while (size := self._first(_END)) != _END:
            if size == _NOTHING:
                continue
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._group.broadcast(buffer)
            part = Part.unpack(buffer.cpu().numpy().tobytes())
            prepare(part.requests[0].key.policy)
            self.assist(part.requests, resume=part.resume)

    def _agreed(self, decide: Callable[[], bool]) -> Callable[[], bool]:
        """To be asked equally often by all members, who hear what the leader's `decide` says; true for good."""
        stopped = False

        def agreed() -> bool:
            nonlocal stopped
            leads = self._group is None or self._group.rank() == 0
            stopped = stopped or bool(self._first(leads and decide()))
            return stopped

        return agreed

    def _first(self, value: int) -> int:
        """The value of the leader."""
        if self._group is None:
            return value
        box = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._group.broadcast(box)
        return int(box.item())

    def serve(
        self,
        requests: Sequence[SampleRequest],
        worker: str,
        *,
        resume: Sequence[Commit] = (),
        commit_every: int = 0,
        on_step: OnStep = unwatched,
        should_yield: Callable[[], bool] = never,
    ) -> tuple[list[SampleResult], WorkReport]:
        return self._engine.serve(
            requests,
            worker,
            resume=resume,
            commit_every=commit_every,
            on_step=on_step,
            should_yield=self._agreed(should_yield),
        )

    def assist(
        self,
        requests: Sequence[SampleRequest],
        *,
        resume: Sequence[Commit] = (),
        should_yield: Callable[[], bool] = never,
    ) -> None:
        self._engine.assist(requests, resume=resume, should_yield=self._agreed(should_yield))
