import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from src.core.clock import duration
from src.report.__main__ import main
from src.report.images import data_uri
from src.report.lanes import timeline_chart
from src.report.read import read_run
from src.report.run_page import page
from src.report.svg import Series, line_chart, ticks
from src.report.timeline import Row, Span, Timeline
from tests.report.synthetic import write_run

VOID = {"meta", "img", "br", "link"}


class Checked(HTMLParser):
    """Collects text, tags and addresses of a page, and fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.alts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and value != "data:,":  # an empty icon: browsers ask for one otherwise
                self.addresses.append(value or "")
            if name == "alt":
                self.alts.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


def test_the_command_writes_one_page_that_needs_nothing_else(folder: Path) -> None:
    assert main([str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    checked = Checked(text)
    assert len(checked.addresses) == 16
    assert all(address.startswith("data:image/png;base64,") for address in checked.addresses)
    assert "script" not in checked.tags
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "spot local/1" in checked.text
    assert "0.0312 usd" in checked.text
    assert checked.alts[0].startswith("before training: KITE, reward 0.")


def test_every_drawing_is_well_formed_and_described(folder: Path) -> None:
    drawings = re.findall(r"<svg xmlns.*?</svg>(?=<(?!/svg|svg [xy]=|rect|g>|path|text))", page(read_run(folder)))
    assert len(drawings) == 15
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.get("role") == "img"
        assert root.get("aria-label")


def test_prompts_and_config_are_escaped(folder: Path) -> None:
    text = page(read_run(folder))
    assert "a <b> & c" in Checked(text).words
    assert "<b> &" not in text


def test_an_unfinished_run_has_a_page_too(tmp_path: Path) -> None:
    checked = Checked(page(read_run(write_run(tmp_path / "run", iterations=2, finished=False, images=False))))
    assert "unfinished" in checked.words
    assert "Before and after" not in checked.words


def test_an_empty_run_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    assert "unfinished" in Checked(page(read_run(tmp_path))).words


def test_a_missing_or_broken_picture_is_said_to_be_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", iterations=1)
    (folder / "images" / "000_00.png").unlink()
    (folder / "images" / "001_01.png").write_bytes(b"not a picture")
    assert Checked(page(read_run(folder))).words.count("no image") == 2


def test_large_pictures_are_scaled_down(tmp_path: Path) -> None:
    Image.effect_noise((1024, 512), 50).save(tmp_path / "large.png")
    assert len(data_uri(tmp_path / "large.png")) < (tmp_path / "large.png").stat().st_size / 3


@pytest.mark.timeout(60)
def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "src.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} is no run folder: it has no events.jsonl\n"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.12, 0.58, [0.0, 0.2, 0.4, 0.6]),
        (0, 24, [0, 10, 20, 30]),
        (-1, 1, [-1, 0, 1]),
        (3, 3, [2.98, 2.99, 3.0, 3.01, 3.02]),
        (0, 0, [0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 4) == expected


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(3, 8))
def test_ticks_cover_the_range_with_few_marks(low: float, width: float, count: int) -> None:
    marks = ticks(low, low + width, count)
    assert marks[0] <= low + 1e-6 * abs(low) + 1e-9
    assert marks[-1] >= low + width - 1e-6 * abs(low + width) - 1e-9
    assert 2 <= len(marks) <= count + 2
    assert marks == sorted(set(marks))


def test_a_chart_places_its_points() -> None:
    drawing = line_chart([Series("r", ((0, 0.0), (10, 1.0)), "c1")], title="t", width=320, height=220)
    assert 'd="M44.0 186.0L306.0 12.0"' in drawing
    assert 'aria-label="t. r: 0 at iteration 0, 1 at iteration 10"' in drawing
    assert "<title>r: 1 at 10</title>" in drawing


def test_a_chart_of_a_single_point_is_drawn() -> None:
    assert "<circle" in line_chart([Series("r", ((3, 0.5),), "c1")], title="t")


def test_a_timeline_places_spans_by_time() -> None:
    row = Row("w", "spot", spans=[Span(2, 4, "explore", "x"), Span(6, 8, "train", "y", lost=True)])
    drawing = timeline_chart(Timeline(rows=(row,), end_s=8))
    assert '<rect class="explore" x="25.000%" y="5" width="25.000%"' in drawing
    assert drawing.count("url(#lost)") == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.44, "8.4 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (59.96, "1 min 00 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
