"""Draws images from a base model or a run: `python -m src.generate --run outputs/... --prompt "..." --seed 0 1`."""

from __future__ import annotations

import sys

from src.app import errors
from src.app.generate import main

if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(errors.exit_code_of(error))
