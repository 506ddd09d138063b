"""Events in files, one JSON object a line, appended over all sessions of a run.

The first file is ``events.jsonl``. When it is full the next events go to ``events.1.jsonl``, then
to ``events.2.jsonl`` and so on; no file is ever renamed, so readers continue with the next one.
"""

import atexit
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from evener.errors import ConfigError
from evener.files import open_regular
from evener.observe.event_lines import LineWriter
from evener.observe.events import Event, Sink, make_event

MOST_BYTES: Final = 2**30
"""The files of a run together, unless told otherwise: 1.5 million windows of four ranks."""

NUM_PARTS: Final = 8
"""Into so many files that space is divided. The first one is kept, as it tells how the run began;
of the others the oldest is removed when there would be more."""

MOST_WAITING: Final = 4096
"""Events that may wait for the disk; further ones are left out until it has caught up."""

_CLOSE_S: Final = 30.0


class JsonlSink(Sink):
    """Appends events to a file, in a thread: the caller of ``emit`` never waits for the disk.

    An event is with the kernel a moment after ``emit``, and when ``close`` returns. If
    the disk hangs for so long that 4,096 events wait, further ones are left out; an event
    ``events_dropped`` says how many.

    A file that is removed meanwhile is created again. A line that was torn by a killed process or a
    full disk is ended before the next one begins. Numbers that are not finite become ``null``, for
    readers that know strict JSON only.
    """

    continues = True

    def __init__(
        self,
        path: str | Path,
        *,
        on_warning: Callable[[str], None] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Open the newest file for appending; make its folder if needed.

        Args:
            path: The first file, such as ``runs/first/events.jsonl``. Several ranks must not write
                one file: give ``Ddp.setup`` ``sinks=[lambda: JsonlSink(path)]``, which makes the
                sink on the main process alone.
            on_warning: Called once, when an event cannot be written or has to be removed; the team
                that the sink is given to prints it, unless this is given.
            most_bytes: Size of all files together, roughly.

        Raises:
            ConfigError: The file cannot be opened.
        """
        self._first = path = Path(path)
        self.on_warning = on_warning
        self._part_bytes = max(1, most_bytes // NUM_PARTS)
        try:
            self._path = path
            if path.parent.is_dir():
                *_, self._path = parts_of(path)
            self._file = _open(self._path)
        except OSError as error:
            raise ConfigError(
                f"event file {path} cannot be opened: {error}; choose a folder that is writable"
            ) from error
        self._torn = _ends_torn(self._file)
        self._lines = LineWriter()
        self._waiting: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._dropped = 0
        self._counting = threading.Lock()  # any thread may emit while the writer reads the count
        self._has_warned = self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="evener-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, event: Event) -> None:
        """Append one event; report a full disk once, and do not raise."""
        if self._closed:
            self._warn("it is closed")
        elif self._waiting.qsize() >= MOST_WAITING:
            with self._counting:
                self._dropped += 1
        else:
            self._waiting.put(event)

    def pending(self) -> list[threading.Event]:
        """Return what will be set as soon as everything emitted so far is with the kernel."""
        if self._closed:
            return []
        written = threading.Event()
        self._waiting.put(written)
        return [written]

    def close(self) -> None:
        """Force the file onto the disk and close it, within 30 s; may be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"the disk did not take them within {_CLOSE_S:g} s")

    # ── in the thread ────────────────────────────────────────────────────────────────────────────

    def _write_all(self) -> None:
        while (found := self._waiting.get()) is not None:
            if isinstance(found, threading.Event):
                found.set()
                continue
            try:
                self._write(found)
            except Exception as error:  # such as of a key that JSON does not know
                self._warn(f"{type(error).__name__}: {error}")
            with self._counting:
                num_events, self._dropped = self._dropped, 0
            if num_events:
                self._write(make_event("events_dropped", t=time.time(), num_events=num_events))
                self._warn(f"the disk was too slow for {num_events:,} of them")
        try:
            os.fsync(self._file)
        except OSError as error:
            self._warn(str(error))
        finally:
            os.close(self._file)

    def _write(self, event: Event) -> None:
        line = self._lines.line(event)
        try:
            state = os.fstat(self._file)
            if state.st_nlink == 0:
                self._open_part(self._path)
                self._warn("the file was removed, and is created again")
                line = self._lines.line(event)
            elif state.st_size and state.st_size + len(line) > self._part_bytes:
                self._begin_part()
                line = self._lines.line(event)
            data = b"\n" + line if self._torn else line
            written = os.write(self._file, data)
        except OSError as error:
            self._lines = LineWriter()  # the line may have named the team
            self._warn(str(error))
            return
        # One newline in front at most, so that any cut leaves a torn line.
        self._torn = written < len(data)
        if self._torn:
            self._lines = LineWriter()
            self._warn("the disk is full")

    def _begin_part(self) -> None:
        """Continue in the next file, because this one is full; remove the file that is too old."""
        *_, newest = parts_of(self._first)
        self._open_part(_part(self._first, _number(self._first, newest) + 1))
        for old in parts_of(self._first)[1 : -NUM_PARTS + 1]:
            old.unlink(missing_ok=True)
            self._warn(f"{old.name} is removed, as event files have reached their limit")

    def _open_part(self, path: Path) -> None:
        fresh = _open(path)
        os.close(self._file)
        self._file, self._path, self._torn = fresh, path, _ends_torn(fresh)
        self._lines = LineWriter()  # each file names its teams

    def _warn(self, cause: str) -> None:
        if self._has_warned or self.on_warning is None:
            return
        self._has_warned = True
        with suppress(Exception):  # a warning that fails must not end the thread that writes
            self.on_warning(
                f"events are missing from {self._path}: {cause}; training continues, "
                "but reports will have gaps: free disk space there"
            )


def parts_of(path: Path) -> list[Path]:
    """Return the files of a run in the order in which they were written; the first is ``path``."""
    numbers = sorted(filter(None, (_number(path, other) for other in path.parent.iterdir())))
    return [path, *(_part(path, number) for number in numbers)]


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _number(path: Path, part: Path) -> int:
    """Return which part a file is; 0 for the first one, and for other files."""
    form = rf"{re.escape(path.stem)}\.([1-9][0-9]{{0,8}}){re.escape(path.suffix)}"
    match = re.fullmatch(form, part.name)
    return int(match[1]) if match else 0


def part_after(path: Path, part: Path) -> Path | None:
    """Return the file that follows a part; ``None`` for the newest. ``path`` is the first one."""
    number = _number(path, part)
    return next((other for other in parts_of(path)[1:] if _number(path, other) > number), None)


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
