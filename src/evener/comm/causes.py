"""What an error that torch raises in an exchange means: a lost peer, a deadline, or neither.

Told by the exception's type and by the state of the operation, as far as torch offers them. Gloo
offers neither: it raises ``RuntimeError`` for everything, and its operations keep no result. For
these, and only for these, the text decides. Loads no torch, as launchers ask, too.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Text:
    """A part of a message from C++.

    Attributes:
        part: What the message holds.
        cause: What that means.
        library: Whose message it is.
        seen: Versions of torch that raised it in a test or an experiment of ours; where there are
            none, it stands in the library of that version and was never seen raised.
    """

    part: str
    cause: Cause
    library: str
    seen: tuple[str, ...] = ()


#: The last resort. The first that fits counts.
_TEXTS: Final = (
    _Text("Timed out waiting", Cause.TIMED_OUT, "Gloo in torch 2.13", ("2.13",)),
    _Text("Application timeout caused pair closure", Cause.TIMED_OUT, "Gloo", ("2.13",)),
    _Text("Operation timed out!", Cause.TIMED_OUT, "torch 2.13"),
    _Text("Connect timeout", Cause.TIMED_OUT, "Gloo in torch 2.13"),
    # The kernel's words, after "Read error" or "Write error": nobody answers any more.
    _Text("Connection timed out", Cause.TIMED_OUT, "the kernel"),
    _Text("Connection closed by peer", Cause.LOST, "Gloo", ("2.13",)),
    _Text("Connection reset by peer", Cause.LOST, "the kernel", ("2.13",)),
    _Text("Connection refused", Cause.LOST, "the kernel"),
    _Text("Broken pipe", Cause.LOST, "the kernel", ("2.13",)),
    _Text("Read error", Cause.LOST, "Gloo", ("2.13",)),
    _Text("Write error", Cause.LOST, "Gloo"),
    _Text("Socket closed", Cause.LOST, "Gloo in torch 2.13"),
    _Text("connectFullMesh failed", Cause.LOST, "Gloo in torch 2.13"),
    _Text("ncclRemoteError", Cause.LOST, "NCCL"),
)


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
    return next((known.cause for known in _TEXTS if known.part in text), Cause.OTHER)


def is_of_an_exchange(error: BaseException) -> bool:
    """Return whether torch raised an error because of a peer or the store, not of the caller."""
    if _BASE in _names(error):
        return True
    # Gloo has no exception of its own, but gives the path of its source file (torch 2.13).
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def _names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def _result_of(work: Any) -> int:
    """The state of an operation that has ended; 0 where there is none, as for Gloo's."""
    with suppress(RuntimeError, AttributeError):
        future = work.get_future_result()
        if future.done():
            return int(future.value())
    return 0
