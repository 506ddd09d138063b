"""Carries the user's functions and data into evener's own child processes, by value.

cloudpickle takes lambdas, closures and what is defined in ``__main__`` or in a notebook cell, so a
child never runs the user's script again. This is the one place where evener unpickles: bytes that
this very process, or its parent, has pickled.
"""

import mmap
import os
import pickle
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import IO, Any

import cloudpickle

from evener.errors import ConfigError, LaunchError

_REMEDY = (
    "create it inside the function or in model_fn, which run in each worker; a data set may be "
    "given as a function that makes it"
)


def pack(parts: Mapping[str, Any]) -> IO[bytes]:
    """Pickle values into a file without a name, which child processes can inherit.

    All at once, so that functions which share variables still share them.

    Args:
        parts: Values by the name of the option that they were given as.

    Raises:
        ConfigError: Names the option, and what in it cannot travel.
    """
    file = _anonymous_file()
    try:
        cloudpickle.dump(dict(parts), file)
        file.flush()
    except Exception as error:  # whatever a user's __reduce__ raises
        file.close()
        raise ConfigError(_diagnose(parts, error)) from error
    return file


def unpack(fd: int) -> dict[str, Any]:
    """Read in the child what ``pack`` has written; other children read the same memory.

    Raises:
        LaunchError: Something is not there in this process, such as a module.
    """
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
            parts: dict[str, Any] = pickle.loads(data)  # noqa: S301 - from our own parent
    except Exception as error:  # whatever importing a user's module raises
        raise LaunchError(
            f"the functions and data could not be loaded in the worker process: "
            f"{type(error).__name__}: {error}. Modules must be importable there: put them on "
            f"PYTHONPATH, install them, or let them travel: cloudpickle.register_pickle_by_value"
        ) from error
    return parts


def _anonymous_file() -> IO[bytes]:
    try:
        return os.fdopen(os.memfd_create("evener-job"), "w+b")
    except AttributeError:  # not on this system
        return tempfile.TemporaryFile()


# ── saying what cannot travel ────────────────────────────────────────────────────────────────────


def _diagnose(parts: Mapping[str, Any], error: Exception) -> str:
    what, reason = "the options", str(error)
    for option, value in parts.items():
        if not (refusal := _refusal(value)):
            continue
        what, reason = option, refusal
        for path, inner in _inside(option, value):
            if refusal := _refusal(inner):
                what, reason = f"{path} (a {_type_name(inner)})", refusal
                break
        break
    return f"{what} cannot travel to the worker processes: {reason}; {_REMEDY}"


def _refusal(value: Any) -> str:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # whatever a user's __reduce__ raises
        return f"{type(error).__name__}: {error}"
    return ""


def _inside(option: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value captures, and where in words; functions that it calls are searched."""
    seen: set[int] = set()
    queue = [(option, value)]
    while queue:
        path, owner = queue.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, inner in _captured(owner):
            where = f"{name} in {path}"
            if isinstance(inner, types.FunctionType | types.MethodType | type):
                queue.append((where, inner))
            else:
                yield where, inner


def _captured(owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, types.MethodType):
        yield "self", owner.__self__
        owner = owner.__func__
    if isinstance(owner, types.FunctionType):
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                yield repr(name), cell.cell_contents
        for name in owner.__code__.co_names:
            if name in owner.__globals__:
                yield repr(name), owner.__globals__[name]
        for default in [*(owner.__defaults__ or ()), *(owner.__kwdefaults__ or {}).values()]:
            yield "a default value", default
    else:
        for name, inner in getattr(owner, "__dict__", {}).items():
            yield repr(name), inner


def _type_name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
