"""Where a node learns that it will be taken away.

A `NoticeSource` waits for the next notice and never raises: an outage of whatever it asks means no notice, a warning
in the log (never with what was sent or answered, which may be secret), and longer pauses until it answers again.

    source = Polling(signs=AwsSigns(), node="node3", interval_s=5.0)  # src.spot.clouds has AWS, GCP and Azure
    while running:
        if (notice := source.wait(timeout_s=1.0)) is not None:
            ...  # commit, and hand leases back
"""

from __future__ import annotations

import logging
import math
import queue
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from src.core.clock import Clock, monotonic_s, sleep_s
from src.spot.market import Market, Notice, Start, Tick

log = logging.getLogger(__name__)


class NoticeSource(Protocol):
    """Tells of each notice once. One thread waits at a time."""

    def wait(self, timeout_s: float) -> Notice | None:
        """The next notice; None if there is none within about `timeout_s` seconds (0: looks once). Never raises."""


@dataclass(frozen=True)
class Sign:
    """What a `Signs` found: `id` tells one announcement from another, `grace_s` as in `Notice`."""

    id: str
    grace_s: float


class NoAnswer(RuntimeError):
    """Whoever was asked gave no usable answer. The message goes to the log and holds no secret."""


class Signs(Protocol):
    """Something that can be asked whether this node will be taken away."""

    def ask(self, within_s: float) -> Sequence[Sign]:
        """All that is announced now. May wait up to `within_s` seconds for something to be announced.

        Raises:
            NoAnswer: there was no usable answer.
        """


class Polling:
    """Asks `signs` again and again.

    Args:
        signs: who is asked.
        node: the node that its signs are about.
        interval_s: from one question to the next.
        max_interval_s: the same while there are no usable answers: the interval doubles up to this. To be shorter than
            the notice that the cloud gives.
    """

    def __init__(
        self,
        *,
        signs: Signs,
        node: str,
        interval_s: float = 5.0,
        max_interval_s: float = 15.0,
        now: Clock = monotonic_s,
        sleep: Callable[[float], None] = sleep_s,
    ) -> None:
        if not 0 < interval_s <= max_interval_s < math.inf:
            raise ValueError(
                f"interval_s must be positive and at most max_interval_s={max_interval_s}, got {interval_s}"
            )
        self._signs = signs
        self._node = node
        self._interval_s = interval_s
        self._max_interval_s = max_interval_s
        self._now = now
        self._sleep = sleep
        self._next_s = -math.inf
        self._failures = 0
        self._told: set[str] = set()
        self._untold: deque[Notice] = deque()

    def wait(self, timeout_s: float) -> Notice | None:
        deadline_s = self._now() + timeout_s
        while not self._untold:
            if self._next_s > deadline_s:
                self._sleep(max(0.0, deadline_s - self._now()))
                return None
            self._sleep(max(0.0, self._next_s - self._now()))
            self._ask(max(0.0, deadline_s - self._now()))
        return self._untold.popleft()

    def _ask(self, within_s: float) -> None:
        asked_s = self._now()
        try:
            signs = self._signs.ask(within_s)
        except Exception as error:  # whatever it is, it must not end the work of a healthy node
            self._failures += 1
            level = logging.WARNING if self._failures == 1 else logging.DEBUG
            reason = str(error) if isinstance(error, NoAnswer) else type(error).__name__
            log.log(level, "no word on the end of %s from %s: %s", self._node, type(self._signs).__name__, reason)
        else:
            self._failures = 0
            for sign in signs:
                if sign.id not in self._told:
                    self._told.add(sign.id)
                    self._untold.append(Notice(self._node, sign.grace_s))
        # An exponent without bound would overflow after a day of outage.
        pause_s = min(self._max_interval_s, self._interval_s * 2.0 ** min(self._failures, 32))
        self._next_s = asked_s + pause_s


class FileSigns:
    """A file that appears, or is written again, announces the node's end: for tests and for schedulers that can
    write one.

    Args:
        path: the file. It holds the seconds that are left, or nothing.
        grace_s: what an empty file means.
    """

    def __init__(self, *, path: str | Path, grace_s: float = 30.0) -> None:
        self._path = Path(path)
        self._grace_s = grace_s

    def ask(self, within_s: float) -> Sequence[Sign]:
        try:
            written_ns = self._path.stat().st_mtime_ns
            with self._path.open("rb") as file:
                text = file.read(64).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return []
        try:
            grace_s = float(text) if text else self._grace_s
        except ValueError:
            grace_s = math.nan
        # Whatever it says, somebody wrote it to end this node: what cannot be read leaves no time.
        return [Sign(str(written_ns), grace_s if grace_s >= 0 else 0.0)]


class Sigterm:
    """Takes SIGTERM for a notice, as Slurm, Kubernetes and a VM's shutdown send it.

    To be made in the main thread, as a context: the signal is unblocked and handled in between. Whoever sends it twice
    gets two.

    Args:
        node: this node.
        grace_s: how long after SIGTERM the sender kills (Kubernetes and Slurm: 30 s by default).
    """

    def __init__(self, *, node: str, grace_s: float = 30.0) -> None:
        self._notice = Notice(node, grace_s)
        # Its put() may interrupt its own get(); an Event, which has a lock, could block a handler for good.
        self._signals: queue.SimpleQueue[Notice] = queue.SimpleQueue()

    def __enter__(self) -> Sigterm:
        self._before = signal.signal(signal.SIGTERM, self._handle)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see session.start
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.signal(signal.SIGTERM, self._before)

    def wait(self, timeout_s: float) -> Notice | None:
        try:
            return self._signals.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals.put(self._notice)


class Replayed:
    """The notices that a market has for one of its nodes.

    Args:
        market: a market of the source's own; markets with equal arguments do the same, wherever they are.
        node: one of `market.nodes`.
        now: seconds since the job's first start.
    """

    def __init__(self, *, market: Market, node: str, now: Clock, sleep: Callable[[float], None] = sleep_s) -> None:
        if node not in market.nodes:
            raise ValueError(f"node must be one of {', '.join(market.nodes)}, got {node}")
        self._market = market
        self._node = node
        self._now = now
        self._sleep = sleep
        self._untold: deque[Notice] = deque()
        market.handle(now(), Start())

    def wait(self, timeout_s: float) -> Notice | None:
        deadline_s = self._now() + timeout_s
        while True:
            now_s = self._now()
            for action in self._market.handle(now_s, Tick()):
                if isinstance(action, Notice) and action.node == self._node:
                    self._untold.append(action)
            if self._untold:
                return self._untold.popleft()
            if now_s >= deadline_s:
                return None
            self._sleep(min(self._market.next_s, deadline_s) - now_s)
