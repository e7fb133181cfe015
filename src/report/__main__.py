"""`python -m src.report RUN` writes RUN/report.html from the run folder RUN."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from src.report.read import read_run
from src.report.run_page import page


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a folder that is no readable run, with a line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m src.report", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, as printed at the end of a run")
    folder: Path = parser.parse_args(arguments).run
    try:
        run = read_run(folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = folder / "report.html"
    report.write_text(page(run), encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
