"""Read the events of a run from its file: all of them, or the new ones at each call."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from evener.errors import ConfigError
from evener.files import open_for_reading
from evener.observe.event_lines import from_line

MOST_LINE_BYTES: Final = 1 << 22
"""A longer line is not an event; that of a window of 1,000 ranks has 300 kB."""


class EventFollower:
    """Reads the events of a run piece by piece, also while they are written.

    Args:
        path: The file.
        on_skip: Called with line number and reason for lines that are not events, such as one torn
            by a kill.
        follow: Whether the file may be a symbolic link.
    """

    def __init__(
        self, path: Path, on_skip: Callable[[int, str], None], *, follow: bool = True
    ) -> None:
        self._path = path
        self._on_skip = on_skip
        self._follow = follow
        self._file: tuple[int, int] | None = None
        self._position = self._line = 0

    def is_replaced(self) -> bool:
        """Return whether the file was replaced or truncated, so that what was read is void."""
        there = self._path.stat()
        is_other = self._file not in (None, (there.st_dev, there.st_ino))
        return is_other or there.st_size < self._position

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield new events. An incomplete line is left for the next call.

        Raises:
            ConfigError: The file cannot be read, or is not a regular file.
        """
        try:
            yield from self._read()
        except OSError as error:
            raise ConfigError(
                f"event file {self._path} cannot be read: {error}; give the file or folder of a run"
            ) from error

    def _read(self) -> Iterator[dict[str, Any]]:
        with open_for_reading(self._path, follow=self._follow) as stream:
            there = os.fstat(stream.fileno())
            self._file = there.st_dev, there.st_ino
            stream.seek(self._position)
            # A longer line is read in pieces, none of which is an event.
            for line in iter(partial(stream.readline, MOST_LINE_BYTES), b""):
                if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                    break
                self._position += len(line)
                number = self._line + 1
                self._line += line.endswith(b"\n")
                if line.strip():
                    try:
                        event = from_line(line)
                    except ValueError as error:
                        self._on_skip(number, str(error))
                    else:
                        yield event


def each_event(
    path: Path, on_skip: Callable[[int, str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run one by one, in the order in which they were written.

    Args:
        path: The file.
        on_skip: As for ``EventFollower``.

    Raises:
        ConfigError: The file cannot be read.
    """
    return EventFollower(path, on_skip or (lambda _line, _why: None)).events()


def read_events(
    path: Path, on_skip: Callable[[int, str], None] | None = None
) -> list[dict[str, Any]]:
    """Return the events of a run; see ``each_event``."""
    return list(each_event(path, on_skip))


def newest_event(path: Path) -> dict[str, Any] | None:
    """Return the last event of a run; ``None`` if there is none."""
    with suppress(OSError, ValueError), open_for_reading(path) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - MOST_LINE_BYTES))
        return from_line(stream.read().rstrip().rpartition(b"\n")[2])
    return None
