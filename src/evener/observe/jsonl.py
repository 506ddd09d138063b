"""Events in a file, one JSON object per line, appended in all sessions of a run."""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from evener.errors import ConfigError
from evener.files import open_regular
from evener.observe.event_lines import to_line
from evener.observe.events import Event, Sink, make_event
from evener.observe.thinning import FULL_WINDOWS, can_merge, merge, stride

MOST_WAITING: Final = 4096
"""Most events that wait for the disk; further ones are dropped until it has caught up."""

_CLOSE_S: Final = 30.0


class JsonlSink(Sink):
    """Appends events to a file, in a thread: the caller of ``emit`` never waits for the disk.

    An event is written soon after ``emit``, and at the latest when ``close`` returns. If the disk
    is so slow that 4,096 events wait, further ones are dropped; an event ``events_dropped`` has
    their number. In a long run, neighbouring windows share an event (``thinning``), except across
    a checkpoint.

    If the file holds an earlier run, and this one does not resume, a warning says so: its windows
    are void then. A file that is removed meanwhile is created again. A line that a killed process
    or a full disk left incomplete is ended before the next one. Numbers that are not finite become
    ``null``, for readers of strict JSON.
    """

    continues = True

    def __init__(
        self,
        path: str | Path,
        *,
        on_warning: Callable[[str], None] | None = None,
        full_windows: int = FULL_WINDOWS,
    ) -> None:
        """Open the file for appending; make its folder if needed.

        Args:
            path: The file, such as ``runs/first/events.jsonl``. Several ranks must not write
                one file: give ``Ddp.setup`` ``sinks=[lambda: JsonlSink(path)]``, which makes the
                sink on the main process alone.
            on_warning: Called when the file holds an earlier run, and once when an event cannot be
                written; the team that the sink is given to prints it, unless this is given.
            full_windows: Windows that have an event each; later ones share events.

        Raises:
            ConfigError: The file cannot be opened.
        """
        self._path = path = Path(path)
        self.on_warning = on_warning
        self._full_windows = full_windows
        self._torn = False  # whether the newest line is incomplete
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f"event file {path} cannot be opened: {error}; choose a folder that is writable"
            ) from error
        self._may_follow_a_run = os.fstat(self._file).st_size > 0  # until its first event
        self._row: Event | None = None  # windows that share an event, not written yet
        self._plan: Event | None = None  # the newest plan after them
        self._waiting: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._dropped = 0
        self._counting = threading.Lock()  # any thread may emit while the writer reads the count
        self._has_warned = self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="evener-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, event: Event) -> None:
        """Append one event; report a full disk once, and do not raise."""
        if self._may_follow_a_run and event["type"] == "run_started":
            self._tell(
                f"{self._path} holds an earlier run. Reports show the windows of the new one, and "
                "the time of both; give each run a file of its own, or continue one by ddp.load"
            )
        self._may_follow_a_run = False
        if self._closed:
            self._warn("it is closed")
        elif self._waiting.qsize() >= MOST_WAITING:
            with self._counting:
                self._dropped += 1
        else:
            self._waiting.put(event)

    def pending(self) -> list[threading.Event]:
        """Return an event that is set once everything emitted so far is written."""
        if self._closed:
            return []
        written = threading.Event()
        self._waiting.put(written)
        return [written]

    def close(self) -> None:
        """Flush the file to disk and close it, within 30 s; may be called again."""
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
            try:
                self._take(found)
            except KeyError as error:
                self._warn(f"an event lacks {error}")
            with self._counting:
                num_events, self._dropped = self._dropped, 0
            if num_events:
                self._write(make_event("events_dropped", t=time.time(), num_events=num_events))
                self._warn(f"the disk was too slow for {num_events:,} of them")
        self._write_row()
        try:
            os.fsync(self._file)
        except OSError as error:
            self._warn(str(error))
        finally:
            os.close(self._file)

    def _take(self, found: Event | threading.Event) -> None:
        if isinstance(found, threading.Event):
            self._write_row()
            found.set()
        elif found["type"] == "plan" and self._row is not None:
            self._plan = found
        elif found["type"] == "window":
            if self._row is not None and can_merge(self._row, found):
                found = merge(self._row, found)
            else:
                self._write_row()
            self._row = found
            most = stride(found["window"], len(found["ranks"]), self._full_windows)
            if found.get("windows", 1) >= most:
                self._write_row()
        else:
            self._write_row()
            self._write(found)

    def _write_row(self) -> None:
        held, self._row, self._plan = (self._row, self._plan), None, None
        for event in filter(None, held):
            self._write(event)

    def _write(self, event: Event) -> None:
        try:
            line = to_line(event)
            if os.fstat(self._file).st_nlink == 0:
                removed = self._file
                self._open()
                os.close(removed)
                self._warn("the file was removed, and is created again")
            data = b"\n" + line if self._torn else line
            written = os.write(self._file, data)
        except Exception as error:  # such as a full disk, or a key that JSON does not allow
            self._warn(f"{type(error).__name__}: {error}")
            return
        # At most one newline in front, so that any cut leaves an incomplete line.
        self._torn = written < len(data)
        if self._torn:
            self._warn("the disk is full")

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def _warn(self, cause: str) -> None:
        if self._has_warned or self.on_warning is None:
            return
        self._has_warned = True
        self._tell(
            f"events are missing from {self._path}: {cause}; training continues, "
            "but reports will have gaps: free disk space there"
        )

    def _tell(self, text: str) -> None:
        if self.on_warning is not None:
            with suppress(Exception):  # a warning that fails must not end the thread that writes
                self.on_warning(text)
