"""What is said of an exception that ends a rank.

What the open teams of the process know about it is added to it: by ``sys.excepthook``, which is
wrapped meanwhile, or by ``report_failure``, by which a rank tells its supervisor.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from weakref import WeakMethod

from evener.comm.causes import is_of_an_exchange
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    ConfigError,
    EvenerError,
    UserError,
)

_RUNNER_FILES = frozenset(str(Path(__file__).with_name(n)) for n in ("child.py", "script.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """What ended a rank.

    Attributes:
        time: Unix seconds at which the exception reached the top.
        kind: Name of the exception's class.
        message: Its text.
        traceback: As Python prints it.
        user_error: The user can mend it, so the message is enough.
        follow_up: Most likely caused by the failure of another rank.
        exit_code: What the rank ends with.
        notes: What was added to the exception, such as where it was raised.
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
        """Whether the script ended by ``sys.exit``, which is no failure when it was told to end."""
        return self.kind == SystemExit.__name__


def describe(error: BaseException, *, steps: int = -1) -> FailureReport:
    """Makes the report of an exception.

    Args:
        error: The exception.
        steps: See ``FailureReport``.
    """
    start = _without_runner(error.__traceback__)
    lines = traceback.format_exception(type(error), error, start)
    user_error = isinstance(error, UserError) and not _hides_another(error)
    # Also of scripts that do not use evener's exchange.
    collective = isinstance(error, CollectiveError) or is_of_an_exchange(error)
    return FailureReport(
        time=time.time(),
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(lines),
        user_error=user_error,
        follow_up=collective and not isinstance(error, UserError),
        exit_code=exit_code_of(error),
        notes="\n".join(getattr(error, "__notes__", ())),
        steps=steps,
    )


def _hides_another(error: BaseException) -> bool:
    """Return whether ranks came apart because of another error, which then says more.

    Such as in ``finally: ddp.close()`` after an error of the user's own.
    """
    cause = error.__context__
    return (
        isinstance(error, CollectiveMismatchError)
        and isinstance(cause, Exception)
        and not isinstance(cause, EvenerError)
        and not error.__suppress_context__
    )


def _without_runner(start: TracebackType | None) -> TracebackType | None:
    # Users want to see their own frames, not those that carried them here.
    while start is not None and start.tb_frame.f_code.co_filename in _RUNNER_FILES:
        start = start.tb_next
    return start


def exit_code_of(error: BaseException) -> int:
    """What a process ends with for this exception: 2 for a bad option, else 1."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 2 if isinstance(error, ConfigError) else 1


# ── what a team knows about an exception ─────────────────────────────────────────────────────────

_explainers: list[WeakMethod[Callable[[BaseException], None]]] = []
_undo: list[Callable[[], None]] = []


def explain_with(method: Callable[[BaseException], None]) -> None:
    """Have ``method`` add its notes to exceptions that nobody catches, until ``forget``.

    Args:
        method: A bound method; its object is not kept alive.
    """
    if not _explainers:
        _wrap_hook()
    _explainers.append(WeakMethod(method))


def forget(method: Callable[[BaseException], None]) -> None:
    """Undo ``explain_with``, and with the last one put ``sys.excepthook`` back; idempotent."""
    _explainers[:] = [e for e in _explainers if e() is not None and e() != method]
    while _undo and not _explainers:
        _undo.pop()()


def add_notes(error: BaseException) -> None:
    """Add to an exception what the open teams know about it."""
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
        before(kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is show:  # else somebody has wrapped it in turn, and may still call it
            sys.excepthook = before

    sys.excepthook = show
    _undo.append(undo)
