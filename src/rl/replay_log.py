"""The accepted explorations of an earlier run, so that a run can be repeated without its workers' timing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from src.core import events
from src.core.types import ExploredByInstance, PolicyVersion


class ReplayLog:
    """Reads `explored` events of a run's event log.

    A run that was resumed may have explored for an iteration twice; the last time is what it went on with.

    Raises ValueError naming the file if it is missing or not an event log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._events = {
                event["iteration"]: event for event in events.read_jsonl(path) if event["kind"] == "explored"
            }
        except FileNotFoundError as error:
            raise ValueError(f"{path}: there is no event log to replay") from error
        except KeyError as error:
            raise ValueError(f"{path}: an event lacks its field {error}") from error

    def explored(self, iteration: int, policy: PolicyVersion) -> ExploredByInstance:
        """What the earlier run explored for the batch of `iteration`.

        `policy` is what this run would explore with. Only its iteration must agree: incarnations count
        restarts, and a restarted run continues with the same weights.

        Raises ValueError naming the file if the iteration is missing or was explored with other weights.
        """
        event = self._events.get(iteration)
        if event is None:
            raise ValueError(f"{self._path}: nothing was explored for iteration {iteration}, so it cannot be replayed")
        try:
            logged, explored = PolicyVersion.parse(event["version"]), _results(event)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self._path}: the explored event of iteration {iteration} is incomplete") from error
        if logged.iteration != policy.iteration:
            raise ValueError(
                f"{self._path}: iteration {iteration} was explored with the weights of iteration "
                f"{logged.iteration}, this run would use those of iteration {policy.iteration}"
            )
        return explored


def _results(event: dict[str, Any]) -> ExploredByInstance:
    return events.read_explored_rows(event["results"])
