"""Files read from a disk on which anything may stand in the place of what was written."""

import errno
import os
from io import BufferedReader
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Final

from evener.parsing import parse_json

MOST_BYTES: Final = 256 * 1024 * 1024
"""A document larger than this is not read; those that evener writes have some megabytes."""


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """Open a file and return its descriptor; never wait for the other end of a FIFO.

    Args:
        path: The file.
        flags: As for ``os.open``.
        follow: Whether ``path`` may be a symbolic link.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", *(() if follow else ("O_NOFOLLOW",))):
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not S_ISREG(mode):
        os.close(descriptor)
        if S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_for_reading(path: Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading as a binary stream; see ``open_regular``."""
    return os.fdopen(open_regular(path, follow=follow), "rb")


def require_regular(folder: Path) -> None:
    """Check that a folder holds regular files and folders only, before a library reads it.

    Libraries open what they find by name, and one would wait for the other end of a FIFO for good.

    Raises:
        OSError: Something else is in it, or it cannot be read.
    """
    for path in folder.iterdir():
        mode = path.stat().st_mode
        if not S_ISREG(mode) and not S_ISDIR(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path, *, most_bytes: int = MOST_BYTES, follow: bool = True) -> bytes:
    """Read a regular file.

    Raises:
        OSError: It cannot be read, is not a regular file, or holds more than ``most_bytes``.
    """
    with open_for_reading(path, follow=follow) as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return data


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        OSError: As ``read_file``.
        ValueError: As ``parse_json``.
    """
    return parse_json(read_file(path, most_bytes=most_bytes))
