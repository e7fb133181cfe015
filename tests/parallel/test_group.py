"""Groups that re-form after a kill: real processes, short waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from src.parallel.group import ElasticGroup, GroupLost, connect_store, serve_store

CPU = torch.device("cpu")
WAIT_S = 30.0


def member(pipe: Connection, port: int) -> None:
    """Forms a group for every (generation, rank, size) that it is told, and sums ones until the group breaks."""
    torch.set_num_threads(1)
    store = connect_store("127.0.0.1", port)
    pipe.send(("ready", time.monotonic()))
    while True:
        generation, rank, size, timeout_s = pipe.recv()
        try:
            group = ElasticGroup(
                store, name="test", generation=generation, rank=rank, size=size, timeout_s=timeout_s, device=CPU
            )
            total = torch.ones(1000)
            group.sum(total)
            pipe.send(("formed", time.monotonic(), total[0].item()))
            while True:
                group.sum(torch.ones(1000))
        except GroupLost:
            pipe.send(("lost", time.monotonic()))


Members = list[tuple[Any, Connection]]


@pytest.fixture
def members() -> Iterator[Callable[[int], Members]]:
    """Starts members of a group; they are killed at the end."""
    store, context, started = serve_store(), multiprocessing.get_context("spawn"), []

    def start(count: int) -> Members:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(theirs, store.port), daemon=True)
            process.start()
            started.append((process, ours))
        for _, pipe in started:
            assert told(pipe)[0] == "ready"
        return list(started)

    yield start
    for process, _ in started:
        process.kill()
        process.join()


def told(pipe: Connection) -> tuple[Any, ...]:
    assert pipe.poll(WAIT_S), "a member is silent"
    answer: tuple[Any, ...] = pipe.recv()
    return answer


def form(members: Members, generation: int, timeout_s: float = 10.0) -> float:
    """Forms a group of all of them; returns when the last one's first collective was done."""
    for rank, (_, pipe) in enumerate(members):
        pipe.send((generation, rank, len(members), timeout_s))
    answers = [told(pipe) for _, pipe in members]
    assert [answer[0] for answer in answers] == ["formed"] * len(members)
    assert [answer[2] for answer in answers] == [len(members)] * len(members)
    return max(answer[1] for answer in answers)


@pytest.mark.timeout(90)
def test_survivors_of_kills_form_the_next_generations(members: Callable[[int], Members]):
    alive = members(4)
    form(alive, 0)
    for generation in (1, 2):
        victim, _ = alive.pop(1)
        time.sleep(0.1)
        killed_s = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        for _, pipe in alive:
            kind, lost_s = told(pipe)
            assert kind == "lost"
            assert lost_s - killed_s < 5.0, "noticed by the error, not by the timeout of 10 s"
        assert form(alive, generation) - killed_s < 5.0


@pytest.mark.timeout(90)
def test_a_frozen_member_costs_the_timeout(members: Callable[[int], Members]):
    alive = members(3)
    form(alive, 0, timeout_s=1.0)
    frozen, _ = alive.pop(0)
    frozen_s = time.monotonic()
    os.kill(frozen.pid, signal.SIGSTOP)
    for _, pipe in alive:
        assert told(pipe)[0] == "lost"
    assert 0.5 < time.monotonic() - frozen_s < 10.0
    form(alive, 1)


def test_who_waits_for_members_that_never_come_gives_up():
    with pytest.raises(GroupLost, match="generation 0, rank 0 of 2"):
        ElasticGroup(serve_store(), name="test", generation=0, rank=0, size=2, timeout_s=0.2, device=CPU)


def test_who_hears_that_a_member_will_not_come_waits_no_longer():
    store, asked = serve_store(), iter([False, True])
    began_s = time.monotonic()
    with pytest.raises(GroupLost, match="somebody will not come"):
        ElasticGroup(
            connect_store("127.0.0.1", store.port),
            name="test",
            generation=0,
            rank=0,
            size=2,
            timeout_s=20.0,
            is_over=lambda: next(asked),
            device=CPU,
        )
    assert time.monotonic() - began_s < 10.0
    assert next(asked, None) is None


def test_a_dropped_group_says_so():
    group = ElasticGroup(serve_store(), name="test", generation=3, rank=0, size=1, timeout_s=5.0, device=CPU)
    group.sum(torch.ones(1))
    group.drop()
    group.drop()
    with pytest.raises(GroupLost, match="generation 3 was dropped"):
        group.sum(torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rank": 2}, r"rank must be in 0\.\.1, got 2"), ({"timeout_s": 0.0}, "timeout_s must be positive, got 0")],
)
def test_settings_are_checked(changes: dict[str, Any], message: str):
    arguments = {"name": "test", "generation": 0, "rank": 0, "size": 2, "timeout_s": 1.0, "device": CPU, **changes}
    with pytest.raises(ValueError, match=message):
        ElasticGroup(serve_store(), **arguments)
