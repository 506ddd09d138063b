"""One run as it is read for the page: its files, what they hold so far, and who is at work."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from evener.config.folders import EVENTS, SUMMARY
from evener.dashboard.holders import find_holder
from evener.dashboard.view import RunView
from evener.errors import EvenerError
from evener.files import read_json
from evener.observe.event_lines import SUMMED
from evener.observe.following import EventFollower, newest_events
from evener.run_report.summary_facts import SummaryFacts, read_facts
from evener.run_report.writing import SkippedLines

#: So much of the events is read window by window, and as much again of what is before.
SKIM_BYTES: Final = 4 << 20

_CATCH_UP_S: Final = 0.1  # a look at a long file ends after so much processor time
_NEWEST_BYTES: Final = 64 << 10  # shown until all has been read


class RunWatch:
    """Reads a run and makes the document of its page, when there is something new.

    Args:
        folder: Of the run.

    Attributes:
        has_more: Whether the last look has left something unread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._skipped = SkippedLines()
        self._view = RunView()
        self._follower = EventFollower(
            folder / EVENTS,
            self._skipped.add,
            follow=False,
            columns=SUMMED,
            skim_bytes=SKIM_BYTES,
        )
        self._facts = SummaryFacts()
        self._summary_changed_s = -1.0
        self._summary_note = ""
        self._is_running: bool | None = None
        self._is_stale = True
        self._read_part = 0.0
        self._has_all = False  # that was there when it was begun
        self.has_more = False

    def look(self) -> bytes | None:
        """Return the document as JSON; ``None`` if nothing has changed."""
        self.has_more = False
        try:
            self._read_events()
            self._read_summary()
        except (OSError, EvenerError) as error:
            self._follower.begin_anew()  # events may have been read that are not in the view
            why = error.strerror if isinstance(error, OSError) else error
            problem = f"{self._folder.name} cannot be read: {why}"
            return json.dumps({"name": self._folder.name, "problem": problem}).encode()
        is_running = find_holder(self._folder) is not None or self._unknown()
        self._is_stale |= is_running != self._is_running
        self._is_running = is_running
        if not self._is_stale:
            return None
        self._is_stale = False
        return json.dumps(self._document(), allow_nan=False, separators=(",", ":")).encode()

    def close(self) -> None:
        """Close the files."""
        self._follower.close()

    def _unknown(self) -> bool | None:
        """Return what it means that nobody is seen to hold the folder.

        Only the driver of jobs locks it, and writes a summary or checkpoints there; loops of the
        user's own do not.
        """
        is_job = (self._folder / "checkpoints").is_dir() or self._facts.steps is not None
        return False if is_job else None

    def _read_events(self) -> None:
        until_s = time.thread_time() + _CATCH_UP_S
        while True:
            begins = self._follower.begins()
            if begins:
                self._skipped.forget()
            found = self._follower.look()
            if begins:
                self._view, self._has_all = RunView(), False
            for event in found.events:
                try:
                    self._view.add(event)
                except ValueError as error:
                    self._skipped.add(None, str(error))
            self._is_stale |= begins or bool(found.events)
            self._is_stale |= found.read_part != self._read_part
            self._read_part = found.read_part
            self.has_more = not found.is_all
            self._has_all |= found.is_all
            if found.is_all or time.thread_time() >= until_s:
                return

    def _read_summary(self) -> None:
        path = self._folder / SUMMARY
        try:
            changed_s = path.stat().st_mtime
        except FileNotFoundError:
            return
        if changed_s != self._summary_changed_s:
            self._summary_changed_s, self._is_stale = changed_s, True
            self._summary_note = ""
            try:
                self._facts = read_facts(read_json(path, follow=False))
            except (OSError, ValueError) as error:
                self._summary_note = f"{SUMMARY} is left out: {error}"

    def _newest(self) -> RunView:
        """Return what the newest events tell; the first of their windows stands for older ones."""
        view, path = RunView(), self._folder / EVENTS
        for event in newest_events(path, _NEWEST_BYTES, follow=False, columns=SUMMED):
            if event["type"] == "window" and view.history.newest is None and event["window"]:
                event["stands_for"] = event["window"] + 1
            with suppress(ValueError):
                view.add(event)
        return view

    def _document(self) -> dict[str, Any]:
        view = self._view if self._has_all else self._newest()
        notes = self._skipped.notes()
        notes += [self._summary_note] if self._summary_note else []
        if count := view.history.num_estimated:
            notes.append(
                f"{count:,} of the older windows are passed over, as the files are long: sums are "
                "estimates, and extremes may be missing; evener report reads all"
            )
        if self.has_more:
            notes.append(
                f"{self._read_part:.0%} of {EVENTS} have been read so far; the newest are shown"
            )
        facts = self._facts if view.history.has_summary else SummaryFacts()
        return view.document(self._folder.name, facts, notes, is_running=self._is_running)
