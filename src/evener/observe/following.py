"""Read the events of a run from its files: all of them, or the new ones at each look."""

import os
import re
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
LOOK_BYTES: Final = 1 << 20

#: A line that is not a window, after the end of the line before it.
_OTHER: Final = re.compile(rb'\n(?!\{"t":[-+.0-9e]+,"type":"window")([^\n]+)')
_PIECE_BYTES: Final = 64 << 10  # larger ones would be new memory from the kernel each time
_PLAN: Final = b'"type":"plan"'
_NAMES: Final = b'"member":['  # in the line of a window that names its team
_MOST_BACK: Final = 16 << 20  # so far from the end, that line is looked for


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
            in several is read, about as many bytes again. Its ``stands_for`` is the number of
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
        self._part, self._rest, self._line = path, b"\n", 0
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
        skim_bytes = self._skim_bytes or size
        self._stride = 1 + size // skim_bytes if size - read > skim_bytes else 1
        events: list[dict[str, Any]] = []
        piece_bytes = min(_PIECE_BYTES, LOOK_BYTES)
        for _ in range(LOOK_BYTES // piece_bytes):
            data = self._stream.read(piece_bytes)
            events += self._take(data)
            if is_end := len(data) < piece_bytes:
                break
        if following is not None and is_end:
            # It was there before this part was read to its end, so nothing more comes here.
            events += self._take(b"\n") if len(self._rest) > 1 else []
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
        self._part, self._rest, self._line = self._path, b"\n", 0
        self._has_begun = self._is_too_long = False
        self._lines = LineReader(self._columns)
        self._stride = 1
        self._gap = 0  # so many more bytes of windows are passed over
        self._num_passed, self._last_passed = 0, b""  # since the last window that was read

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
        if self._is_too_long and (stop := data.find(b"\n", 1)) >= 0:
            self._line, self._is_too_long, data = self._line + 1, False, data[stop:]
            self._on_skip(self._line, f"it has more than {MOST_LINE_BYTES:,} bytes")
        if self._words and not any(word in data for word in self._words):
            data = data[data.rfind(b"\n") :]  # the end of a line, and what follows it
        end = data.rfind(b"\n")
        self._rest = data[end:]
        events: list[dict[str, Any]] = []
        for line, count in self._chosen(data, end):
            if not line.strip():
                continue
            try:
                if len(line) > MOST_LINE_BYTES:
                    raise ValueError(f"it has more than {MOST_LINE_BYTES:,} bytes")
                event = self._lines.event(line)
                events.append({**event, "stands_for": count} if count > 1 else event)
            except ValueError as error:
                self._on_skip(self._line, str(error))
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._is_too_long = b"\n", True
        return events

    def _chosen(self, data: bytes, end: int) -> Iterator[tuple[bytes, int]]:
        """Yield the lines that are to be read, and how many each stands for.

        Nothing is done for each line that is passed over: a file of 1 GB has millions of them.

        Args:
            data: A newline, and lines.
            end: Where the newline of the last whole line is.
        """
        if self._stride > 1:
            self._learn_names(data, end)
        done = 0
        for other in _OTHER.finditer(data, 0, end):
            yield from self._windows(data, done, other.start())
            done = other.end()
            if _PLAN not in other[1] and self._num_passed:
                # The windows on either side of an evaluation must not count its time as theirs.
                yield self._last_passed, self._num_passed
                self._gap = self._num_passed = 0
            self._line += 1
            yield other[1], 1
        yield from self._windows(data, done, end)

    def _windows(self, data: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
        """Yield the same for lines that are all windows, between two newlines."""
        while begin < end:
            self._gap = self._gap if self._stride > 1 else 0
            stop = data.find(b"\n", begin + 1 + self._gap, end + 1)
            is_passed = stop < 0
            stop = end if is_passed else stop
            last = data.rfind(b"\n", begin, stop) + 1
            count = data.count(b"\n", begin, stop)
            self._line, self._num_passed = self._line + count, self._num_passed + count
            if is_passed:
                self._gap, self._last_passed = self._gap - (end - begin), data[last:stop]
                return
            count, self._num_passed = self._num_passed, 0
            self._gap = (stop - last) * (self._stride - 1)
            yield data[last:stop], count
            begin = stop

    def _learn_names(self, data: bytes, end: int) -> None:
        """Read the lines that name a team: a window that is read later may need them."""
        at = data.find(_NAMES, 0, end)
        while at >= 0:
            stop = data.index(b"\n", at)
            with suppress(ValueError):
                self._lines.event(data[data.rfind(b"\n", 0, at) : stop])
            at = data.find(_NAMES, stop, end)


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


def newest_events(
    path: Path, num_bytes: int, *, follow: bool = True, columns: Container[str] | None = None
) -> list[dict[str, Any]]:
    """Return the first event of a run, and those in the last bytes of its newest file.

    Windows of a team that is not the newest one may be missing.

    Args:
        path: The first file.
        num_bytes: Of so many bytes.
        follow: As for ``EventFollower``.
        columns: As for ``LineReader``.

    Raises:
        OSError: A file cannot be read, or is not a regular file.
    """
    reader = LineReader(columns)
    *_, part = parts_of(path)
    with open_for_reading(path, follow=follow) as stream:
        first = stream.readline(MOST_LINE_BYTES)
    with open_for_reading(part, follow=follow) as stream:
        size, data, back = stream.seek(0, os.SEEK_END), b"", num_bytes
        while _NAMES not in data and len(data) < min(size, _MOST_BACK):
            stream.seek(max(0, size - back))
            data, back = stream.read(min(size, back)), 4 * back
    at = data.rfind(_NAMES)
    names = data[data.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0] if at >= 0 else b""
    torn, *lines = data[-num_bytes:].split(b"\n")
    is_whole = part == path and size <= num_bytes
    with suppress(ValueError):
        reader.event(names)
    events = []
    for line in [torn if is_whole else first, *lines]:
        with suppress(ValueError):
            events.append(reader.event(line))
    return events
