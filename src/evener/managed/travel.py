"""Carries the user's functions and data into evener's own child processes, by value.

cloudpickle takes lambdas, closures and what is defined in ``__main__`` or in a notebook cell, so a
child never runs the user's script again. This is the one place where evener unpickles: bytes that
this very process, or its parent, has pickled.
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

    All at once, so that functions which share variables still share them.

    Args:
        parts: Values by the name of the option that they were given as.

    Raises:
        ConfigError: Names an option that cannot travel, and says what cloudpickle says.
    """
    file = anonymous_file()
    try:
        cloudpickle.dump(dict(parts), file)
        file.flush()
    except Exception as error:  # whatever a user's __reduce__ raises
        file.close()
        option = next((name for name, part in parts.items() if not _can_travel(part)), "an option")
        raise ConfigError(
            f"{option} cannot travel to the worker processes: {type(error).__name__}: {error}; "
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


def anonymous_file() -> IO[bytes]:
    """Return a file without a name, which worker processes can inherit."""
    try:
        return os.fdopen(os.memfd_create("evener-managed"), "w+b")
    except AttributeError:  # not on this system
        return tempfile.TemporaryFile()
