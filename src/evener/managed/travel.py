"""Pickle the user's functions and data by value for evener's own child processes.

cloudpickle handles lambdas, closures and definitions in ``__main__`` or in a notebook cell, so a
child never runs the user's script again. Only here evener unpickles: bytes that this process or its
parent has pickled.
"""

import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping
from typing import IO, Any

import cloudpickle

from evener.errors import ConfigError, LaunchError


def pack(parts: Mapping[str, Any]) -> IO[bytes]:
    """Pickle values into a file without a name, which child processes can inherit.

    All are pickled together, so that functions that share variables still share them.

    Args:
        parts: Values by the name of their option.

    Raises:
        ConfigError: Names an option that cannot be pickled, and quotes cloudpickle's error.
    """
    file = anonymous_file()
    try:
        cloudpickle.dump(dict(parts), file)
        file.flush()
    except Exception as error:  # whatever a user's __reduce__ raises
        file.close()
        option = next((name for name, part in parts.items() if not _can_travel(part)), "an option")
        raise ConfigError(
            f"{option} cannot be pickled for the workers: {type(error).__name__}: {error}; "
            "create it inside the function or in model_fn, which run in each worker; a data set "
            "may be given as a function that makes it"
        ) from error
    return file


def _can_travel(part: Any) -> bool:
    try:
        cloudpickle.dumps(part)
    except Exception:  # as above
        return False
    return True


def unpack(fd: int) -> dict[str, Any]:
    """Read in the child what ``pack`` has written; children read the same memory.

    Raises:
        LaunchError: Something is missing in this process, such as a module.
    """
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
            parts: dict[str, Any] = pickle.loads(data)  # noqa: S301 - from our own parent
    except Exception as error:  # whatever importing a user's module raises
        raise LaunchError(
            f"the functions and data could not be loaded in the worker process: "
            f"{type(error).__name__}: {error}. Modules must be importable there: put them on "
            f"PYTHONPATH, install them, or pickle them: cloudpickle.register_pickle_by_value"
        ) from error
    return parts


def anonymous_file() -> IO[bytes]:
    """Return a file without a name, which worker processes can inherit."""
    try:
        return os.fdopen(os.memfd_create("evener-managed"), "w+b")
    except AttributeError:  # not available on this system
        return tempfile.TemporaryFile()
