"""Files read from a disk where anything may be in their place, and written whole or not at all."""

import errno
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def explaining(what: str, remedy: str, kind: type[Exception]) -> Iterator[None]:
    """Raise an error of ``kind`` in place of an ``OSError``, such as of a folder without access.

    Args:
        what: What is read in the block, for messages.
        remedy: What to do.
        kind: Class of the error.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what} cannot be read: {error}; {remedy}") from error


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


def read_json(path: Path, *, follow: bool = True) -> Any:
    """Read a JSON file.

    Raises:
        OSError: As ``read_file``.
        ValueError: As ``parse_json``.
    """
    return parse_json(read_file(path, follow=follow))


def blake2b(data: bytes = b"") -> "hashlib.blake2b":
    """Return a new hash object for contents (BLAKE2b, 128 bits)."""
    return hashlib.blake2b(data, digest_size=16)


def hash_file(path: Path, kind: str | Callable[[], Any]) -> str:
    """Return the hash of a regular file as hexadecimal digits; releases the interpreter lock.

    Args:
        path: The file.
        kind: As for ``hashlib.file_digest``, such as ``"sha256"`` or ``blake2b``.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    with open_for_reading(path) as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock a file for as long as it is open; return whether no other process holds the lock.

    Where the system or the file system knows no locks, the result is true.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def unique_suffix() -> str:
    """Return ``<pid>-<token>`` for the name of something unfinished."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def flush(path: Path) -> None:
    """Force a file, or the entries of a folder, onto the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it.

    Raises:
        OSError: It cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole: a reader sees what was there before, or all of ``data``.

    Raises:
        OSError: It cannot be written; what was there is untouched.
    """
    write_pieces(path, [data])


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whole, as ``write_file``, from pieces that are made one after another."""
    scratch = path.with_name(f"{path.name}.tmp-{unique_suffix()}")
    try:
        with scratch.open("wb") as stream:
            stream.writelines(pieces)
        flush(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def publish_folder(scratch: Path, final: Path) -> None:
    """Rename a finished folder to its final name, also when there is something of that name.

    What is there is moved aside first, as ``<name>.replaced-<pid>-<token>``, and deleted last: at
    any moment one of the two is there.

    Raises:
        OSError: It cannot be renamed, or another process has published at the same time.
    """
    replaced: Path | None = None
    if os.path.lexists(final):  # a link that leads nowhere is in the way, too
        replaced = final.with_name(f"{final.name}.replaced-{unique_suffix()}")
        final.rename(replaced)
    try:
        scratch.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    flush(final.parent)
    if replaced is not None:
        with suppress(OSError):  # the next process that tidies removes what is left
            remove(replaced)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Give an empty folder to fill; when the block has ended, publish it as ``final``.

    Raises:
        OSError: It cannot be made, or as ``publish_folder``.
    """
    scratch = final.with_name(f"{final.name}.tmp-{unique_suffix()}")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        publish_folder(scratch, final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
