"""Opening models: what is refused, and with which words."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from src.models.load import load_adapter
from src.models.location import is_model
from src.models.pipelines import PipelineSettings

ASSETS = Path(__file__).parents[2] / "assets"


class Hub(BaseHTTPRequestHandler):
    """A hub where one model is gated and all others are unknown."""

    def do_HEAD(self) -> None:
        code = "GatedRepo" if "/gated/" in self.path else "RepoNotFound"
        if "/bad-revision/" in self.path:
            code = "RevisionNotFound"
        self.send_response(403 if code == "GatedRepo" else 404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("repo", "revision", "message"),
    [
        ("someone/gated", None, r"someone/gated is gated: accept its licence at .*/gated, then `hf auth login`"),
        ("someone/missing", None, r"someone/missing is neither a folder here nor public on the hub"),
        ("someone/model", "bad-revision", r"someone/model has no revision 'bad-revision'"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_refuses_is_one_clear_error(repo: str, revision: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_adapter(repo, revision=revision)


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="model someone/model cannot be downloaded"):
        load_adapter("someone/model")


def test_what_is_a_model_path(tmp_path: Path) -> None:
    assert is_model(ASSETS / "tiny_digits")
    assert is_model("Qwen/Qwen-Image")
    assert not is_model(tmp_path)
    assert not is_model("/no/such/folder")
    assert not is_model("name")


def test_unknown_settings_and_bad_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny model, which takes no settings, got \['height'\]"):
        load_adapter(ASSETS / "tiny_digits", height=32)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(TypeError, match="hight"):
        load_adapter(tmp_path, hight=32)
    with pytest.raises(ValueError, match="incomplete or damaged"):
        load_adapter(tmp_path)
    for bad, message in (
        ({"height": 40}, "height must be a positive multiple of 16, got 40"),
        ({"width": 0}, "width must be a positive multiple of 16, got 0"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PipelineSettings(**bad)  # type: ignore[arg-type]


def test_naming_a_family_says_nothing() -> None:
    """Its pipelines name image processors that want packages we lack, and do without."""
    program = "from src.models import flux, sd3; flux.flux_family(), sd3.sd3_family()"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ASSETS.parent, capture_output=True, text=True, check=True
    )
    assert ended.stdout + ended.stderr == ""
