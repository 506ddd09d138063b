"""What a rank tells the launcher that started it: lines of JSON, on a pipe that ends with the rank.

The pipe is closed by ``exec``, too: so the launcher also learns of a rank that has become another
program. It leaves nothing in any folder, however a rank or the launcher ends.
"""

import json
import os
from contextlib import suppress
from typing import Any, Final

#: Set by evener's launcher: the descriptor of the pipe.
NEWS_FD = "EVENER_NEWS_FD"

#: Where a rank is, as the launcher sees it.
JOINING: Final = "joining"
"""It waits for the other ranks of the launcher's team."""
JOINED: Final = "joined"
LEFT: Final = "left"
"""It has closed its connections to them."""

_line: list[int] = []


def open_line() -> None:
    """Takes the pipe over for this process alone, whatever this process starts or forks."""
    given = os.environ.pop(NEWS_FD, None)
    if given is not None:
        os.set_inheritable(int(given), False)
        _line.append(int(given))
        # A forked child speaks for itself, and its copy would hide that the rank has ended.
        os.register_at_fork(after_in_child=_close_line)


def _close_line() -> None:
    while _line:  # a child's own children have none
        os.close(_line.pop())


def has_line() -> bool:
    """Whether a launcher listens to this process."""
    return bool(_line)


def tell(**news: Any) -> None:
    """Tells the launcher, where there is one; not for its children and not when it has gone."""
    with suppress(OSError):
        data = json.dumps(news).encode() + b"\n" if _line else b""
        while data:
            data = data[os.write(_line[0], data) :]


class Listener:
    """The launcher's end of one rank's pipe.

    Attributes:
        place: Where the rank is: ``""`` at first, then ``JOINING``, ``JOINED`` or ``LEFT``.
        failure: What it says of its failure, if it has.
        has_ended: Whether the rank has ended, or become another program.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.place = ""
        self.failure: dict[str, Any] | None = None
        self.has_ended = False
        self._rest = b""

    def hear(self) -> None:
        """Takes in what the rank has told so far."""
        while not self.has_ended:
            try:
                chunk = os.read(self.descriptor, 65_536)
            except BlockingIOError:
                return
            self.has_ended = not chunk
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                news = json.loads(line)
                self.place = news.get("place", self.place)
                self.failure = news.get("failure", self.failure)

    def close(self) -> None:
        """Gives the pipe back."""
        os.close(self.descriptor)
