"""Which files a corpus is made of."""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from evener.errors import DataError
from evener.files import blake2b, open_for_reading

RECORD_SUFFIXES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")
"""File endings of files that hold a document per line or row."""

_PROSE: Final = ".txt .text .md .rst .tex"
_PROGRAMS: Final = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .js .jsx .ts .tsx .rb .php .pl .lua .jl .r "
    ".scala .swift .sh .sql"
)
DEFAULT_SUFFIXES: Final = (*_PROSE.split(), *_PROGRAMS.split(), *RECORD_SUFFIXES)
"""File endings that are taken from folders: prose, program sources, records."""

_BUFFER_BYTES: Final = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a corpus, and what tells whether it has changed.

    Attributes:
        label: Path relative to its source, with ``/``; begins with the source's number and name
            if there are several. The same on every machine; files are ordered by it.
        path: Where it lies here.
        size: In bytes.
        stamp: (modification time, change time) in ns.
        identity: (device, inode).
        named: It was named itself, and not found in a folder.
    """

    label: str
    path: Path
    size: int
    stamp: tuple[int, int]
    identity: tuple[int, int]
    named: bool


def stdlib_sources() -> tuple[Path, tuple[str, ...]]:
    """Find text that is on every machine: the sources of Python's standard library.

    Returns:
        The root folder and the globs to leave out: tests, vendored tools, installed packages.
    """
    names = "test tests idle_test idlelib lib2to3 site-packages dist-packages lib-dynload ensurepip"
    return Path(sysconfig.get_path("stdlib")), (*names.split(), "__pycache__", "config-*")


def find_files(
    sources: Sequence[Path], suffixes: Sequence[str] | None, exclude: Sequence[str]
) -> list[SourceFile]:
    """List the files of a corpus in the order of their labels.

    Folders are walked in depth. Left out are names that begin with a dot, linked folders, broken
    links, whatever is not a regular file, and a file that was met before under another name (same
    inode). A file that is itself a source is taken whatever its name.

    Args:
        sources: Files and folders.
        suffixes: File endings to take from folders, of any case; ``""`` takes every file; None is
            ``DEFAULT_SUFFIXES``.
        exclude: Globs. One without a slash is matched with the names of files and folders, one
            with a slash with the whole path relative to its source; ``*`` also matches slashes.
            A folder is left out with all that it holds.

    Raises:
        DataError: A source is missing or unreadable, or nothing matches.
    """
    endings = tuple(s.lower() for s in (DEFAULT_SUFFIXES if suffixes is None else suffixes))
    if not sources:
        raise DataError("no data: name at least one text file or folder")
    others: Counter[str] = Counter()
    found: list[SourceFile] = []
    for number, source in enumerate(sources):
        prefix = f"{number}-{source.name}/" if len(sources) > 1 else ""
        try:
            if source.is_dir():
                found.extend(_walk(source, prefix, endings, tuple(exclude), others))
            else:
                file = _source_file(prefix[:-1] or source.name, source, source.stat(), named=True)
                if not source.is_file():
                    raise DataError(f"{source} is not a regular file: copy its text into a file")
                found.append(file)
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename} does not exist: check the path to the training data "
                f"(relative paths start at {Path.cwd()})"
            ) from error
        except OSError as error:
            raise DataError(
                f"{error.filename} cannot be read: {error.strerror}. Check its permissions, or "
                f"exclude it"
            ) from error
    if not found:
        _say_nothing_matches(sources, endings, others)
    once: dict[tuple[int, int], SourceFile] = {}
    for file in sorted(found, key=lambda file: file.label):
        once.setdefault(file.identity, file)
    return list(once.values())


def _source_file(label: str, path: Path, stat: os.stat_result, *, named: bool) -> SourceFile:
    return SourceFile(
        label=label,
        path=path,
        size=stat.st_size,
        stamp=(stat.st_mtime_ns, stat.st_ctime_ns),
        identity=(stat.st_dev, stat.st_ino),
        named=named,
    )


def _walk(
    root: Path,
    prefix: str,
    endings: tuple[str, ...],
    exclude: tuple[str, ...],
    others: Counter[str],
) -> Iterator[SourceFile]:
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                below = f"{folder}{entry.name}"
                if entry.name.startswith(".") or any(
                    fnmatchcase(below if "/" in glob else entry.name, glob) for glob in exclude
                ):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{below}/")
                elif not entry.is_file():
                    continue
                elif entry.name.lower().endswith(endings):
                    path = Path(entry.path)
                    yield _source_file(prefix + below, path, entry.stat(), named=False)
                else:
                    others[Path(entry.name).suffix or "no suffix"] += 1


def _say_nothing_matches(
    sources: Sequence[Path], endings: tuple[str, ...], others: Counter[str]
) -> None:
    where = ", ".join(map(str, sources))
    seen = ", ".join(f"{count} x {suffix}" for suffix, count in others.most_common(5))
    there = f"there are only others ({seen})" if seen else "any others are hidden or left out"
    raise DataError(
        f"{where}: no file ends in {' '.join(endings)}; {there}. Name the folder that holds the "
        f"text, pass its suffixes, or leave less out"
    )


def content_hash(file: SourceFile) -> str:
    """Hash a file's bytes (BLAKE2b, 128 bits, hexadecimal), reading a piece at a time.

    Raises:
        DataError: The file cannot be read.
    """
    with reading(file) as stream:
        return hashlib.file_digest(stream, blake2b).hexdigest()


@final
class _Hashing(RawIOBase):
    """What is read of a file, hashed on the way."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self._hasher = blake2b()
        self.is_at_end = False

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        self.is_at_end = not count
        self._hasher.update(memoryview(buffer)[:count])
        return count

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


@contextmanager
def reading_unchanged(file: SourceFile, expected_hash: str) -> Iterator[BinaryIO]:
    """Open a file that was hashed, and check at the end of the block that it is still the same.

    What was read to its end has its hash compared. Of other files, such as those that a library
    opens itself, size and times are compared, and the hash only where these differ.

    Raises:
        DataError: It cannot be read, or has other content.
    """
    with reading(file) as stream:
        hashing = _Hashing(stream)
        with BufferedReader(hashing, _BUFFER_BYTES) as buffered:
            yield buffered
        if hashing.is_at_end:
            is_same = hashing.hexdigest() == expected_hash
        else:
            stat = file.path.stat()
            times = (stat.st_mtime_ns, stat.st_ctime_ns)
            is_same = (stat.st_size, times) == (file.size, file.stamp)
            is_same = is_same or content_hash(file) == expected_hash
    if not is_same:
        raise DataError(
            f"{file.path} has changed while it was read: start again when nothing writes to it"
        )


@contextmanager
def reading(file: SourceFile) -> Iterator[BufferedReader]:
    """Open a file; what the system refuses is a ``DataError``."""
    try:
        with open_for_reading(file.path) as stream:
            yield stream
    except OSError as error:
        raise DataError(
            f"{file.path} cannot be read: {error.strerror}. Check its permissions, or exclude it"
        ) from error
