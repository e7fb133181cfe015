import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from src.report.__main__ import main
from src.report.svg import Axis, Series, amount, line_chart
from tests.report.synthetic import write_run
from tests.report.test_page import Checked

DEARER = {"simple.Fixed": "bandit.Bandit", "spot_usd_per_gpu_hour: 2.5": "spot_usd_per_gpu_hour: 5"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    top = tmp_path_factory.mktemp("runs")
    fixed = [write_run(top / f"fixed{seed}", seed=seed, iterations=8, images=False) for seed in (1, 2)]
    bandit = write_run(top / "bandit", iterations=4, finished=False, images=False, changes=DEARER)
    return [*fixed, bandit]


@pytest.fixture(scope="module")
def text(folders: list[Path]) -> str:
    out = folders[0].parent / "out.html"
    assert main([*map(str, folders), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_needs_nothing_else(text: str) -> None:
    checked = Checked(text)
    assert checked.addresses == []
    assert "script" not in checked.tags
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", text)


def test_every_drawing_is_well_formed_and_described(text: str) -> None:
    drawings = re.findall(r"<svg xmlns.*?</svg>(?=<(?!/svg|svg [xy]=|rect|g>|path|text))", text)
    assert len(drawings) == 3 + 3 + 4 + 2 + 2
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.get("role") == "img"
        assert root.get("aria-label")


def test_groups_have_rows_with_means_and_spreads(text: str) -> None:
    rows = re.findall(
        r"<tr><th scope=\"row\"><b class=\"key c\d\"><span>(.)</span></b><span>(.*?)</span></th>(.*?)</tr>", text
    )
    assert [row[:2] for row in rows] == [("A", "planner fixed"), ("B", "planner bandit")]
    cells = [re.findall("<td>(.*?)</td>", row[2]) for row in rows]
    assert cells[0][:2] == ["1, 2", "8"]
    assert re.fullmatch(r"0\.\d{3}<small>0\.\d{3}–0\.\d{3}</small>", cells[0][4])
    assert cells[0][8] == "128"
    assert cells[1][:2] == ["1", "4"]
    assert cells[1][7:9] == ["–", "–"]


def test_a_group_of_several_runs_has_a_band(text: str) -> None:
    drawing = text[text.index('aria-label="Against hours.') :]
    drawing = drawing[: drawing.index("</svg>")]
    assert drawing.count('class="band c1"') == 1
    assert 'class="band c2"' not in drawing
    assert re.findall(r'<text class="tag c\d".*?>(.)</text>', drawing) == ["A", "B"]
    assert "A, planner fixed: 0." in drawing


def test_what_to_mind_is_said(text: str) -> None:
    words = Checked(text).text
    assert "unequal length" in words
    assert "means over seeds" in words
    assert "Some costs are missing" not in words


def test_costs_of_the_two_roles_have_one_scale(text: str) -> None:
    bars = re.findall(r'aria-label="(A|B) (reserved|spot)\. (.*?)">(.*?)</svg>', text)
    assert [bar[:2] for bar in bars] == [("A", "reserved"), ("A", "spot"), ("B", "reserved"), ("B", "spot")]
    widths = [sum(float(width) for width in re.findall(r'width="([\d.]+)%"', bar[3])) for bar in bars]
    assert max(widths) == pytest.approx(100, abs=0.01)
    assert bars[0][2].startswith("rollout ")


def test_runs_without_prices_are_compared_by_the_rest(tmp_path: Path) -> None:
    unknown = {"FixedPrices": "Other"}
    folders = [
        write_run(tmp_path / name, iterations=4, images=False, seed=seed, changes=unknown)
        for seed, name in enumerate("ab")
    ]
    assert main([*map(str, folders), "--out", str(tmp_path / "out.html")]) == 0
    words = Checked((tmp_path / "out.html").read_text(encoding="utf-8")).text
    assert "Some costs are missing: no prices that are known here: prices._target_=src.spot.prices.Other." in words
    assert "Against hours" in words
    assert "Against usd" not in words
    assert "Where the money went" not in words


def test_empty_runs_have_a_page_too(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out.html")]) == 0
    assert "Comparison of 2 runs" in Checked((tmp_path / "out.html").read_text(encoding="utf-8")).words


def test_names_are_escaped(tmp_path: Path) -> None:
    folders = [
        write_run(
            tmp_path / name, iterations=1, images=False, changes={"experiment: tiny_text": f"experiment: <i>{name}"}
        )
        for name in "ab"
    ]
    assert main([*map(str, folders), "--out", str(tmp_path / "out.html")]) == 0
    checked = Checked((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "experiment <i>a" in checked.words


def test_bad_input_is_refused_in_one_line(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(folders[0]), str(tmp_path / "out.html")
    lacking = write_run(tmp_path / "lacking", iterations=1, images=False)
    (lacking / "events.jsonl").write_text('{"time_s": 7.5, "kind": "worker_joined", "worker": "a"}\n')
    for arguments, message in (
        ([str(lacking), "--out", out], f"{lacking}/events.jsonl: an event lacks the field 'role'"),
        ([run, str(lacking), "--out", out], f"{lacking}/events.jsonl: an event lacks the field 'role'"),
        ([run, str(tmp_path), "--out", out], f"{tmp_path} is no run folder: it has no events.jsonl"),
        ([run, run, "--out", out], f"{run} is given twice"),
        ([run, str(folders[1]), "--out", str(tmp_path / "no" / "out.html")], "[Errno 2] No such file or directory: "),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}")
        assert error.count("\n") == 1
    assert not Path(out).exists()


def test_a_single_run_goes_where_it_is_told(folders: list[Path], tmp_path: Path) -> None:
    assert main([str(folders[0]), "--out", str(tmp_path / "one.html")]) == 0
    assert "Who did what" in Checked((tmp_path / "one.html").read_text(encoding="utf-8")).words
    assert not (folders[0] / "report.html").exists()


def test_tags_of_lines_that_end_together_are_apart() -> None:
    series = [Series(name, ((0, 0.0), (1.0, 1.0)), "c1", tag=name) for name in "ABCD"]
    drawing = line_chart(series, title="t", axis=Axis("hours", "h"))
    places = re.findall(r'<text class="tag c1" x="([\d.]+)" y="([\d.]+)"', drawing)
    assert len(set(places)) == 4
    points = [(float(x), float(y)) for x, y in places]
    assert all(
        abs(x - other_x) >= 10 or abs(y - other_y) >= 12
        for at, (x, y) in enumerate(points)
        for other_x, other_y in points[:at]
    )


def test_an_axis_of_hours_begins_at_zero_and_names_its_unit() -> None:
    drawing = line_chart([Series("r", ((0.5, 0.25), (1.0, 0.5)), "c1")], title="t", axis=Axis("hours", "h"))
    assert 'aria-label="t. r: 0.25 at 0.5 h, 0.5 at 1 h"' in drawing
    assert 'd="M175.0 ' in drawing
    assert "<title>r: 0.5 at 1 h</title>" in drawing


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, "0"), (0.03121, "0.031"), (0.2, "0.20"), (11.9, "11.90"), (1234.5, "1,234")]
)
def test_amounts_are_short(value: float, expected: str) -> None:
    assert amount(value) == expected
