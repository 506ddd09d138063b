"""Classify errors that torch raises in an exchange: a lost peer, a deadline, or neither.

The exception's type and the state of the operation decide, as far as torch offers them. Gloo offers
neither: it raises ``RuntimeError`` for everything, and its operations keep no result. For these,
and only for these, the text decides. Loads no torch, as launchers ask, too.
"""

from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, Final

Cause = Enum("Cause", ["LOST", "TIMED_OUT", "OTHER"])

#: Exceptions of ``torch.distributed`` that mean one thing, by name.
_TYPES: Final = {
    "DistNetworkError": Cause.LOST,  # a socket of the store or of a peer
    "DistStoreError": Cause.TIMED_OUT,  # a key did not come
}
#: The name of the base of them all, also of what NCCL raises.
_BASE: Final = "DistError"
#: States of an operation (``torch.distributed`` calls the enumeration ``WorkResult``), by number.
_RESULTS: Final = {1: Cause.TIMED_OUT, 2: Cause.LOST}


#: The last resort: parts of messages from C++, by torch 2.13. The first that fits counts.
_TEXTS: Final = {
    "Timed out waiting": Cause.TIMED_OUT,  # Gloo; raised in tests
    "Application timeout caused pair closure": Cause.TIMED_OUT,  # Gloo; raised in tests
    "Operation timed out!": Cause.TIMED_OUT,  # torch
    "Connect timeout": Cause.TIMED_OUT,  # Gloo
    # The kernel's words, after "Read error" or "Write error": the peer does not answer any more.
    "Connection timed out": Cause.TIMED_OUT,
    "Connection closed by peer": Cause.LOST,  # Gloo; raised in tests
    "Connection reset by peer": Cause.LOST,  # the kernel; raised in tests
    "Connection refused": Cause.LOST,  # the kernel
    "Broken pipe": Cause.LOST,  # the kernel; raised in tests
    "Read error": Cause.LOST,  # Gloo; raised in tests
    "Write error": Cause.LOST,  # Gloo
    "Socket closed": Cause.LOST,  # Gloo
    "connectFullMesh failed": Cause.LOST,  # Gloo
    "ncclRemoteError": Cause.LOST,  # NCCL
}


def cause_of(error: BaseException, works: Iterable[Any] = ()) -> Cause:
    """Return what an error means.

    Args:
        error: What an operation, or the store, has raised.
        works: The operations that were under way, as torch's ``Work``.
    """
    for name in _names(error):
        if name in _TYPES:
            return _TYPES[name]
    for work in works:
        if (result := _result_of(work)) in _RESULTS:
            return _RESULTS[result]
    text = str(error)
    return next((cause for part, cause in _TEXTS.items() if part in text), Cause.OTHER)


def is_of_an_exchange(error: BaseException) -> bool:
    """Return whether torch raised an error because of a peer or the store, not of the caller."""
    if _BASE in _names(error):
        return True
    # Gloo has no exception of its own, but gives the path of its source file (torch 2.13).
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def _names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def _result_of(work: Any) -> int:
    """Return the state of an operation that has ended; 0 where there is none, as for Gloo's."""
    with suppress(RuntimeError, AttributeError):
        future = work.get_future_result()
        if future.done():
            return int(future.value())
    return 0
