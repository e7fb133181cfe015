"""Every cloud's signs against real sockets on loopback."""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from src.core.types import Member
from src.spot.clouds import AwsSigns, AzureSigns, GcpSigns
from src.spot.market import Notice
from src.spot.notices import NoAnswer, Polling, Sign
from src.spot.worker import Worker
from tests.spot.fakes import FakeEngine
from tests.spot.test_worker import Script

pytestmark = pytest.mark.timeout(30)

NOW_S = datetime(2026, 9, 18, 9, tzinfo=UTC).timestamp()


class Stub:
    """Answers each connection with what `answer(request head)` gives, byte for byte, and then closes it."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.answer: Callable[[str], Iterable[bytes]] = lambda head: [reply(404)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._ending.is_set():
                connection.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (more := connection.recv(4096)):
                head += more
            self.heads.append(head.decode())
            for part in self.answer(head.decode()):
                if self._ending.is_set():
                    return
                connection.sendall(part)

    def close(self) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        host, port = self.address.split(":")
        socket.create_connection((host, int(port))).close()  # wakes accept
        for thread in self._threads:
            thread.join()
        self._listener.close()


def reply(status: int, body: str | bytes = "", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else body.encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def trickle(data: bytes, pause_s: float = 0.05) -> Iterable[bytes]:
    for byte in data:
        time.sleep(pause_s)
        yield bytes([byte])


def silence(for_s: float) -> Iterable[bytes]:
    time.sleep(for_s)
    return []


@pytest.fixture
def stub():
    stub = Stub()
    yield stub
    stub.close()


def paths(*answers: tuple[str, bytes]) -> Callable[[str], Iterable[bytes]]:
    """Answers by the beginning of the request line; 404 for everything else."""

    def answer(head: str) -> Iterable[bytes]:
        return [next((data for start, data in answers if head.startswith(start)), reply(404))]

    return answer


TOKEN = ("PUT /latest/api/token ", reply(200, "secret-token=="))
ACTION = "GET /latest/meta-data/spot/instance-action "
REBALANCE = "GET /latest/meta-data/events/recommendations/rebalance "


def aws(stub: Stub, timeout_s: float = 5.0) -> AwsSigns:
    return AwsSigns(address=stub.address, timeout_s=timeout_s, now_wall=lambda: NOW_S)


def test_aws_asks_for_a_token_once_and_says_nothing_while_nothing_is_announced(stub):
    stub.answer = paths(TOKEN)
    signs = aws(stub)
    assert [signs.ask(0), signs.ask(0)] == [[], []]
    assert [head.split(" HTTP")[0] for head in stub.heads] == [
        TOKEN[0].strip(),
        *[ACTION.strip(), REBALANCE.strip()] * 2,
    ]
    assert "x-aws-ec2-metadata-token-ttl-seconds: 21600" in stub.heads[0].lower()
    assert all("x-aws-ec2-metadata-token: secret-token==" in head.lower() for head in stub.heads[1:])


@pytest.mark.parametrize(
    ("action", "grace_s"),
    [
        ({"action": "terminate", "time": "2026-09-18T09:02:00Z"}, 120.0),
        ({"action": "stop", "time": "2026-09-18T09:00:30Z"}, 30.0),
        ({"action": "stop", "time": "2026-09-18T08:00:00Z"}, 0.0),
        ({"action": "hibernate", "time": "2026-09-18T09:02:00Z"}, 0.0),
        ({"action": "terminate", "time": "soon"}, 0.0),
        ({"action": "terminate", "time": 5}, 0.0),
        ({"action": "terminate"}, 0.0),
    ],
)
def test_aws_instance_action(stub, action, grace_s):
    stub.answer = paths(TOKEN, (ACTION, reply(200, json.dumps(action))), (REBALANCE, reply(500)))
    assert [sign.grace_s for sign in aws(stub).ask(0)] == [grace_s]


def test_aws_rebalance_recommendation_comes_before_the_end_and_sets_no_time(stub):
    risk = (REBALANCE, reply(200, '{"noticeTime": "2026-09-18T08:59:00Z"}'))
    stub.answer = paths(TOKEN, risk)
    source = Polling(signs=aws(stub), node="n", interval_s=0.01)
    notice = source.wait(5)
    assert notice is not None
    assert notice.grace_s == math.inf
    assert source.wait(0.05) is None
    stub.answer = paths(TOKEN, risk, (ACTION, reply(200, '{"action": "stop", "time": "2026-09-18T09:02:00Z"}')))
    notice = source.wait(5)
    assert notice is not None
    assert notice.grace_s == 120


def test_aws_renews_an_expired_token(stub):
    stub.answer = paths(TOKEN)
    signs = aws(stub)
    signs.ask(0)
    stub.answer = paths((ACTION, reply(401)))
    with pytest.raises(NoAnswer, match="status 401"):
        signs.ask(0)
    stub.answer = paths(TOKEN)
    assert signs.ask(0) == []
    assert sum(head.startswith(TOKEN[0]) for head in stub.heads) == 2


@pytest.mark.parametrize("token", ["", "a b", "line\r\nX-Evil: 1", "é", "x" * 2000])
def test_aws_takes_no_odd_token(stub, token):
    stub.answer = paths((TOKEN[0], reply(200, token)))
    with pytest.raises(NoAnswer, match="its answer is no token"):
        aws(stub).ask(0)
    assert len(stub.heads) == 1


def gcp(stub: Stub, timeout_s: float = 5.0) -> GcpSigns:
    return GcpSigns(address=stub.address, timeout_s=timeout_s, grace_s=30.0)


def test_gcp_asks_and_then_waits_for_a_change(stub):
    stub.answer = lambda head: [reply(200, "FALSE", Metadata_Flavor="Google", ETag="abc1")]
    signs = gcp(stub)
    assert [signs.ask(10.5), signs.ask(0.5), signs.ask(10.5)] == [[], [], []]
    path = "GET /computeMetadata/v1/instance/preempted"
    asked = [head.split(" HTTP")[0] for head in stub.heads]
    assert asked == [path, path, f"{path}?wait_for_change=true&timeout_sec=10&last_etag=abc1"]
    assert all("metadata-flavor: google" in head.lower() for head in stub.heads)


def test_gcp_answers_when_the_value_changes(stub):
    def answer(head: str) -> Iterable[bytes]:
        if "wait_for_change" not in head:
            return [reply(200, "FALSE", Metadata_Flavor="Google", ETag="a")]
        time.sleep(0.3)
        return [reply(200, "TRUE\n", Metadata_Flavor="Google", ETag="b")]

    stub.answer = answer
    source = Polling(signs=gcp(stub), node="n", interval_s=0.01)
    notice = source.wait(20)
    assert notice is not None
    assert notice.grace_s == 30
    assert len(stub.heads) == 2


@pytest.mark.parametrize("data", [reply(200, "TRUE"), reply(200, "<html>", Metadata_Flavor="Google")])
def test_gcp_takes_no_answer_that_is_not_googles(stub, data):
    stub.answer = lambda head: [data]
    with pytest.raises(NoAnswer, match="not one of Google's"):
        gcp(stub).ask(0)


def test_gcp_sends_no_odd_etag(stub):
    stub.answer = lambda head: [reply(200, "FALSE", Metadata_Flavor="Google", ETag="a&x=1 b")]
    signs = gcp(stub)
    assert [signs.ask(10), signs.ask(10)] == [[], []]
    assert all("etag" not in head for head in stub.heads)


def test_a_worker_lets_gcp_tell_when_the_value_changes(stub, tmp_path):
    class Waiting(Script):
        """Has no work until there is notice."""

        noticed = threading.Event()

        def pull(self, worker):
            assert self.noticed.wait(5)

        def notice(self, worker, grace_s):
            super().notice(worker, grace_s)
            self.noticed.set()

    def answer(head: str) -> Iterable[bytes]:
        changed = "wait_for_change" in head
        return [reply(200, "TRUE" if changed else "FALSE", Metadata_Flavor="Google", ETag="a")]

    stub.answer = answer
    source = Polling(signs=gcp(stub), node="n", interval_s=0.01)
    transport = Waiting(tmp_path)
    worker = Worker(member=Member("n", 0), engine=FakeEngine(), transport=transport, notices=[source])
    worker.run()
    assert transport.told[1:] == [("notice", "spot-n-0.0", 30.0)]
    assert worker.notice == Notice("n", 30.0)


NAME = ("GET /metadata/instance/compute/name?", reply(200, "VM_1"))
EVENTS = "GET /metadata/scheduledevents?api-version=2020-07-01 "


def azure(stub: Stub, timeout_s: float = 5.0) -> AzureSigns:
    return AzureSigns(address=stub.address, timeout_s=timeout_s, now_wall=lambda: NOW_S)


def event(id: str, **changes) -> dict:
    about = {"EventType": "Preempt", "EventStatus": "Scheduled", "NotBefore": "Fri, 18 Sep 2026 09:00:30 GMT"}
    return {"EventId": id, "Resources": ["vm_1"], **about, **changes}


def test_azure_preempts_only_this_machine(stub):
    events = [
        event("a"),
        event("b", Resources=["vm_2"]),
        event("c", EventType="Reboot"),
        event("d", EventStatus="Started", NotBefore=""),
        event("e", NotBefore="later"),
        event("f", Resources="vm_1"),
        {"EventType": "Preempt"},
        7,
    ]
    stub.answer = paths(NAME, (EVENTS, reply(200, json.dumps({"DocumentIncarnation": 1, "Events": events}))))
    signs = azure(stub)
    assert signs.ask(0) == [Sign("a", 30.0), Sign("d", 0.0), Sign("e", 0.0)]
    assert signs.ask(0) == signs.ask(0)
    assert sum(head.startswith(NAME[0]) for head in stub.heads) == 1
    assert all("metadata: true" in head.lower() for head in stub.heads)


def test_a_name_that_broke_off_is_no_name(stub):
    """An answer without a length is whole only if it ended by itself."""

    def answer(head: str) -> Iterable[bytes]:
        yield b"HTTP/1.1 200 X\r\n\r\nvm_"
        yield from trickle(b"1" * 40)

    stub.answer = answer
    signs = azure(stub, timeout_s=0.3)
    with pytest.raises(NoAnswer, match="broke off"):
        signs.ask(0)
    stub.answer = paths(NAME, (EVENTS, reply(200, json.dumps({"Events": [event("a")]}))))
    assert signs.ask(0) == [Sign("a", 30.0)]


def test_azure_wants_a_name_and_a_list(stub):
    stub.answer = paths((NAME[0], reply(200, "<html>hi</html>")))
    with pytest.raises(NoAnswer, match="no name of a machine"):
        azure(stub).ask(0)
    stub.answer = paths(NAME, (EVENTS, reply(200, '{"Events": 3}')))
    with pytest.raises(NoAnswer, match="no list of events"):
        azure(stub).ask(0)


BROKEN: dict[str, Callable[[str], Iterable[bytes]]] = {
    "500": lambda head: [reply(500, "secret-body")],
    "redirect": lambda head: [reply(302, "", Location="http://127.0.0.1:1/")],
    "closed at once": lambda head: [],
    "garbage": lambda head: [b"\x00\xffsecret-body\r\n\r\n"],
    "garbage body": lambda head: [reply(200, b"\xff\xfe{secret-body")],
    "deep body": lambda head: [reply(200, "[" * 100_000)],
    "wrong body": lambda head: [reply(200, "[1, 2]")],
    "half closed": lambda head: [reply(200, '{"action": "stop", "Events": []}' + " " * 10)[:-10]],
    "endless head": lambda head: [b"HTTP/1.1 200 X\r\n", *[b"X: " + b"y" * 1000 + b"\r\n"] * 200],
    "too long": lambda head: [reply(200, b" " * 300_000)],
    "torn chunk": lambda head: [b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc"],
    "silent": lambda head: silence(1.0),
    "slow head": lambda head: trickle(b"HTTP/1.1 200 X\r\n" * 100),
    "slow body": lambda head: trickle(reply(200, "x" * 1000)),
}
CLOUDS = {"aws": aws, "gcp": gcp, "azure": azure}


@pytest.mark.parametrize("cloud", CLOUDS.values(), ids=CLOUDS)
@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_no_breakage_raises_hangs_or_leaks(stub, cloud, answer, caplog):
    healthy = {"PUT": TOKEN, "GET /metadata/inst": NAME}

    def after_the_start(head: str) -> Iterable[bytes]:
        return next(([data] for start, (_, data) in healthy.items() if head.startswith(start)), None) or answer(head)

    stub.answer = after_the_start
    source = Polling(signs=cloud(stub, timeout_s=0.4), node="n", interval_s=0.01)
    started_s = time.monotonic()
    with caplog.at_level(logging.DEBUG):
        assert source.wait(0) is None
    assert time.monotonic() - started_s < 5
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize("cloud", CLOUDS.values(), ids=CLOUDS)
def test_nobody_there_is_no_notice(stub, cloud, caplog):
    signs = cloud(stub)
    stub.close()
    with caplog.at_level(logging.WARNING):
        assert Polling(signs=signs, node="n").wait(0) is None
    assert caplog.messages == [f"no word on the end of n from {type(signs).__name__}: ConnectionRefusedError"]


def test_proxies_are_passed_by(stub, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    stub.answer = paths(TOKEN)
    assert aws(stub).ask(0) == []
