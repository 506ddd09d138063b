"""Classify errors that torch raises in an exchange: a lost peer, a deadline, or neither.

torch has types for some of them. Gloo has none: it raises ``RuntimeError`` for everything, and its
operations keep no result. So the text decides, too. Loads no torch, as launchers ask, too.
"""

import re
from enum import Enum
from typing import Final

Cause = Enum("Cause", ["LOST", "TIMED_OUT", "OTHER"])

#: The name of the base of all exceptions of ``torch.distributed``, also of what NCCL raises.
_BASE: Final = "DistError"
# Names of exceptions, and messages from C++ by torch 2.13. ``DistStoreError`` means that a key did
# not come. "Connection timed out" are the kernel's words, after "Read error" or "Write error".
_TIMED_OUT: Final = re.compile(r"DistStoreError|[Tt]imed out|[Tt]imeout")
_LOST: Final = re.compile(
    "DistNetworkError|closed by peer|reset by peer|Connection refused|Broken pipe|Read error|"
    "Write error|Socket closed|connectFullMesh failed|ncclRemoteError"
)


def cause_of(error: BaseException) -> Cause:
    """Return what an error means that an operation, or the store, has raised."""
    text = " ".join([*_names(error), str(error)])
    if _TIMED_OUT.search(text):
        return Cause.TIMED_OUT
    return Cause.LOST if _LOST.search(text) else Cause.OTHER


def is_of_an_exchange(error: BaseException) -> bool:
    """Return whether torch raised an error in an exchange, evener's or the script's own."""
    if _BASE in _names(error):
        return True
    # Gloo has no exception of its own, but gives the path of its source file (torch 2.13).
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def _names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]
