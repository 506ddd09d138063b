"""What a team knows about an exception is added to it before the process ends of it.

``sys.excepthook`` is wrapped while a team is open. A rank of evener's launcher reports its error by
``report_failure`` instead, which asks here, too.
"""

import sys
from collections.abc import Callable
from types import TracebackType
from weakref import WeakMethod

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


def explain(error: BaseException) -> None:
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
        explain(error)
        before(kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is show:  # else somebody has wrapped it in turn, and may still call it
            sys.excepthook = before

    sys.excepthook = show
    _undo.append(undo)
