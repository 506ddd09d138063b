"""One run as it is read for the page: its file, what it holds so far, and who is at work."""

import gzip
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from evener.config.folders import SUMMARY
from evener.dashboard.holders import find_holder
from evener.errors import EvenerError
from evener.run_report.writing import RunReader
from evener.version import __version__

INTERVAL_S: Final = 1.0
"""A run is read at most once in so many seconds, however many look at it."""

_MOST_PART: Final = 0.1
"""After a look that took long, the next one comes later: it takes no larger part of a core."""

_DIVISOR: Final = 20
"""The page is sent again whenever it changes, so it has so much less room than a report."""


class Answer(NamedTuple):
    """The document of a page as JSON, its ETag, and the same compressed."""

    document: bytes
    tag: str
    packed: bytes


class RunWatch:
    """Reads a run and makes the document of its page, once for all who ask.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading = threading.Lock()
        self._begin()
        self._next_s = float("-inf")
        self._answer = Answer(b"", "", b"")

    def answer(self) -> Answer:
        """Return the newest document; any thread may ask."""
        with self._reading:
            if (began_s := time.monotonic()) >= self._next_s:
                try:
                    found = self._read()
                except (OSError, EvenerError) as error:
                    self._begin()
                    cause = error.__cause__ or error  # its text has no path of this machine
                    why = cause.strerror if isinstance(cause, OSError) else error
                    found = {"problem": f"{self._folder.name} cannot be read: {why}"}
                document = {"version": __version__, "runs": [], **found}
                text = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
                if text != self._answer.document:
                    tag = hashlib.blake2b(text, digest_size=16).hexdigest()
                    self._answer = Answer(text, f'"{tag}"', gzip.compress(text, 5))
                ended_s = time.monotonic()
                self._next_s = ended_s + max(INTERVAL_S, (ended_s - began_s) / _MOST_PART)
            return self._answer

    def _begin(self) -> None:
        self._reader = RunReader(self._folder, is_live=True)

    def _read(self) -> dict[str, Any]:
        if self._reader.follower.is_replaced():
            self._begin()
        # Only the driver of jobs locks its folder, and writes checkpoints and a summary; loops
        # of the user's own do not, so of these it is not known whether they run.
        is_job = any((self._folder / name).exists() for name in ("checkpoints", SUMMARY))
        is_running = True if find_holder(self._folder) is not None else False if is_job else None
        name = self._folder.name
        run = self._reader.document(name, divisor=_DIVISOR, is_running=is_running)
        return {"runs": [run]}
