"""What a rank that fails tells its launcher, before it exits."""

import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

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
