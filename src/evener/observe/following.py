"""Read the events of a run from its files: all of them, or the new ones at each look."""

import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self

from evener.errors import ConfigError
from evener.files import open_for_reading
from evener.observe.event_lines import LineReader
from evener.observe.jsonl import part_after, parts_of
from evener.observe.lineage import VOIDING, Voids

MOST_LINE_BYTES: Final = 1 << 20
"""A longer line is not an event; that of a window of 1,000 ranks has 90 kB."""

#: Most bytes that one look takes in.
LOOK_BYTES: Final = 256 << 10

_HEAD_BYTES: Final = 60  # a line begins with the time and the type of its event


class Look(NamedTuple):
    """The result of a look.

    Attributes:
        events: Those that are new, in the order in which they were written.
        read_part: How much of the files has been read, from 0 to 1.
        is_all: Whether everything was read.
    """

    events: list[dict[str, Any]]
    read_part: float
    is_all: bool


class EventFollower:
    """Reads the events of a run piece by piece, also while they are written.

    A line that has no end yet is left for the next look. A file that has become shorter, or was
    replaced, is read from its beginning. ``events.jsonl`` may be followed by ``events.1.jsonl`` and
    so on; one of these that is removed as too old is read to its end.

    Args:
        path: The first file.
        on_skip: Called with line number (counted over all files) and reason for lines that are not
            events, such as one torn by a kill.
        follow: Whether the files may be symbolic links.
        words: If given, lines may be passed over, unread, that hold none of these.
        columns: As for ``LineReader``.
        skim_bytes: If given, the newest bytes of which every window is read. Of older windows, one
            in several is read: the older they are, the fewer. Its ``stands_for`` is the number of
            windows that it represents: itself, and those right before it that were not read.
    """

    def __init__(
        self,
        path: Path,
        on_skip: Callable[[int, str], None],
        *,
        follow: bool = True,
        words: Sequence[bytes] = (),
        columns: Container[str] | None = None,
        skim_bytes: int | None = None,
    ) -> None:
        self._path = path
        self._on_skip = on_skip
        self._follow = follow
        self._words = words
        self._columns = columns
        self._skim_bytes = skim_bytes
        self._stream: BinaryIO | None = None
        self._part, self._rest, self._line = path, b"", 0
        self.begin_anew()

    def begins(self) -> bool:
        """Return whether the next look is the first one at a file: earlier events are void."""
        if self._has_begun and self._is_replaced():
            self.begin_anew()
        return not self._has_begun

    def look(self) -> Look:
        """Read new lines, up to ``LOOK_BYTES``.

        Raises:
            OSError: The file cannot be read, or is not a regular file.
        """
        self._has_begun = True
        if self._stream is None:
            self._stream = self._open()
        following = part_after(self._path, self._part)
        read, size = self._progress()
        self._stride = 1 + max(0, size - read) // self._skim_bytes if self._skim_bytes else 1
        data = self._stream.read(LOOK_BYTES)
        events = self._take(data)
        is_end = len(data) < LOOK_BYTES
        if following is not None and is_end:
            # It was there before this part was read to its end, so nothing more comes here.
            events += self._take(b"\n") if self._rest else []
            self.close()
            self._part = following
        read, size = self._progress()
        part = min(1.0, read / size) if size else 1.0
        return Look(events, part, is_end and following is None)

    def unfinished(self) -> list[dict[str, Any]]:
        """Return the event of a last line that lacks its end, if it is whole otherwise."""
        with suppress(ValueError):
            return [self._lines.event(self._rest)]
        return []

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_anew(self) -> None:
        """Read the file from its beginning."""
        self.close()
        self._part, self._rest, self._line = self._path, b"", 0
        self._has_begun = self._is_too_long = False
        self._lines = LineReader(self._columns)
        self._passed: list[bytes] = []  # windows after the last one that was read

    def _open(self) -> BinaryIO:
        while True:
            try:
                return open_for_reading(self._part, follow=self._follow)
            except FileNotFoundError:
                following = part_after(self._path, self._part)
                if self._part == self._path or following is None:
                    raise
                self._part = following  # this one was too old

    def _is_replaced(self) -> bool:
        try:
            there = self._part.stat()
        except FileNotFoundError:
            return part_after(self._path, self._part) is None
        if self._stream is None:
            return False
        own = os.fstat(self._stream.fileno())
        is_other = (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)
        return is_other or own.st_size < self._stream.tell()

    def _progress(self) -> tuple[int, int]:
        """Return how many bytes have been read, and how many there are."""
        parts = parts_of(self._path)
        sizes = [part.stat().st_size if part.exists() else 0 for part in parts]
        read = sum(sizes[: parts.index(self._part)]) if self._part in parts else 0
        read += self._stream.tell() if self._stream is not None else 0
        return read, sum(sizes)

    def _take(self, data: bytes) -> list[dict[str, Any]]:
        data = self._rest + data
        if self._words and not any(word in data for word in self._words):
            data = data[max(0, data.rfind(b"\n")) :]  # the end of a line, and what follows it
        *lines, self._rest = data.split(b"\n")
        events: list[dict[str, Any]] = []
        for line in lines:
            self._line += 1
            is_whole, self._is_too_long = not self._is_too_long, False
            if not line.strip():
                continue
            for one, count in self._chosen(line):
                try:
                    if not is_whole or len(one) > MOST_LINE_BYTES:
                        raise ValueError(f"it has more than {MOST_LINE_BYTES:,} bytes")
                    event = self._lines.event(one)
                    events.append({**event, "stands_for": count} if count > 1 else event)
                except ValueError as error:
                    self._on_skip(self._line, str(error))
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._is_too_long = b"", True
        return events

    def _chosen(self, line: bytes) -> list[tuple[bytes, int]]:
        """Return the lines that are to be read now, and for how many windows each stands."""
        if not self._skim_bytes:
            return [(line, 1)]
        head = line[:_HEAD_BYTES]
        is_window = b'"type":"window"' in head
        if is_window:
            self._passed.append(line)
            if len(self._passed) < self._stride and b'"member"' not in line:
                return []
        elif b'"type":"plan"' in head or not self._passed:
            return [(line, 1)]
        # The windows on either side of an evaluation must not count its time as their own.
        passed, self._passed = self._passed, []
        return [(passed[-1], len(passed)), *([] if is_window else [(line, 1)])]


def read_events(
    path: Path, on_skip: Callable[[int, str], None] | None = None
) -> list[dict[str, Any]]:
    """Return the events of a run, in the order in which they were written; see ``each_event``."""
    return list(each_event(path, on_skip))


def each_event(
    path: Path,
    on_skip: Callable[[int, str], None] | None = None,
    *,
    follow: bool = True,
    words: Sequence[bytes] = (),
    columns: Container[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run one by one, however many there are.

    Args:
        path: The first file; the parts that follow it are read, too.
        on_skip: As for ``EventFollower``. A last line that is just being written is left out
            silently.
        follow: As for ``EventFollower``.
        words: As for ``EventFollower``.
        columns: As for ``LineReader``.

    Raises:
        ConfigError: The file cannot be read.
    """
    skip = on_skip or (lambda _line, _why: None)
    with EventFollower(path, skip, follow=follow, words=words, columns=columns) as follower:
        has_begun = is_all = False
        while not is_all:
            is_other = follower.begins() and has_begun
            try:
                found = follower.look()
            except OSError as error:
                raise ConfigError(
                    f"event file {path} cannot be read: {error}; give the file or folder of a run"
                ) from error
            if is_other:
                raise ConfigError(f"event file {path} was replaced while it was read; try again")
            has_begun = True
            yield from found.events
            is_all = found.is_all and not found.events
        yield from follower.unfinished()


def each_effective_event(
    path: Path, on_skip: Callable[[int, str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run but for windows that a later event in it made void.

    Raises:
        ConfigError: The file cannot be read.
    """
    voids = find_voids(path)
    return (event for event in each_event(path, on_skip) if voids.counts(event))


def find_voids(path: Path, *, follow: bool = True) -> Voids:
    """Return which windows of a run are void, from a quick look at its files.

    Args:
        path: As for ``each_event``.
        follow: As for ``EventFollower``.

    Raises:
        ConfigError: They cannot be read.
    """
    words = [kind.encode() for kind in VOIDING]
    found = each_event(path, follow=follow, words=words)
    return Voids([event for event in found if event["type"] in VOIDING])


def newest_event(path: Path) -> dict[str, Any] | None:
    """Return the last event of a run; ``None`` for a window, or where there is none."""
    try:
        *_, part = parts_of(path)
        with open_for_reading(part) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - MOST_LINE_BYTES))
            return LineReader().event(stream.read().rstrip().rpartition(b"\n")[2])
    except (OSError, ValueError):
        return None
