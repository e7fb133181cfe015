"""Writes a run folder as one page, or several compared.

`python -m src.report RUN` writes RUN/report.html; `python -m src.report RUN RUN ...` writes comparison.html.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from src.report.compare_page import compare
from src.report.measure import measure
from src.report.read import Run, read_run
from src.report.run_page import page

Told = TypeVar("Told")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a folder that is no readable run, with a line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m src.report", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder, as printed at the end of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page goes")
    options = parser.parse_args(arguments)
    folders: list[Path] = options.runs
    default = folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")
    report: Path = options.out or default
    try:
        text = _text(folders)
        report.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0


def _text(folders: Sequence[Path]) -> str:
    if len(folders) == 1:
        return _told(folders[0], page)
    twice = next((folder for at, folder in enumerate(folders) if folder.resolve() in _resolved(folders[:at])), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    return compare([_told(folder, measure) for folder in folders])


def _told(folder: Path, tell: Callable[[Run], Told]) -> Told:
    run = read_run(folder)
    try:
        return tell(run)
    except KeyError as error:
        raise ValueError(f"{folder / 'events.jsonl'}: an event lacks the field {error}") from error


def _resolved(folders: Sequence[Path]) -> set[Path]:
    return {folder.resolve() for folder in folders}


if __name__ == "__main__":
    sys.exit(main())
