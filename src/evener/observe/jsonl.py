"""Events in a file, one JSON object a line, appended over all sessions of a run."""

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from evener.errors import EvenerError
from evener.files import open_for_reading, open_regular
from evener.observe.events import Event, Sink, check_fields
from evener.parsing import parse_json

MOST_LINE_BYTES: Final = 16 * 1024 * 1024
"""A longer line is not an event; that of a window of 1,000 ranks has 200 kB."""


_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str)


class JsonlSink(Sink):
    """Appends events to a file; each is with the kernel when ``emit`` returns.

    A file that is removed meanwhile is begun anew. A line that was torn by a killed process or a
    full disk is ended before the next one begins. Numbers that are not finite become ``null``, for
    readers that know strict JSON only.
    """

    continues = True

    def __init__(self, path: Path, *, on_warning: Callable[[str], None] | None = None) -> None:
        """Open the file for appending; make its folder if needed.

        Args:
            path: The file, such as ``runs/first/events.jsonl``.
            on_warning: Called once, when an event cannot be written.

        Raises:
            EvenerError: The file cannot be opened.
        """
        self._path = path
        self._on_warning = on_warning
        self._lock = threading.Lock()
        try:
            self._file: int | None = _open(path)
        except OSError as error:
            raise EvenerError(
                f"event file {path} cannot be opened: {error}; choose a folder that is writable"
            ) from error
        self._torn = _ends_torn(self._file)

    def emit(self, event: Event) -> None:
        """Append one event; a full disk is reported once and does not raise."""
        line = to_line(event)
        with self._lock:
            if self._file is None:
                self._warn("it is closed")
                return
            try:
                if os.fstat(self._file).st_nlink == 0:
                    self._begin_anew()
                data = b"\n" + line if self._torn else line
                written = os.write(self._file, data)
            except OSError as error:
                self._warn(str(error))
                return
            # One newline in front at most, so that any cut leaves a torn line.
            self._torn = written < len(data)
            if self._torn:
                self._warn("the disk is full")

    def close(self) -> None:
        """Force the file onto the disk and close it; may be called again."""
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            try:
                os.fsync(file)
            except OSError as error:
                self._warn(str(error))
            finally:
                os.close(file)

    def _begin_anew(self) -> None:
        """Go on in a new file: the old one was removed, and with it what was in it."""
        assert self._file is not None
        fresh = _open(self._path)
        os.close(self._file)
        self._file, self._torn = fresh, _ends_torn(fresh)
        self._warn("the file was removed, and is begun anew")

    def _warn(self, cause: str) -> None:
        on_warning, self._on_warning = self._on_warning, None
        if on_warning is not None:
            on_warning(
                f"events are missing from {self._path}: {cause}; training goes on, "
                "but reports will have gaps: free disk space there"
            )


def to_line(event: Event) -> bytes:
    """Return an event as one line of strict JSON; what JSON does not know becomes its text."""
    try:
        text = _ENCODER.encode(event)
    except ValueError:
        text = _ENCODER.encode(strict_json(event))
    return text.encode() + b"\n"


def read_events(
    path: Path, on_skip: Callable[[int, str], None] | None = None
) -> list[dict[str, Any]]:
    """Read the events of a run, in the order they were written.

    Args:
        path: The file.
        on_skip: Called with line number and reason for lines that are not events, such as one torn
            by a kill. A last line that is just being written is left out without a word.

    Raises:
        EvenerError: The file cannot be read.
    """
    return list(each_event(path, on_skip))


def each_event(
    path: Path, on_skip: Callable[[int, str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run one by one, however many there are; see ``read_events``.

    Raises:
        EvenerError: The file cannot be read.
    """
    try:
        with open_for_reading(path) as stream:
            for number, line in enumerate(_lines(stream), start=1):
                if not line.strip():
                    continue
                try:
                    event = parse_json(line)
                    check_fields(event)
                except ValueError as error:
                    if on_skip is not None and line.endswith(b"\n"):
                        on_skip(number, str(error))
                else:
                    yield event
    except OSError as error:
        raise EvenerError(
            f"event file {path} cannot be read: {error}; give the file or folder of a run"
        ) from error


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long, no more than is allowed."""
    while line := stream.readline(MOST_LINE_BYTES):
        yield line
        while len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            line = stream.readline(MOST_LINE_BYTES)


def strict_json(value: Any) -> Any:
    """Turn dataclasses, mappings and tuples into JSON; numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {part.name: strict_json(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    return open_regular(path, flags)


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    if size == 0:
        return False
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) != b"\n"
