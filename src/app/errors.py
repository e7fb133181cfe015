"""How an error ends the program: one line on standard error, and an exit code."""

from __future__ import annotations

import sys
import traceback

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from src.app.config import ConfigError
from src.app.processes import BAD_INPUT, FAILED, INTERRUPTED


class JobFailed(RuntimeError):
    """The job ended before its last iteration; the message says why, and how to go on."""


class Interrupted(Exception):
    """The user asked the job to stop; it has saved a checkpoint."""


def exit_code_of(error: BaseException) -> int:
    """Prints the error as its kind deserves. Only what nobody foresaw has a traceback."""
    match error:
        case Interrupted() | KeyboardInterrupt():
            _say(error)
            return INTERRUPTED
        case ConfigError() | HydraException() | OmegaConfBaseException():
            _say(error)
            return BAD_INPUT
        case JobFailed():
            _say(error)
            return FAILED
    traceback.print_exception(error)
    return FAILED


def _say(error: BaseException) -> None:
    print(f"error: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
