"""Where in the user's own code a rank is: file and line, for errors."""

import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType

_FOREIGN = (
    "<frozen ",
    str(Path(__file__).resolve().parent),  # evener itself
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts")),
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@lru_cache(maxsize=1024)
def is_users(file: str) -> bool:
    """Return whether a file is the user's own, and not of evener, Python or a library."""
    return not file.startswith(_FOREIGN) and _INSTALLED.isdisjoint(Path(file).parts)


def here() -> str:
    """Return the user's file and line that this call was made under; empty if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def raised_at(error: BaseException) -> str:
    """Return the innermost line of the user's code that an exception has passed through."""
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{line}"
    return place


def has_passed(error: BaseException, place: str) -> bool:
    """Return whether an exception has passed through a place, which ``here`` has returned."""
    passed = walk_tb(error.__traceback__)
    return any(f"{frame.f_code.co_filename}:{line}" == place for frame, line in passed)


def methods_passed(error: BaseException) -> Iterator[object]:
    """Yield the objects whose methods an exception has passed through."""
    for frame, _ in walk_tb(error.__traceback__):
        yield frame.f_locals.get("self")
