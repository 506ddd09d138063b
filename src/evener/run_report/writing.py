"""Read run folders and write their reports: the only part of this package with I/O."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from evener.config.folders import EVENTS, SUMMARY, find_events
from evener.errors import ConfigError
from evener.files import read_json, write_pieces
from evener.observe.following import EventFollower
from evener.observe.numbers import wrapped
from evener.run_report.chrome_trace import trace_events, trace_text
from evener.run_report.document import figures
from evener.run_report.history import RunHistory
from evener.run_report.page import GENERATOR, page
from evener.run_report.summary_facts import SummaryFacts, read_facts
from evener.simulation.changes import predict_changes
from evener.version import __version__

DEFAULT_PAGE: Final = Path("report.html")

_MOST_NOTES: Final = 3
"""The most invalid lines that are named; further ones are counted."""


def report(runs: Sequence[Path]) -> dict[str, Any]:
    """Read runs and return the document of their report: the numbers of the page.

    Args:
        runs: Run folders, or their ``events.jsonl``.

    Raises:
        ConfigError: A folder is not that of a run, or its events cannot be read.
    """
    folders = [find_events(run).parent for run in runs]
    names = [folder.name for folder in folders]
    documents = [
        RunReader(folder).document(
            folder.name if names.count(folder.name) == 1 else str(folder), divisor=len(runs)
        )
        for folder in folders
    ]
    return {"version": __version__, "runs": documents, "bench": None}


def write_page(document: dict[str, Any], runs: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of a report.

    Args:
        document: As ``report`` returns it.
        runs: The runs in it.
        path: The file; by default ``report.html`` in the current folder. If that exists and is not
            an earlier page of the same runs, ``report-2.html``, and so on.

    Returns:
        The file.

    Raises:
        ConfigError: The file cannot be written.
    """
    folders = "\0".join(str(find_events(run).parent.resolve()) for run in runs)
    digest = hashlib.blake2b(folders.encode(), digest_size=8).hexdigest()
    if path is None:
        names = (DEFAULT_PAGE.with_stem(f"{DEFAULT_PAGE.stem}-{k}") for k in count(2))
        path = next(one for one in chain([DEFAULT_PAGE], names) if _is_free(one, digest))
    _write(path, [page(document, digest)])
    return path


def verdict_lines(document: dict[str, Any]) -> list[str]:
    """Return the most important lines of a report: three for one run, else one for each run."""
    runs = document["runs"]
    if len(runs) == 1:
        found = [*runs[0]["verdict"]["answers"].values()]
    else:
        found = [f"{run['name']}: {run['verdict']['text'] or run['run']['state']}" for run in runs]
    return [*map(wrapped, found)]


def write_trace(run: Path, path: Path) -> None:
    """Write the Chrome trace of a run.

    Args:
        run: Its folder, or its ``events.jsonl``.
        path: The file.

    Raises:
        ConfigError: The run does not exist, its events cannot be read, or the file cannot be
                written.
    """
    folder = find_events(run).parent
    _write(path, trace_text(trace_events(folder.name, RunReader(folder).history())))


class RunReader:
    """Reads a run folder: all of it at first, then what is new.

    Args:
        folder: The folder.
        is_live: Whether it is read repeatedly, for the dashboard: then symbolic links that lead out
            of the folder are not followed, and a missing summary is not reported.
    """

    def __init__(self, folder: Path, *, is_live: bool = False) -> None:
        self._folder = folder
        self._is_live = is_live
        self._history = RunHistory()
        #: How many lines were left out, and a few of them with the reason.
        self.num_skipped = 0
        self.skipped: list[str] = []
        #: Also detects that the file was replaced.
        self.follower = EventFollower(folder / EVENTS, self._skip, follow=not is_live)

    def history(self) -> RunHistory:
        """Read new events, and return all so far.

        Raises:
            ConfigError: The events cannot be read.
        """
        for event in self.follower.events():
            self._history.add(event)
        return self._history

    def document(
        self, name: str, *, divisor: int, is_running: bool | None = None
    ) -> dict[str, Any]:
        """Read what is new, and return the document of the run; see ``figures``.

        Raises:
            ConfigError: The events cannot be read.
        """
        history = self.history()
        facts, why = self._read_summary()
        notes = [*self.skipped]
        if further := self.num_skipped - len(notes):
            notes.append(f"{further:,} further lines are left out")
        if why and not self._is_live:
            notes.append(why)
        is_growing = self._is_live and history.ending is None
        return figures(
            name,
            history,
            facts,
            notes,
            divisor=divisor,
            is_running=is_running,
            predict=None if is_growing else predict_changes(history.table, history.facts),
        )

    def _skip(self, line: int, why: str) -> None:
        self.num_skipped += 1
        if len(self.skipped) < _MOST_NOTES:
            self.skipped.append(f"line {line:,} of {EVENTS} is left out: {why}")

    def _read_summary(self) -> tuple[SummaryFacts, str]:
        """Return the summary, and as text why there is none."""
        try:
            facts = read_facts(read_json(self._folder / SUMMARY, follow=False))
        except FileNotFoundError:
            why = f"there is no {SUMMARY}: the run has not ended, or is a loop of your own"
        except (OSError, ValueError) as error:
            why = f"{SUMMARY} is left out: {error}"
        else:
            if self._history.has_summary:
                return facts, ""
            why = (
                f"{SUMMARY} is left out: it is of an earlier session, as the newest one has not "
                "ended yet, or has failed"
            )
        return SummaryFacts(), why


def _is_free(path: Path, digest: str) -> bool:
    """Return whether the file does not exist, or is a page of the same runs."""
    try:
        with path.open("rb") as stream:
            return GENERATOR.format(digest).encode() in stream.read(4096)
    except FileNotFoundError:
        return not path.is_symlink()
    except OSError:
        return False


def _write(path: Path, pieces: Iterable[str]) -> None:
    try:
        write_pieces(path, (piece.encode() for piece in pieces))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error}; choose another file with -o or --trace"
        ) from None
