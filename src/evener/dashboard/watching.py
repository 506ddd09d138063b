"""Read one run for the dashboard's page, and build its document."""

import gzip
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from evener.config.folders import SUMMARY
from evener.dashboard.lock_owner import find_lock_owner
from evener.errors import EvenerError
from evener.run_report.writing import RunReader
from evener.version import __version__

INTERVAL_S: Final = 1.0
"""Least seconds between two reads of a run, however many clients ask for it."""

_MOST_PART: Final = 0.1
"""Most of a core that reading may use: after a slow read, the next one is later."""

_DIVISOR: Final = 20
"""How much less a page may hold than a report: it is sent again whenever it changes."""


class Answer(NamedTuple):
    """The document of a page as JSON, its ETag, and the compressed document."""

    document: bytes
    tag: str
    packed: bytes


class RunWatch:
    """Reads a run and makes the document of its page, once for all clients.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading = threading.Lock()
        self._begin()
        self._next_s = float("-inf")
        self._answer = Answer(b"", "", b"")

    def answer(self) -> Answer:
        """Return the newest document; any thread may call it."""
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
        # Only `tasks/job.py` locks its folder, and writes checkpoints and a summary. The user's
        # own loops do not, so it is unknown whether they still run.
        is_job = any((self._folder / name).exists() for name in ("checkpoints", SUMMARY))
        is_running = (
            True if find_lock_owner(self._folder) is not None else False if is_job else None
        )
        name = self._folder.name
        run = self._reader.document(name, divisor=_DIVISOR, is_running=is_running)
        return {"runs": [run]}
