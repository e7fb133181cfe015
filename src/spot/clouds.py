"""What the clouds' metadata services say about a spot machine's end, as `Signs` (see src.spot.notices).

| cloud | asked                                                   | answer                                    | ahead |
|-------|---------------------------------------------------------|-------------------------------------------|-------|
| AWS   | GET /latest/meta-data/spot/instance-action              | 404, or {"action": "terminate", "time":   | 120 s |
|       |                                                         | "2026-09-18T08:22:00Z"}                   |       |
|       | GET /latest/meta-data/events/recommendations/rebalance  | 404, or {"noticeTime": "2026-..Z"}        | none  |
| GCP   | GET /computeMetadata/v1/instance/preempted              | FALSE or TRUE                             | 30 s  |
| Azure | GET /metadata/scheduledevents                           | {"Events": [{"EventType": "Preempt",      | 30 s  |
|       |                                                         | "NotBefore": "Mon, 19 Sep 2016 18:29:47   |       |
|       |                                                         | GMT", "Resources": [name], ...}]}         |       |

- AWS wants the header of a token that it gives for a PUT (IMDSv2), and recommends asking every 5 s. A rebalance
  recommendation says that an interruption has become more likely: infinite grace.
- GCP wants `Metadata-Flavor: Google` and sends it back. With `wait_for_change` it answers when the value changes.
  The 30 s are a best effort.
- Azure wants `Metadata: true`, recommends asking every second, and takes up to two minutes for the very first answer.
  Its events are those of a whole scale set: `Resources` tells whom they are about. Once an event has started its
  `NotBefore` is empty.

Sources: the clouds' public documentation ("Spot Instance interruption notices", "EC2 instance rebalance
recommendations", "Create and use Spot VMs", "View and query VM metadata", "Scheduled Events for Linux VMs").
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from typing import Any

from src.core.clock import Clock, wall_s
from src.spot.notices import NoAnswer, Sign

_MAX_BODY_BYTES = 256 * 1024
_METADATA_SERVICE = "169.254.169.254:80"
"""In all three clouds; a name would have to be resolved first, for which there is no timeout."""


@dataclass(frozen=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: str

    def object(self) -> dict[str, Any]:
        """The JSON object in the body."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise NoAnswer("its answer is no JSON object")
        return found

    def expect_ok(self) -> None:
        if self.status != 200:
            raise NoAnswer(f"it answers with status {self.status}")


def _request(address: str, path: str, headers: Mapping[str, str], *, timeout_s: float, method: str = "GET") -> _Reply:
    """One request on a connection of its own and past all proxies: `timeout_s` seconds to connect, and as many for
    the rest.

    Raises:
        NoAnswer: with the kind of failure alone, since the errors of http.client quote what was sent and received.
    """
    connection = HTTPConnection(address, timeout=timeout_s)
    limit: threading.Timer | None = None
    late = threading.Event()
    try:
        connection.connect()
        # The connection's own timeout starts anew with every byte that trickles in.
        limit = threading.Timer(timeout_s, _cut, (connection.sock, late))
        limit.daemon = True
        limit.start()
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read(_MAX_BODY_BYTES).decode("utf-8", "replace")
        if late.is_set() or response.length:  # what is left of a length that was announced
            raise NoAnswer("its answer broke off or is too long")
        return _Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, body)
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswer(type(error).__name__) from None
    finally:
        if limit is not None:
            limit.cancel()
        connection.close()


def _cut(connected: socket.socket, late: threading.Event) -> None:
    late.set()  # first: an answer without a length ends where it is cut
    with suppress(OSError):  # it may be closed by now
        connected.shutdown(socket.SHUT_RDWR)


def _left_s(parse: Callable[[str], datetime], time: Any, now_s: float) -> float:
    """Seconds from now until a time; none if it is past, empty or cannot be read: the machine goes anyway."""
    try:
        moment = parse(time)
        return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - now_s)
    except (TypeError, ValueError, OverflowError, IndexError):
        return 0.0


class AwsSigns:
    """EC2: interruption notices and rebalance recommendations.

    Args:
        address: of the metadata service.
        timeout_s: of each request.
    """

    def __init__(self, *, address: str = _METADATA_SERVICE, timeout_s: float = 2.0, now_wall: Clock = wall_s) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._now_wall = now_wall
        self._token = ""

    def ask(self, within_s: float) -> Sequence[Sign]:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:  # then the risk of it does not matter any more
            return [self._end(action)]
        risk = self._get("/latest/meta-data/events/recommendations/rebalance")
        return [] if risk is None else [Sign(f"rebalance {risk.get('noticeTime')}", math.inf)]

    def _end(self, action: Mapping[str, Any]) -> Sign:
        kind, time = action.get("action"), action.get("time")
        if kind not in ("terminate", "stop", "hibernate"):
            raise NoAnswer("its spot/instance-action names no known action")
        if kind == "hibernate":  # begins with the notice
            return Sign(f"{kind} {time}", 0.0)
        return Sign(f"{kind} {time}", _left_s(datetime.fromisoformat, time, self._now_wall()))

    def _get(self, path: str) -> dict[str, Any] | None:
        """The object at a path, None if there is none."""
        self._token = self._token or self._new_token()
        reply = _request(self._address, path, {"X-aws-ec2-metadata-token": self._token}, timeout_s=self._timeout_s)
        if reply.status == 401:  # expired
            self._token = ""
        if reply.status == 404:
            return None
        reply.expect_ok()
        return reply.object()

    def _new_token(self) -> str:
        reply = _request(
            self._address,
            "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
            timeout_s=self._timeout_s,
            method="PUT",
        )
        reply.expect_ok()
        if not re.fullmatch(r"[!-~]{1,1024}", reply.body):  # http.client would quote a bad header in its error
            raise NoAnswer("its answer is no token")
        return reply.body


class GcpSigns:
    """Compute Engine: preemption.

    Args:
        address: of the metadata server.
        timeout_s: of a request, beyond the time that it is asked to wait.
        grace_s: from the sign to the end.
    """

    def __init__(self, *, address: str = _METADATA_SERVICE, timeout_s: float = 2.0, grace_s: float = 30.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._etag = ""

    def ask(self, within_s: float) -> Sequence[Sign]:
        path, wait_s = "/computeMetadata/v1/instance/preempted", 0
        if self._etag and within_s >= 1:
            wait_s = int(min(within_s, 60.0))
            path += f"?wait_for_change=true&timeout_sec={wait_s}&last_etag={self._etag}"
        reply = _request(self._address, path, {"Metadata-Flavor": "Google"}, timeout_s=self._timeout_s + wait_s)
        reply.expect_ok()
        value = reply.body.strip().upper()
        if reply.headers.get("metadata-flavor") != "Google" or value not in ("TRUE", "FALSE"):
            raise NoAnswer("its answer is not one of Google's metadata server")
        etag = reply.headers.get("etag", "")
        self._etag = etag if re.fullmatch(r"[0-9A-Za-z]{1,64}", etag) else ""
        return [Sign("preempted", self._grace_s)] if value == "TRUE" else []


class AzureSigns:
    """Azure: scheduled events of type Preempt.

    Args:
        address: of the metadata service.
        timeout_s: of each request.
    """

    def __init__(self, *, address: str = _METADATA_SERVICE, timeout_s: float = 2.0, now_wall: Clock = wall_s) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._now_wall = now_wall
        self._name = ""
        """Of this machine, once known; Azure's names differ in more than case."""

    def ask(self, within_s: float) -> Sequence[Sign]:
        if not self._name:
            name = self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text").body.strip()
            if not re.fullmatch(r"[\w.-]{1,128}", name):
                raise NoAnswer("its answer is no name of a machine")
            self._name = name.casefold()
        events = self._get("/metadata/scheduledevents?api-version=2020-07-01").object().get("Events")
        if not isinstance(events, list):
            raise NoAnswer("its answer has no list of events")
        return [sign for event in events for sign in self._preemption(event)]

    def _preemption(self, event: Any) -> list[Sign]:
        match event:
            case {"EventId": str(id), "EventType": "Preempt", "Resources": [*names]}:
                if self._name in [str(name).casefold() for name in names]:
                    return [Sign(id, _left_s(parsedate_to_datetime, event.get("NotBefore"), self._now_wall()))]
        return []

    def _get(self, path: str) -> _Reply:
        reply = _request(self._address, path, {"Metadata": "true"}, timeout_s=self._timeout_s)
        reply.expect_ok()
        return reply
