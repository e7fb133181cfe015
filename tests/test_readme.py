"""What the README points at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = sorted(set(re.findall(r"\]\((?!https?://)([^)#]+)\)", README)))


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_to_files(link: str) -> None:
    assert (ROOT / link).is_file()


def table() -> list[list[str]]:
    """Cells of the table of features, without its head."""
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    first = next(number for number, row in enumerate(rows) if "[flow_grpo]" in row)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[first + 1 :]]
    return [row for row in cells if len(row) == 8]


def test_every_mark_of_ours_is_backed_by_tests() -> None:
    """What we say that we have links to test files that hold tests; what we lack says so."""
    rows = table()
    assert len(rows) >= 10
    for feature, ours, *others in rows:
        links = re.findall(r"\]\((tests/[^)]+)\)", ours)
        assert links or ours == "no", f"{feature}: {ours}"
        assert all("def test_" in (ROOT / link).read_text(encoding="utf-8") for link in links)
        assert all(others), f"{feature}: an entry is empty"


def test_so_many_test_files_are_ours() -> None:
    (told,) = re.findall(r"over (\d+), on CPUs", README)
    assert len(list((ROOT / "tests").rglob("test_*.py"))) > int(told)
