"""Memory per GPU, seconds and usd of an experiment: `python -m src.estimate experiment=qwen_image_ocr`."""

from __future__ import annotations

import sys

from src.app import errors
from src.app.estimate import main

if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(errors.exit_code_of(error))
