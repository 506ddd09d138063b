"""Failures of ranks: the report of a rank, and its supervisor's judgement of all ends.

The open teams of a process add notes to an exception: by ``sys.excepthook``, which is wrapped
meanwhile, or by ``report_failure``, by which a rank reports to its supervisor.
"""

import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final
from weakref import WeakMethod

from evener.comm.causes import is_of_an_exchange
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    ConfigError,
    CoordinatorLostError,
    EvenerError,
    PeerLostError,
    UserError,
)
from evener.places import raised_at
from evener.team.host import remedy_of_shortage

START_AGAIN: Final = 75
"""Exit code of a worker that has lost the coordinator, and of its launcher (``EX_TEMPFAIL``).

The run itself is fine: started again with the same arguments, it continues from its checkpoint.
"""

#: Signals by which users and schedulers stop a run.
_STOPS = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)

#: The error of ``input()`` without standard input.
_NO_INPUT: Final = "EOF when reading a line"
_INPUT_REMEDY: Final = (
    "evener: only the first rank that a launcher starts has its standard input. Remedy: read the "
    "value from an argument or an environment variable"
)

_RUNNER_FILES = frozenset(str(Path(__file__).with_name(n)) for n in ("child.py", "script.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """The failure of a rank.

    Attributes:
        time: Unix seconds at which the exception reached the top.
        kind: Name of the exception's class.
        message: Its text.
        traceback: As Python prints it.
        user_error: Whether the user can correct it, so that the message is enough.
        follow_up: Whether the failure of another rank is the likely cause.
        exit_code: The exit code of the rank.
        notes: Notes of the exception, such as where it was raised.
        steps: Optimizer steps that a worker of a managed run had applied; -1 before it joined.
    """

    time: float
    kind: str
    message: str
    traceback: str
    user_error: bool
    follow_up: bool
    exit_code: int
    notes: str = ""
    steps: int = -1

    @property
    def is_exit(self) -> bool:
        """Whether the script ended by ``sys.exit``; after a signal, that is not a failure."""
        return self.kind == SystemExit.__name__


def describe(error: BaseException, *, steps: int = -1) -> FailureReport:
    """Make the report of an exception.

    Args:
        error: The exception.
        steps: See ``FailureReport``.
    """
    if isinstance(error, EOFError) and str(error) == _NO_INPUT:
        note(error, _INPUT_REMEDY)
    start = _without_runner(error.__traceback__)
    lines = traceback.format_exception(type(error), error, start)
    # Non-blocking sockets raise BlockingIOError, too.
    remedy = "" if isinstance(error, BlockingIOError) else remedy_of_shortage(error)
    if remedy and (place := raised_at(error)):
        note(error, f"evener: raised at {place}")
    user_error = bool(remedy) or (isinstance(error, UserError) and not _hides_another(error))
    # Also for scripts that do not use evener's exchange.
    collective = isinstance(error, CollectiveError) or is_of_an_exchange(error)
    return FailureReport(
        time=time.time(),
        kind=type(error).__name__,
        message=f"{error}; {remedy}" if remedy else str(error),
        traceback="".join(lines),
        user_error=user_error,
        follow_up=collective and not user_error,
        exit_code=exit_code_of(error),
        notes="\n".join(getattr(error, "__notes__", ())),
        steps=steps,
    )


def _hides_another(error: BaseException) -> bool:
    """Return whether a mismatch of ranks was caused by another error, which is more helpful.

    For example in ``finally: ddp.close()`` after an error in the user's code.
    """
    cause = error.__context__
    return (
        isinstance(error, CollectiveMismatchError)
        and isinstance(cause, Exception)
        and not isinstance(cause, EvenerError)
        and not error.__suppress_context__
    )


def show_message(message: str, notes: str) -> None:
    """Print the message of an exception, without its traceback."""
    sys.stderr.write("\n".join(filter(None, [f"error: {message}", notes])) + "\n")


def _without_runner(start: TracebackType | None) -> TracebackType | None:
    # Users need their own frames, not those of the code that ran the script.
    while start is not None and start.tb_frame.f_code.co_filename in _RUNNER_FILES:
        start = start.tb_next
    return start


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process for this exception.

    2 for a bad option; ``START_AGAIN`` if the coordinator was lost; else 1.
    """
    if isinstance(error, CoordinatorLostError):
        return START_AGAIN
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 2 if isinstance(error, ConfigError) else 1


# ── notes of a team about an exception ───────────────────────────────────────────────────────────

_explainers: list[WeakMethod[Callable[[BaseException], None]]] = []
_undo: list[Callable[[], None]] = []


def explain_with(method: Callable[[BaseException], None]) -> None:
    """Let ``method`` add its notes to uncaught exceptions, until ``forget``.

    Args:
        method: A bound method; its object is not kept alive.
    """
    if not _explainers:
        _wrap_hook()
    _explainers.append(WeakMethod(method))


def forget(method: Callable[[BaseException], None]) -> None:
    """Undo ``explain_with``, and after the last one restore ``sys.excepthook``; idempotent."""
    _explainers[:] = [e for e in _explainers if e() is not None and e() != method]
    while _undo and not _explainers:
        _undo.pop()()


def add_notes(error: BaseException) -> None:
    """Add the notes of all open teams to an exception."""
    for known in _explainers:
        method = known()
        if method is not None:
            method(error)


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, once."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def _wrap_hook() -> None:
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        add_notes(error)
        if isinstance(error, PeerLostError):  # the cause is the end of another rank
            show_message(str(error), "\n".join(getattr(error, "__notes__", ())))
        else:
            before(kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is show:  # otherwise other code has wrapped it, and may still call it
            sys.excepthook = before

    sys.excepthook = show
    _undo.append(undo)


# ── a supervisor's judgement of all ends ─────────────────────────────────────────────────────────

_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        "not by the kernel for lack of memory. `kill -9`, a service that limits memory, a "
        "scheduler at its time limit and the end of a container do this; see their logs"
    ),
    signal.SIGBUS: "most likely shared memory is full; `df -h /dev/shm` shows it",
    signal.SIGILL: "most likely this torch was built for another processor",
    signal.SIGSEGV: "a crash in native code; the stack printed above shows where",
    signal.SIGABRT: "native code aborted; its message is above",
}


_MEMORY_RAN_OUT: str = (
    "memory ran out on this machine, or at the limit of the job's control group; use a smaller "
    "micro-batch, a smaller model or fewer ranks"
)


@dataclass(slots=True, kw_only=True)
class ProcessRecord:
    """The facts of one rank's process.

    Attributes:
        rank: Which rank.
        pid: Its process.
        has_ended: Whether its supervisor has seen its end.
        code: Exit code, ``-n`` when signal n ended it; 0 while it runs.
        time: Unix seconds at which its supervisor saw the end.
        report: The rank's report of its failure, if any.
        signals: Signals that its supervisor has sent to it, or that have stopped it.
        desertion: How it ended while others waited for it, as text; empty if it did not.
        name: Its name for messages; ``rank N`` if empty.
        memory_was_short: Whether memory was short at its end.
    """

    rank: int
    pid: int
    has_ended: bool = False
    code: int = 0
    time: float = 0.0
    report: FailureReport | None = None
    signals: set[int] = field(default_factory=set)
    desertion: str = ""
    name: str = ""
    memory_was_short: bool = False

    @property
    def title(self) -> str:
        """Its name for messages."""
        return self.name or f"rank {self.rank}"

    @property
    def who(self) -> str:
        """Its title and its process, as text."""
        return f"{self.title} (pid {self.pid})"

    @property
    def has_raised(self) -> bool:
        """Whether it has reported an exception, and not only its exit."""
        return self.report is not None and not self.report.is_exit

    @property
    def failed(self) -> bool:
        """Whether it failed, and did not only stop on request."""
        if self.desertion or self.has_raised:
            return True
        if self.code < 0:
            return -self.code not in self.signals
        return self.code != 0 and not self.signals

    @property
    def silent_end(self) -> str:
        """Describe its end, if it left no report."""
        if self.desertion:
            return f"{self.who} {self.desertion}"
        if self.code >= 0:
            return f"{self.who} ended with exit code {self.code}; its output above may show why"
        cause = _LIKELY_CAUSES.get(-self.code, "a process outside of this run sent it")
        if self.code == -signal.SIGKILL and self.memory_was_short:
            cause = _MEMORY_RAN_OUT
        return f"{self.who} was killed by {_signal_name(-self.code)}: {cause}"

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The signal that asked it to stop, if it ended by that signal or with its exit code."""
        code = self.code if self.report is None else self.report.exit_code
        number = -code if code < 0 else code - 128
        return next((one for one in _STOPS if one == number and not self.has_raised), None)

    @property
    def in_short(self) -> str:
        """A short description of its end."""
        if self.report is not None and self.has_raised:
            return f"{self.title} ({self.report.kind})"
        end = _signal_name(-self.code) if self.code < 0 else f"exit code {self.code}"
        return f"{self.title} ({end})"


def first_failure(records: Sequence[ProcessRecord]) -> ProcessRecord | None:
    """Return the failure that caused the others; ``None`` if no rank failed.

    It is not always the earliest: a rank may report a lost peer before the launcher has seen the
    peer's end. So errors about other ranks come last, whatever their time. Before them come
    mismatches of collectives, which may follow from an error on one rank.
    """

    def order(record: ProcessRecord) -> tuple[bool, bool, float]:
        report = record.report
        if report is None:
            return False, False, record.time
        came_apart = report.user_error and report.kind == CollectiveMismatchError.__name__
        return report.follow_up, came_apart, report.time

    return min((one for one in records if one.failed), key=order, default=None)


def judge(
    records: Sequence[ProcessRecord], stop_signal: int | None, unreached: str = ""
) -> tuple[int, str]:
    """Return the launcher's exit code and message.

    Args:
        records: All ranks, which have ended.
        stop_signal: The signal with which the launcher was asked to stop, if any.
        unreached: Why ranks of other machines may be lost, as text; empty if unknown.

    Returns:
        The exit code and the message, which may be empty.
    """
    first = first_failure(records)
    # Ranks that a signal stops end one after another, so some lose their peers first. Then the lost
    # peer is not the cause.
    is_lost = first is not None and first.report is not None and first.report.follow_up
    if first is None or (is_lost and stop_signal is not None):
        if stop_signal is None or not any(one.code for one in records):
            return 0, ""
        # Ranks that stop because a signal reached another rank report it; the smallest number wins.
        return 128 + min(stop_signal, *(one.stop_signal or stop_signal for one in records)), ""
    return (first.code if first.code > 0 else 1), _explain(first, records, unreached)


def _explain(first: ProcessRecord, records: Sequence[ProcessRecord], unreached: str) -> str:
    others = [one for one in records if one.failed and one is not first]
    alone, report = len(records) == 1, first.report
    if report is not None and report.user_error:
        text = f"error: {report.message}\n"
        if report.notes:
            text += f"{report.notes}\n"
        others = [o for o in others if o.report is None or o.report.message != report.message]
        if not alone and not all(one.report for one in records):
            text += f"(on {first.title}; the other ranks were stopped)\n"
    elif report is not None and report.follow_up and (early := _early_end(records)):
        text = f"{early}{report.notes}\n" if report.notes else early
    elif report is not None and report.follow_up and unreached:  # a traceback does not help
        text = f"error: {unreached}\n{first.who}: {report.message}\n{report.notes}".rstrip() + "\n"
    elif report is not None and first.has_raised:
        text = ("" if alone else f"{first.who} failed:\n") + report.traceback
    else:
        text = f"error: {first.silent_end}\n"
    if others:
        text += f"also ended: {', '.join(one.in_short for one in others)}\n"
    return text


def _early_end(records: Sequence[ProcessRecord]) -> str:
    # A script that returns early on one rank has exit code 0; its peers report only a lost rank.
    gone = [one.who for one in records if one.code == 0 and one.report is None]
    if not gone:
        return ""
    return (
        f"error: {' and '.join(gone)} ended with exit code 0 while others were at work; let every "
        "rank run the whole script. To stop early, decide by a number that is the same on "
        "every rank, such as ddp.weighted_mean(loss) after the epoch. To end after some steps, use "
        "ddp.loader(max_steps=...), as `break` does not reach a rank without a share of the "
        "window\n"
    )


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
