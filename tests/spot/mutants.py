"""Schedulers with one mistake each, that the state machine must find."""

from __future__ import annotations

from collections.abc import Sequence, Set

from src.core.types import Commit, RequestKey, SampleRequest, SampleResult
from src.spot import messages as m
from src.spot.records import OpenLease, Task
from src.spot.scheduler import Scheduler


class DispatchesAfterTheNotice(Scheduler):
    """A worker under notice still gets work."""

    def _pull(self, now_s: float, worker: str) -> list[m.Action]:
        noticed, self._noticed = self._noticed, {}
        try:
            return super()._pull(now_s, worker)
        finally:
            self._noticed = noticed


class LosesWhatWasLeased(Scheduler):
    """What a lost lease held is never made."""

    def _give_back(self, open_: OpenLease, spoilt: Set[RequestKey]) -> list[m.Fail]:
        return []


class AcceptsTwice(Scheduler):
    """A second result of a request counts again."""

    def _objection(self, task: Task | None, worker: str, lease: int, result: SampleResult) -> str | None:
        reason = super()._objection(task, worker, lease, result)
        return None if reason == "duplicate" else reason


class GoesBack(Scheduler):
    """An older commit replaces a newer one, and anybody's weights will do."""

    def _counts(self, commit: Commit, task: Task, open_: OpenLease) -> bool:
        return True


class ForgetsProgress(Scheduler):
    """A request that comes back starts from the beginning."""

    def _give_back(self, open_: OpenLease, spoilt: Set[RequestKey]) -> list[m.Fail]:
        for request in open_.lease.requests:
            task = self._tasks.get(request.key)
            if task is not None and task.holder == open_.lease.id:
                task.commit = None
        return super()._give_back(open_, spoilt)


class TriesForEver(Scheduler):
    """A request that always fails is tried again and again."""

    def _give_back(self, open_: OpenLease, spoilt: Set[RequestKey]) -> list[m.Fail]:
        return super()._give_back(open_, frozenset())


class CountsPreemptions(Scheduler):
    """A request has failed if its worker was taken away."""

    def _give_back(self, open_: OpenLease, spoilt: Set[RequestKey]) -> list[m.Fail]:
        return super()._give_back(open_, {request.key for request in open_.lease.requests})


class InsistsOnTheSpoiler(Scheduler):
    """Who spoilt a request gets it again, before others."""

    def _take(self, name: str, *, choosy: bool) -> tuple[SampleRequest, ...]:
        return self._queue.take(self._workers[name].kinds, lambda *_: 1)


class LeastUrgentFirst(Scheduler):
    """Serves kinds in the wrong order."""

    def _join(self, now_s: float, join: m.Join) -> list[m.Action]:
        actions = super()._join(now_s, join)
        worker = self._workers[join.member.name]
        worker.kinds = worker.kinds[::-1]
        return actions


class KeepsTheWaitingWaiting(Scheduler):
    """Work that comes back is not offered to who waits."""

    def _lose(self, now_s: float, worker: str, reason: str) -> list[m.Action]:
        return [action for action in super()._lose(now_s, worker, reason) if not isinstance(action, m.Grant)]


class ReopensClosed(Scheduler):
    """Closing a request that is leased leaves it open."""

    def _close(self, keys: Sequence[RequestKey]) -> list[m.Action]:
        return super()._close([key for key in keys if self._tasks[key].holder is None])


ALL = (
    DispatchesAfterTheNotice,
    LosesWhatWasLeased,
    AcceptsTwice,
    GoesBack,
    ForgetsProgress,
    TriesForEver,
    CountsPreemptions,
    InsistsOnTheSpoiler,
    LeastUrgentFirst,
    KeepsTheWaitingWaiting,
    ReopensClosed,
)
