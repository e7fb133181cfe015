"""Who waits for the coordinator is woken when there is something, without Ray."""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from src.core.events import read_jsonl
from src.core.protocols import GroupLost
from src.core.types import Generation, Member, PolicyVersion, RequestKind, SampleResult, WorkReport
from src.spot.coordinator import Coordinator
from src.spot.deaths import ProcessId
from src.spot.host import Host
from src.spot.members import Joined, Lost
from src.spot.scheduler import Scheduler
from tests.spot.fakes import requests

V0 = PolicyVersion(0, 0)
WAIT_S = 60.0
"""Longer than a test may take: whoever is not woken fails it."""


@pytest.fixture
def play(tmp_path):
    """Runs a scene with a host whose time passes; the scene may take 20 s."""

    def play(scene, **settings) -> list[dict[str, Any]]:
        async def run() -> None:
            host = Host()
            coordinator = Coordinator(run="run", folder=tmp_path, scheduler=Scheduler(**settings))
            await host.begin(lambda: coordinator)
            await host.publish(V0, "sum", 0, 0.0)
            time_passes = asyncio.create_task(host.run())
            await asyncio.wait_for(scene(host), 20)
            time_passes.cancel()
            with suppress(asyncio.CancelledError):
                await time_passes
            coordinator.shutdown()

        asyncio.run(run())
        return list(read_jsonl(tmp_path / "events.jsonl"))

    return play


async def join(host: Host, slot: int, *, watched: bool = False) -> str:
    member = Member("n", slot)
    await host.join(Joined(member, pid=1, batch_size=4, fingerprint="fake", watched=watched))
    return member.name


async def meanwhile(waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begins to wait."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0.05)
    assert not task.done()
    return task


explores = requests(RequestKind.EXPLORE, 6, policy=V0, iteration=1)
keys = [request.key for request in explores]


def test_results_end_the_wait(play):
    async def scene(host: Host) -> None:
        worker = await join(host, 0)
        await host.submit(explores[:4])
        lease = await host.pull(worker)
        waiting = await meanwhile(host.close(keys[:4], WAIT_S))
        made = [SampleResult(request.key, worker, "sum") for request in lease.requests]
        await host.push(worker, lease.id, made, WorkReport(0.0, 0.0, 0.0, 0))
        assert [result.key for result in await waiting] == keys[:4]

    assert not [event for event in play(scene) if event["kind"] == "wait_given_up"]


def test_a_request_that_fails_as_time_passes_ends_the_wait(play):
    """Its last lease is over, nobody else is lost or waits for work, and nobody says another word."""

    async def scene(host: Host) -> None:
        worker = await join(host, 0)
        await host.submit(explores[:1])
        assert await host.pull(worker)
        (result,) = await host.close(keys[:1], WAIT_S)
        assert result.error.startswith("given up after 1 leases")

    play(scene, lease_s=0.3, max_attempts=1, max_leases=1)


def test_nobody_waits_for_workers_that_will_never_come(play):
    async def scene(host: Host) -> None:
        worker = await join(host, 0)
        await host.staff(1)
        await host.submit(explores)
        lease = await host.pull(worker)
        made = [SampleResult(request.key, worker, "sum") for request in lease.requests]
        await host.push(worker, lease.id, made, WorkReport(0.0, 0.0, 0.0, 0))
        waiting = await meanwhile(host.close(keys, WAIT_S))
        await host.staff(0)
        await asyncio.sleep(0.05)
        assert not waiting.done(), "the last worker still lives"
        await host.leave(worker, "killed")
        assert [result.key for result in await waiting] == keys[:4]

    given_up = [event for event in play(scene) if event["kind"] == "wait_given_up"]
    assert [(e["request_kind"], e["iteration"], e["missing"]) for e in given_up] == [("explore", 1, 2)]


@pytest.mark.parametrize("staff", [None, 1])
def test_workers_that_are_still_to_come_are_waited_for(play, staff):
    async def scene(host: Host) -> None:
        if staff is not None:
            await host.staff(staff)
        await host.submit(explores)
        assert await host.close(keys, 0.6) == []

    events = play(scene)
    assert not [event for event in events if event["kind"] == "wait_given_up"]
    assert events[-1]["time_s"] >= 0.6


def test_who_does_not_wait_gives_nothing_up(play):
    async def scene(host: Host) -> None:
        await host.staff(0)
        await host.submit(explores)
        assert await host.close(keys, 0.0) == []

    assert not [event for event in play(scene) if event["kind"] == "wait_given_up"]


def test_members_of_a_team_are_told_of_their_next_generation(play):
    async def scene(host: Host) -> None:
        first = await host.next_generation("sp0", "a", 0)
        waiting = await meanwhile(host.next_generation("sp0", "b", 0))
        assert await host.boundary("a", first.number)
        back = await host.next_generation("sp0", "a", first.number)
        assert back == await waiting
        assert (back.members, back.stayed) == (("a", "b"), 1)
        assert not await host.boundary("a", back.number)
        await host.leave("b", "killed")  # a hears of it at its next boundary
        assert await host.boundary("a", back.number)
        assert (await host.next_generation("sp0", "a", back.number)).members == ("a",)

    events = [event for event in play(scene) if event["kind"] == "regrouped"]
    assert [event["members"] for event in events] == [["a"], ["a", "b"], ["a"]]


def test_who_does_not_report_an_error_is_out_when_the_window_closes(play):
    async def scene(host: Host) -> None:
        host._coordinator.teams.found("ranks", ["a", "b", "c"])
        await host.broken("c", 0)
        await host.broken("a", 0)
        assert (await host.next_generation("ranks", "a", 0)).members == ("a", "c")
        again = await meanwhile(host.next_generation("ranks", "b", 0))  # it waits for the next boundary
        assert await host.boundary("a", 1)
        assert (await again).members == ("a", "c", "b")

    (first, _) = (event for event in play(scene) if event["kind"] == "regrouped")
    assert 0.05 <= first["regroup_s"] < 1.0


def test_who_has_died_on_this_machine_is_not_waited_for(play):
    """The fleet tells why it ended later, and that changes nothing."""

    async def scene(host: Host) -> None:
        host._coordinator.teams.found("ranks", ["a", "b"], window_s=WAIT_S, hold_state=True)
        with subprocess.Popen(["sleep", "1000"]) as process:
            await host.watch("b", replace(ProcessId.own(), pid=process.pid))
            await host.broken("a", 0)
            going_on = await meanwhile(host.next_generation("ranks", "a", 0))
            process.kill()
            assert (await going_on).members == ("a",)
        assert await host.leave("b", "killed")
        assert not await host.boundary("a", 1)

    play(scene)


def test_a_member_under_notice_is_told_to_end(play):
    async def scene(host: Host) -> None:
        await host.next_generation("sp0", "a", 0)
        await host.notice("a", 30.0)
        assert await host.boundary("a", 1)
        assert await host.next_generation("sp0", "a", 1) is None

    play(scene)


def test_silent_members_are_ended(play):
    async def scene(host: Host) -> None:
        host._coordinator.teams.found("ranks", ["a", "b"])
        for name in ("a", "b"):
            await host.heartbeat(name)
        lost = await host.losses()
        while len(lost) < 2:  # one may be found a tick later
            lost += await host.losses()
        assert lost == [Lost("a", "frozen"), Lost("b", "frozen")]

    play(scene, heartbeat_timeout_s=0.5)


def test_a_leader_whose_team_changes_gets_no_lease_and_is_told_to_stop_at_the_next_step(play):
    async def scene(host: Host) -> None:
        worker = await join(host, 0)
        first = await host.next_generation("sp0", worker, 0)
        pulling = await meanwhile(host.pull(worker))
        await meanwhile(host.next_generation("sp0", "b", 0))
        assert await pulling is None
        await host.submit(explores[:4])
        assert await host.pull(worker) is None
        assert await host.boundary(worker, first.number)
        assert await host.pull(worker) is None
        assert await host.next_generation("sp0", worker, first.number) == Generation(2, (worker, "b"), 1)
        lease = await host.pull(worker)
        assert await host.commit(worker, lease.id, 1, ())
        await host.notice("b", 30.0)
        assert not await host.commit(worker, lease.id, 2, ())

    play(scene)


def test_who_stands_down_is_no_member_and_may_join_again(play):
    async def scene(host: Host) -> None:
        worker = await join(host, 0)
        await host.next_generation("sp0", worker, 0)
        await host.submit(explores[:4])
        assert await host.pull(worker)
        await host.stand_down(worker)
        assert await host.pull(worker) is None
        assert await host.workers() == 0
        await join(host, 0)
        assert await host.pull(worker)

    (lost,) = (event for event in play(scene) if event["kind"] == "worker_lost")
    assert (lost["reason"], lost["requests"]) == ("left", 4)


def test_a_follower_that_is_gone_was_of_use(play):
    async def scene(host: Host) -> None:
        await host.next_generation("sp0", "a", 0)
        assert await host.leave("a", "killed")
        assert not await host.leave("b", "killed")

    play(scene)


def test_a_call_that_two_make_is_made_once(play):
    """The second takes over from the first, which died while it waited; a third one comes too late."""

    async def scene(host: Host) -> None:
        worker = await join(host, 0)
        await host.submit(explores[:4])
        lease = await host.pull(worker)
        first = await meanwhile(host.once(7, "close", (keys[:4], WAIT_S)))
        first.cancel()
        second = await meanwhile(host.once(7, "close", (keys[:4], WAIT_S)))
        made = [SampleResult(request.key, worker, "sum") for request in lease.requests]
        await host.push(worker, lease.id, made, WorkReport(0.0, 0.0, 0.0, 0))
        assert [result.key for result in await second] == keys[:4]
        assert await host.once(7, "close", (keys[:4], WAIT_S)) == await second
        await host.once(8, "record", ("kept", {"iteration": 1}))
        await host.once(8, "record", ("kept", {"iteration": 1}))
        with pytest.raises(ValueError, match="call 7 comes after call 8"):
            await host.once(7, "workers", ())

    assert len([event for event in play(scene) if event["kind"] == "kept"]) == 1


def test_a_rank_that_waits_for_work_hears_that_another_group_broke(play):
    """It would see it when everything is made, and might be given up until then."""

    async def scene(host: Host) -> None:
        worker = await join(host, 0)
        host._coordinator.teams.found("ranks", [worker, "b", "c"], window_s=WAIT_S, hold_state=True)
        await host.submit(explores[:4])
        assert await host.work(worker, keys[:4])
        working = await meanwhile(host.work(worker, keys[:4]))
        await host.leave("c", "killed")
        assert not working.done(), "nobody waits for this rank yet"
        await host.broken("b", 0)
        with pytest.raises(GroupLost):
            await working
        await host.broken(worker, 0)
        assert (await host.next_generation("ranks", worker, 0)).members == (worker, "b")
        working = await meanwhile(host.work(worker, keys[:4]))
        working.cancel()

    play(scene)


def test_training_ranks_that_are_all_told_to_leave_are_told_to_save(play):
    async def scene(host: Host) -> None:
        host._coordinator.teams.found("ranks", ["a", "b"], hold_state=True)
        await host.notice("a", math.inf)
        assert await host.boundary("b", 0)
        assert (await host.next_generation("ranks", "b", 0)).members == ("b",)
        assert await host.next_generation("ranks", "a", 0) is None
        assert not await host.should_stop()
        await host.notice("b", math.inf)
        while not await host.should_stop():
            await asyncio.sleep(0.01)
        assert not await host.boundary("b", 1), "it has not saved yet"

    (stop,) = (event for event in play(scene) if event["kind"] == "stop_requested")
    assert stop["signal"] == "SIGTERM"
