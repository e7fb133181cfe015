"""Schedulers with one mistake each, that the state machine must find."""

from __future__ import annotations

from collections.abc import Sequence

from src.core.types import Commit, Lease, RequestKey, SampleResult
from src.spot import messages as m
from src.spot.scheduler import Scheduler, _Open, _Task


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

    def _give_back(self, lease: Lease) -> list[m.Fail]:
        return []


class AcceptsTwice(Scheduler):
    """A second result of a request counts again."""

    def _objection(self, task: _Task | None, worker: str, lease: int, result: SampleResult) -> str | None:
        reason = super()._objection(task, worker, lease, result)
        return None if reason == "duplicate" else reason


class GoesBack(Scheduler):
    """An older commit replaces a newer one, and anybody's weights will do."""

    def _counts(self, commit: Commit, task: _Task, open_: _Open) -> bool:
        return True


class ForgetsProgress(Scheduler):
    """A request that comes back starts from the beginning."""

    def _give_back(self, lease: Lease) -> list[m.Fail]:
        for request in lease.requests:
            task = self._tasks.get(request.key)
            if task is not None and task.holder == lease.id:
                task.commit = None
        return super()._give_back(lease)


class TriesForEver(Scheduler):
    """A request is never given up."""

    def _give_back(self, lease: Lease) -> list[m.Fail]:
        attempts, self.max_attempts = self.max_attempts, 1000
        failed = super()._give_back(lease)
        self.max_attempts = attempts
        return failed


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
    LeastUrgentFirst,
    KeepsTheWaitingWaiting,
    ReopensClosed,
)
