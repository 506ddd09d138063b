"""How worker processes start: the one place that decides between ``spawn`` and ``fork``.

1. A ``DataLoader`` that names a ``multiprocessing_context`` gets it.
2. ``spawn``, wherever that works: a spawned process imports what it needs, and holds nothing of a
   rank's threads and sockets. It works where everything pickles, and where importing the script
   does not train again: under a main guard.
3. Elsewhere ``fork``, on Linux: the worker has all that the rank has, as torch's own workers do.
   The context is named, since from Python 3.14 on the default one would import the script.
4. On other systems a forked process may crash in the system's libraries, so that is an error.
"""

import ast
import multiprocessing
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from evener.errors import ConfigError, DataError

_hiding = threading.Lock()


class ByValue:
    """What pickles whole: a process that is given it needs no import of the user's script."""


@contextmanager
def hidden_script() -> Iterator[None]:
    """Processes spawned inside do not import the main script, as where there is none.

    ``multiprocessing`` knows the script by these two attributes, and does without in a notebook.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    with _hiding:
        hidden = {str(n): main.pop(n) for n in ("__file__", "__spec__") if n in main}
        main["__spec__"] = None
        try:
            yield
        finally:
            del main["__spec__"]
            main.update(hidden)


def is_by_value(parts: Sequence[object]) -> bool:
    """Return whether a worker can be given these without the user's script."""
    return all(isinstance(part, ByValue) for part in parts)


def choose_context(
    parts: Sequence[object],
    num_workers: int,
    named: BaseContext | None = None,
    *,
    platform: str = sys.platform,
) -> BaseContext:
    """Choose how workers start, by the rules of this module.

    Args:
        parts: What each worker is given: the data set, and the user's functions.
        num_workers: How many there will be, for messages.
        named: What the user's ``DataLoader`` names.
        platform: As ``sys.platform``.

    Returns:
        The context of ``multiprocessing`` whose processes are the workers.

    Raises:
        ConfigError: Each worker would run the user's script again, and cannot be forked.
        DataError: Something does not pickle, and workers cannot be forked.
    """
    if named is not None and named.get_start_method() == "fork":
        return named
    error = _spawning_fails(parts, num_workers)
    if error is None:
        return named or multiprocessing.get_context("spawn")
    if named is None and platform == "linux":
        return multiprocessing.get_context("fork")
    raise error


def _spawning_fails(parts: Sequence[object], num_workers: int) -> ConfigError | DataError | None:
    if is_by_value(parts):
        return None
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path == "<stdin>":
        return ConfigError(
            f"num_workers={num_workers} starts processes that import the script, which was read "
            "from standard input; save it as a file or use num_workers=0"
        )
    line = None if path is None else _unguarded_line(vars(main), Path(path))
    if line is not None:
        return ConfigError(
            f"num_workers={num_workers} starts processes that import {path}, and line {line} would "
            'train in each of them again. Put it under `if __name__ == "__main__":` or use '
            "num_workers=0"
        )
    for part in parts:
        try:
            _rehearse_pickling(part, has_script=path is not None)
        except Exception as error:  # whatever a user's __reduce__ raises
            name = getattr(part, "__qualname__", type(part).__qualname__)
            return DataError(
                f"{name} cannot be sent to worker processes: {type(error).__name__}: {error}. "
                "Define it at the top level of a module and open files and locks in __getitem__, "
                "or use num_workers=0"
            )
    return None


def _unguarded_line(main: dict[str, Any], path: Path) -> int | None:
    """Return the running line of the main script, unless a main guard keeps it from imports.

    A spawned process imports the main script to find its classes. A script without a guard would
    there join the team a second time as the same rank, before multiprocessing could object.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals is main
    ):
        frame = frame.f_back
    if frame is None:
        return None
    try:
        statements = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None  # a zip application or the like: multiprocessing decides
    if any(_is_guard(node, frame.f_lineno) for node in statements):
        return None
    return frame.f_lineno


def _is_guard(node: ast.stmt, line: int) -> bool:
    return (
        isinstance(node, ast.If)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and any(
            isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
        )
    )


class _TrialPickler(ForkingPickler):
    """Pickles as for a spawned process, but for the contents of arrays, which always pickle."""

    def __init__(self, *, has_script: bool) -> None:
        super().__init__(_Nowhere())
        self._has_script = has_script

    def persistent_id(self, thing: Any) -> str | None:
        if isinstance(thing, type | FunctionType) and not self._has_script:
            if thing.__module__ == "__main__":
                raise PicklingError(f"{thing.__qualname__} is not defined in a script or module")
        elif isinstance(thing, np.ndarray):
            return None if thing.dtype.hasobject else "array"
        return "tensor" if isinstance(thing, torch.Tensor) else None


class _Nowhere:
    """A file, and a process being spawned, that take everything and keep nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor

    def DupFd(self, descriptor: int) -> int:  # noqa: N802  the name that multiprocessing asks for
        return descriptor


def _rehearse_pickling(part: object, *, has_script: bool) -> None:
    # Locks and queues pickle only for a process that is being spawned.
    set_spawning_popen(_Nowhere())  # type: ignore[arg-type]
    try:
        _TrialPickler(has_script=has_script).dump(part)
    finally:
        set_spawning_popen(None)
