"""Output in the terminal; training continues if its reader ends."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

#: Set by evener's launcher for ranks whose lines get a prefix: descriptors of its own output.
TERMINAL_FDS: Final = "EVENER_TERMINAL_FDS"

CLEAR_LINE = "\r\x1b[2K"


class _Output:
    """Standard output or error of a rank whose lines get a prefix."""

    def __init__(self, number: int, pipe: int, terminal: int) -> None:
        self.pipe, self.terminal = pipe, terminal
        self._number, self._in_use = number, pipe

    def use(self, target: int, stream: TextIO) -> None:
        if target != self._in_use and os.path.sameopenfile(self._number, self._in_use):
            stream.flush()
            os.dup2(target, self._number)
            self._in_use = target


_outputs: list[_Output] = []


def say(text: str, end: str = "\n") -> None:
    """Write text to standard error at once; on a terminal, in place of a line of progress.

    If the reader has ended (``2>&1 | head``, a closed terminal), this and all further output is
    dropped.
    """
    try:
        sys.stderr.write((CLEAR_LINE if sys.stderr.isatty() else "") + text + end)
        sys.stderr.flush()
    except (OSError, ValueError):
        _let_go()


def answer(text: str) -> None:
    """Write a line to standard output.

    Raises:
        SystemExit: The reader has ended, as ``head`` does.
    """
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        with Path(os.devnull).open("w") as nowhere:  # Python flushes at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def warn(text: str) -> None:
    """Write a warning to standard error; see ``say``."""
    say(f"warning: {text}")


def allow_unmarked(descriptors: Sequence[int]) -> None:
    """Use the launcher's own output and error in ``write_unmarked``.

    Args:
        descriptors: Inherited descriptors of the launcher's terminal.
    """
    for number, descriptor in enumerate(descriptors, start=1):
        os.set_inheritable(descriptor, False)  # what this process starts inherits the one in use
        _outputs.append(_Output(number, os.dup(number), descriptor))


def write_unmarked(is_main: bool) -> None:
    """Write without prefix, like rank 0, while this rank is the main process.

    Otherwise the launcher puts the rank before each line. Without effect on rank 0, which never has
    a prefix, without evener's launcher, and on output that the user has redirected.
    """
    for stream, output in zip((sys.stdout, sys.stderr), _outputs, strict=False):
        with suppress(OSError, ValueError):
            output.use(output.terminal if is_main else output.pipe, stream)


def printable(text: str) -> str:
    """Return text without control characters, which a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _let_go() -> None:
    # Text that could not be written stays in Python's buffer, and would fail again at exit.
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stderr.fileno())
        finally:
            os.close(nowhere)
