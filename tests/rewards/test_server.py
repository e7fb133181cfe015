"""The client of OpenAI-compatible servers against real HTTP servers on loopback that misbehave."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from src.core.types import Prompt
from src.rl.rewards.reward import Score, ScoreError, score_samples
from src.rl.rewards.server import ChatServer, ServerOCR, VLMJudge

IMAGES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
PROMPTS = [Prompt(0, 'a sign "Open"', {"target": "Open"}), Prompt(1, 'a mug "Tea"', {"target": "Tea"})]
Answer = Callable[["Stub", int], None]

pytestmark = pytest.mark.timeout(30)


class Stub(BaseHTTPRequestHandler):
    """Answers the n-th request with `server.script[n]`, the last entry for ever."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        with server.lock:
            server.seen.append((self.path, dict(self.headers), body))
            step = server.script[min(len(server.seen), len(server.script)) - 1]
        step(self)

    def reply(self, payload: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        pass


def says(words: Any) -> Callable[[Stub], None]:
    return lambda stub: stub.reply(json.dumps({"choices": [{"message": {"content": words}}]}).encode())


def fails(status: int, **headers: str) -> Callable[[Stub], None]:
    return lambda stub: stub.reply(b"{}", status, **headers)


def sends(payload: bytes) -> Callable[[Stub], None]:
    return lambda stub: stub.reply(payload)


def half_closed(stub: Stub) -> None:
    """Promises a hundred bytes, sends five, and closes."""
    stub.reply(b'{"cho', length=100)
    stub.close_connection = True


def slow(stub: Stub) -> None:
    """Says nothing until the client has gone."""
    stub.server.released.wait(5)  # type: ignore[attr-defined]
    stub.close_connection = True


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    servers = []

    def serve(*script: Callable[[Stub], None]) -> Any:
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        server.script, server.seen, server.lock, server.released = script, [], threading.Lock(), threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


def client(server: Any, waits: list[float], **settings: Any) -> ChatServer:
    chosen = {"timeout_s": 0.3, "attempts": 3, "backoff_s": 0.5} | settings
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return ChatServer(base_url=url, model="reader", sleep=waits.append, **chosen)


def test_a_question_travels_as_json_with_the_image_as_png(serve, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    server = serve(says("Open"))
    assert client(server, [], key_variable="SOME_KEY").ask(IMAGES[0], "Free OCR.") == "Open"
    ((path, headers, body),) = server.seen
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert (body["model"], body["temperature"]) == ("reader", 0.0)
    image, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "Free OCR."}
    png = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), IMAGES[0])


@pytest.mark.parametrize(
    "failure",
    [
        fails(429),
        fails(500),
        fails(503),
        slow,
        half_closed,
        sends(b"<html>busy</html>"),
        sends(b'{"choices": []}'),
        says(None),
    ],
    ids=["429", "500", "503", "slow", "half-closed", "not json", "no choice", "no words"],
)
def test_what_may_pass_is_tried_again_with_growing_waits(serve, failure):
    waits: list[float] = []
    server = serve(failure, failure, says("Open"))
    assert client(server, waits).ask(IMAGES[0], "?") == "Open"
    assert waits == [0.5, 1.0]
    server, waits = serve(failure), []
    with pytest.raises(ScoreError, match="failed 3 times"):
        client(server, waits).ask(IMAGES[0], "?")
    assert (len(server.seen), waits) == (3, [0.5, 1.0])


def test_the_server_s_wish_for_a_pause_is_kept_up_to_a_limit(serve):
    waits: list[float] = []
    server = serve(fails(429, Retry_After="7"), fails(429, Retry_After="900"), says("Open"))
    client(server, waits, longest_wait_s=20).ask(IMAGES[0], "?")
    assert waits == [7.0, 20]


def test_a_refusal_is_not_tried_again(serve):
    server = serve(fails(401))
    with pytest.raises(ScoreError, match="refuses the request: HTTP 401"):
        client(server, []).ask(IMAGES[0], "?")
    assert len(server.seen) == 1


def test_a_server_that_is_not_there_fails_the_sample(serve):
    server = serve(says("x"))
    server.shutdown()
    server.server_close()
    with pytest.raises(ScoreError, match="failed 3 times: URLError"):
        client(server, []).ask(IMAGES[0], "?")


def test_ocr_and_judge(serve):
    reader = ServerOCR(server=client(serve(says("we are OPEN")), [], parallel=1))
    assert reader.score(IMAGES, PROMPTS).tolist() == [1.0, 0.0]
    server = serve(says("7"), says("Mark: 10"))
    judge = VLMJudge(server=client(server, [], parallel=1))
    assert judge.score(IMAGES, PROMPTS).tolist() == pytest.approx([0.7, 1.0])
    assert 'show "a sign "Open""?' in server.seen[0][2]["messages"][0]["content"][1]["text"]


@pytest.mark.parametrize("words", ["no idea", "11", "-1 of 10"])
def test_an_answer_without_a_mark_fails_the_sample_and_is_never_zero(serve, words):
    judge = VLMJudge(server=client(serve(says(words)), [], parallel=1))
    scores = score_samples(judge, IMAGES, PROMPTS)
    assert all(isinstance(score, ScoreError) for score in scores)
    assert "no mark from 0 to 10" in str(scores[0])


def test_only_the_sample_that_fails_is_lost(serve):
    """The batch fails with its second image; then each is asked for alone."""

    def by_image(stub: Stub) -> None:
        url = stub.server.seen[-1][2]["messages"][0]["content"][0]["image_url"]["url"]  # type: ignore[attr-defined]
        bad = np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))), IMAGES[1])
        (fails(500) if bad else says("5"))(stub)

    judge = VLMJudge(server=client(serve(by_image), [], parallel=1, attempts=1))
    good, bad = score_samples(judge, IMAGES, PROMPTS)
    assert good == Score(0.5)
    assert isinstance(bad, ScoreError)


@pytest.mark.parametrize(("field", "value"), [("attempts", 0), ("parallel", 0), ("timeout_s", 0), ("backoff_s", -1)])
def test_settings_are_checked(field, value):
    with pytest.raises(ValueError, match=rf"ChatServer\.{field} must be .*, got {value}"):
        ChatServer(**{"base_url": "http://x", "model": "m", field: value})
    with pytest.raises(ValueError, match=r"VLMJudge\.question must hold \{prompt\}"):
        VLMJudge(server=ChatServer(base_url="http://x", model="m"), question="How good?")
