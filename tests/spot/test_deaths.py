"""The end of another process is seen at once, by whoever may know it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from src.spot.deaths import ProcessId, on_death

pytestmark = pytest.mark.timeout(60)

OPEN = "/proc/self/fd"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that waits to be ended."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def known(process: subprocess.Popen[bytes]) -> ProcessId:
    return replace(ProcessId.own(), pid=process.pid)


def play(scene: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene(asyncio.Event())

    asyncio.run(run())


def test_a_death_is_told_once_and_leaves_nothing_open(process):
    async def scene(told: asyncio.Event) -> None:
        before = len(os.listdir(OPEN))
        times = []
        on_death(known(process), lambda: (times.append(1), told.set()))
        assert len(os.listdir(OPEN)) == before + 1
        await asyncio.sleep(0.05)
        assert not told.is_set()
        process.kill()  # nobody waits for it yet: it is a zombie
        await asyncio.wait_for(told.wait(), 10)
        await asyncio.sleep(0.05)
        assert times == [1]
        assert len(os.listdir(OPEN)) == before

    play(scene)


def test_who_has_ended_already_is_told_too(process):
    process.kill()
    process.wait()

    async def scene(told: asyncio.Event) -> None:
        on_death(known(process), told.set)
        await asyncio.wait_for(told.wait(), 10)

    play(scene)


def test_a_number_of_another_machine_means_nobody_here(process):
    async def scene(told: asyncio.Event) -> None:
        on_death(replace(known(process), space="another"), told.set)
        process.kill()
        process.wait()
        await asyncio.sleep(0.2)
        assert not told.is_set()

    play(scene)
