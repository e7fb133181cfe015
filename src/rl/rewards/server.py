"""Rewards from a model behind an OpenAI-compatible server (vLLM and others): OCR by a vision model, VLM judges.

Requests and answers are JSON; images travel as base64 PNG.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from src.core.clock import sleep_s
from src.core.types import Prompt
from src.rl.rewards.ocr import ocr_score, target_text
from src.rl.rewards.reward import ScoreError

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP states that may be over the next time."""


class _Retry(Exception):
    """An attempt failed in a way that another may not; `after_s` is the server's wish."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True, kw_only=True)
class ChatServer:
    """One model of a server.

    Args:
        base_url: up to and without /chat/completions, such as "http://localhost:8000/v1".
        model: its name there.
        timeout_s: for connecting, and for every wait for more of an answer.
        attempts: how often a question is asked before it fails.
        backoff_s: wait before the second attempt; it doubles with each further one.
        longest_wait_s: the most of it, also where the server asks for more (Retry-After).
        parallel: questions at a time.
        max_tokens: of an answer.
        key_variable: environment variable with the server's key, if it wants one.
    """

    base_url: str
    model: str
    timeout_s: float = 60.0
    attempts: int = 4
    backoff_s: float = 1.0
    longest_wait_s: float = 30.0
    parallel: int = 8
    max_tokens: int = 256
    key_variable: str = "OPENAI_API_KEY"
    sleep: Callable[[float], None] = sleep_s

    def __post_init__(self) -> None:
        for name, least in (("attempts", 1), ("parallel", 1), ("max_tokens", 1), ("backoff_s", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"ChatServer.{name} must be at least {least}, got {getattr(self, name)}")
        if not self.timeout_s > 0:
            raise ValueError(f"ChatServer.timeout_s must be positive, got {self.timeout_s}")

    def answers(self, images_BHWC: NDArray[np.uint8], questions: Sequence[str]) -> list[str]:
        """The model's words on each image.

        Raises:
            ScoreError: a question failed in all attempts, or the server refuses it.
        """
        with ThreadPoolExecutor(self.parallel) as threads:
            return list(threads.map(self.ask, images_BHWC, questions))

    def ask(self, image_HWC: NDArray[np.uint8], question: str) -> str:
        """The model's words on one image; errors as those of `answers`."""
        body = json.dumps(self._body(image_HWC, question)).encode()
        wait_s = self.backoff_s
        for attempt in range(1, self.attempts + 1):
            try:
                return self._post(body)
            except _Retry as error:
                if attempt == self.attempts:
                    raise ScoreError(f"{self.base_url} failed {attempt} times: {error}") from error
                self.sleep(min(max(wait_s, error.after_s), self.longest_wait_s))
                wait_s *= 2
        raise AssertionError("not reached: the last attempt returns or raises")

    def _body(self, image_HWC: NDArray[np.uint8], question: str) -> dict[str, Any]:
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_png(image_HWC)}"}},
            {"type": "text", "text": question},
        ]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,  # the same image has the same score
        }

    def _post(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable]}"
        request = urllib.request.Request(f"{self.base_url.rstrip('/')}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                reply = response.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code in RETRIED:
                    raise _Retry(f"HTTP {error.code}", _seconds(error.headers.get("Retry-After"))) from error
                raise ScoreError(f"{self.base_url} refuses the request: HTTP {error.code}") from error
        except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, half an answer
            raise _Retry(f"{type(error).__name__}: {error}") from error
        try:
            words = json.loads(reply)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _Retry(f"not an answer: {reply[:80]!r}") from error
        if not isinstance(words, str):
            raise _Retry(f"not an answer: {reply[:80]!r}")
        return words


class ServerOCR:
    """The OCR reward with a vision model as the reader, such as DeepSeek-OCR.

    Args:
        question: what the model is asked to do.
    """

    name = "ocr"

    def __init__(self, *, server: ChatServer, question: str = "Free OCR.") -> None:
        self._server = server
        self._question = question

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        targets = [target_text(prompt) for prompt in prompts]
        reads = self._server.answers(images_BHWC, [self._question] * len(prompts))
        return np.array([ocr_score(read, target) for read, target in zip(reads, targets, strict=True)], np.float32)


class VLMJudge:
    """A mark from a vision-language model, as a share of the best mark.

    Args:
        question: "{prompt}" in it is the prompt's text; it must ask for a number.
        best: the best mark.
    """

    name = "vlm"

    def __init__(
        self,
        *,
        server: ChatServer,
        question: str = (
            'How well does this image show "{prompt}"? Answer with one whole number from 0 (not at all) to 10 '
            "(perfectly), and nothing else."
        ),
        best: float = 10.0,
    ) -> None:
        if "{prompt}" not in question:
            raise ValueError(f"VLMJudge.question must hold {{prompt}}, got {question!r}")
        if not best > 0:
            raise ValueError(f"VLMJudge.best must be positive, got {best}")
        self._server = server
        self._question = question
        self._best = best

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        questions = [self._question.replace("{prompt}", prompt.text) for prompt in prompts]
        return np.array([self._mark(words) for words in self._server.answers(images_BHWC, questions)], np.float32)

    def _mark(self, words: str) -> float:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", words)
        if not numbers or not 0 <= float(numbers[0]) <= self._best:
            raise ScoreError(f"the judge gave no mark from 0 to {self._best:g}: {words[:80]!r}")
        return float(numbers[0]) / self._best


def _png(image_HWC: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image_HWC.squeeze(-1) if image_HWC.shape[-1] == 1 else image_HWC).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _seconds(header: str | None) -> float:
    """Retry-After in seconds; its other form, a date, counts as no wish."""
    return float(header) if header and header.isdigit() else 0.0
