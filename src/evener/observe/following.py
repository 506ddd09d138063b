"""Events of a run that goes on: each look takes in what has been written since the one before."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from evener.files import open_for_reading
from evener.observe.events import Event, check_fields
from evener.observe.jsonl import MOST_LINE_BYTES, part_after
from evener.parsing import parse_json

#: Most bytes that one look takes in.
LOOK_BYTES: Final = 4 << 20


class Look(NamedTuple):
    """What a look has found.

    Attributes:
        events: Those that are new, in the order in which they were written.
        is_anew: Whether the file is another one than before: earlier events are void.
        read_part: How much of the file has been read, from 0 to 1.
    """

    events: list[Event]
    is_anew: bool
    read_part: float


class EventFollower:
    """Reads the events of a run bit by bit, also while they are written.

    A line that has no end yet is left for the next look. A file that has become shorter, or was
    replaced, is read from its beginning. ``events.jsonl`` may be followed by ``events.1.jsonl`` and
    so on.

    Args:
        path: The first file.
        on_skip: Called with line number and reason for lines that are not events.
    """

    def __init__(self, path: Path, on_skip: Callable[[int | None, str], None]) -> None:
        self._path = path
        self._on_skip = on_skip
        self._stream: BinaryIO | None = None
        self._part = path
        self._rest = b""
        self._is_too_long = False  # the line that is being read: it is left out
        self._line = 0

    def look(self) -> Look:
        """Take in what is new, up to ``LOOK_BYTES``.

        Raises:
            OSError: The file cannot be read, or is not a regular file.
        """
        is_anew = self._stream is not None and self._is_replaced()
        if is_anew:
            self._begin_anew()
        if self._stream is None:
            self._begin_anew()
            self._stream = open_for_reading(self._path)
        following = part_after(self._path, self._part)
        data = self._stream.read(LOOK_BYTES)
        events = self._take(data)
        if following is not None and len(data) < LOOK_BYTES:
            # It was there before this part was read to its end, so nothing more comes here.
            events += self._take(b"\n") if self._rest else []
            self._stream.close()
            self._stream, self._part = None, following
            with suppress(FileNotFoundError):  # removed meanwhile: the next look begins anew
                self._stream = open_for_reading(following)
        return Look(events, is_anew, self._read_part())

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_anew(self) -> None:
        self.close()
        self._part, self._rest, self._is_too_long = self._path, b"", False
        self._line = 0

    def _is_replaced(self) -> bool:
        assert self._stream is not None
        own = os.fstat(self._stream.fileno())
        if own.st_size < self._stream.tell():
            return True
        try:
            there = self._part.stat()
        except FileNotFoundError:  # too old to be kept, or the folder was begun anew
            return True
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

    def _read_part(self) -> float:
        if self._stream is None:
            return 0.0
        size = os.fstat(self._stream.fileno()).st_size
        return min(1.0, self._stream.tell() / size) if size else 1.0

    def _take(self, data: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[Event] = []
        for line in lines:
            self._line += 1
            is_whole, self._is_too_long = not self._is_too_long, False
            if not line.strip():
                continue
            try:
                if not is_whole or len(line) > MOST_LINE_BYTES:
                    raise ValueError(f"it has more than {MOST_LINE_BYTES:,} bytes")
                event = parse_json(line)
                check_fields(event)
            except ValueError as error:
                self._on_skip(self._line, str(error))
            else:
                events.append(event)
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._is_too_long = b"", True
        return events
