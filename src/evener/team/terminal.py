"""Words for people, on standard error; a reader that goes away ends no training."""

import os
import sys
from contextlib import suppress

CLEAR_LINE = "\r\x1b[2K"


def say(text: str, end: str = "\n") -> None:
    """Write text to standard error at once; on a terminal, in place of a line of progress.

    When nobody reads any more (``2>&1 | head``, a closed terminal), it and all that follows goes
    nowhere.
    """
    try:
        sys.stderr.write((CLEAR_LINE if sys.stderr.isatty() else "") + text + end)
        sys.stderr.flush()
    except (OSError, ValueError):
        _let_go()


def warn(text: str) -> None:
    """Write a warning to standard error; see ``say``."""
    say(f"warning: {text}")


def printable(text: str) -> str:
    """Return text of other origin, without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _let_go() -> None:
    # What could not be written stays in Python's buffer, and would fail again at the very end.
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stderr.fileno())
        finally:
            os.close(nowhere)
