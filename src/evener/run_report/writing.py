"""Read run folders and write their reports: the only part of this package with I/O."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from evener.config.folders import EVENTS, SUMMARY, find_events
from evener.errors import ConfigError
from evener.files import read_json, write_pieces
from evener.observe.following import each_event
from evener.run_report.chrome_trace import trace_events, trace_text
from evener.run_report.document import figures
from evener.run_report.history import RunHistory
from evener.run_report.page import GENERATOR, page
from evener.run_report.summary_facts import SummaryFacts, read_facts
from evener.version import __version__

DEFAULT_PAGE: Final = Path("report.html")

_MOST_NOTES: Final = 3
"""The most lines that are named because they are not events; further ones are counted."""


def report(runs: Sequence[Path]) -> dict[str, Any]:
    """Read runs and return the document of their report: the numbers of the page.

    Args:
        runs: Run folders, or their ``events.jsonl``.

    Raises:
        ConfigError: One is not the folder of a run, or its events cannot be read.
    """
    folders = [find_events(run).parent for run in runs]
    names = [folder.name for folder in folders]
    documents = []
    for folder in folders:
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        skipped = SkippedLines()
        history = read_history(folder, skipped)
        facts, note = read_summary(folder, history)
        notes = [*skipped.notes(), *([note] if note else [])]
        documents.append(figures(name, history, facts, notes, divisor=len(runs)))
    return {"version": __version__, "runs": documents}


def write_page(document: dict[str, Any], path: Path | None) -> Path:
    """Write the page of a report.

    Args:
        document: As ``report`` returns it.
        path: Where it goes; by default ``report.html`` in the current folder, unless that is a
            file of another origin.

    Returns:
        Where it went.

    Raises:
        ConfigError: It cannot be written there.
    """
    if path is None:
        path = DEFAULT_PAGE
        if path.exists() and not _is_report(path):
            raise ConfigError(
                f"{path} is there already and was not made by evener report; choose another name "
                "with -o, or this one to replace it"
            )
    _write(path, [page(document)])
    return path


def write_trace(run: Path, path: Path) -> None:
    """Write the Chrome trace of a run.

    Args:
        run: Its folder, or its ``events.jsonl``.
        path: Where it goes.

    Raises:
        ConfigError: The run does not exist, its events cannot be read, or the file cannot be
                written.
    """
    folder = find_events(run).parent
    _write(path, trace_text(trace_events(folder.name, read_history(folder))))


def read_history(folder: Path, skipped: "SkippedLines | None" = None) -> RunHistory:
    """Read the events of a run.

    Args:
        folder: Its folder.
        skipped: Takes note of lines that are left out.

    Raises:
        ConfigError: The events cannot be read.
    """
    history = RunHistory()
    for event in each_event(folder / EVENTS, (skipped or SkippedLines()).add):
        history.add(event)
    return history


def read_summary(folder: Path, history: RunHistory) -> tuple[SummaryFacts, str]:
    """Read the summary of a run; return also why there is none, for people."""
    path = folder / SUMMARY
    try:
        facts = read_facts(read_json(path, follow=False))
        if history.has_summary:
            return facts, ""
        why = (
            f"{SUMMARY} is left out: it is of an earlier session, as the newest one has not ended "
            "yet, or has failed"
        )
    except FileNotFoundError:
        why = f"there is no {SUMMARY}: the run has not ended, or is a loop of your own"
    except (OSError, ValueError) as error:
        why = f"{SUMMARY} is left out: {error}"
    return SummaryFacts(), why


class SkippedLines:
    """Lines that were left out: the first few with their reason, and how many there are."""

    def __init__(self) -> None:
        self._count = 0
        self._named: list[str] = []

    def add(self, line: int, why: str) -> None:
        """Take note of one."""
        self._count += 1
        if len(self._named) < _MOST_NOTES:
            self._named.append(f"line {line:,} of {EVENTS} is left out: {why}")

    def notes(self) -> list[str]:
        """Return sentences about them."""
        further = self._count - len(self._named)
        return [*self._named, *([f"{further:,} further lines are left out"] if further else [])]


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return GENERATOR.encode() in stream.read(4096)
    except OSError:
        return False


def _write(path: Path, pieces: Iterable[str]) -> None:
    try:
        write_pieces(path, (piece.encode() for piece in pieces))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error}; choose another file with -o or --trace"
        ) from None


def numbers_text(document: dict[str, Any]) -> str:
    """Return the numbers of a report as JSON, for programs."""
    return json.dumps(document, allow_nan=False)
