"""Which files a corpus is made of."""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from typing import Final

from evener.errors import DataError
from evener.files import open_for_reading

RECORD_SUFFIXES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")
"""File endings of files that hold a document per line or row."""

_PROSE: Final = ".txt .text .md .rst .tex"
_PROGRAMS: Final = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .js .jsx .ts .tsx .rb .php .pl .lua .jl .r "
    ".scala .swift .sh .sql"
)
DEFAULT_SUFFIXES: Final = (*_PROSE.split(), *_PROGRAMS.split(), *RECORD_SUFFIXES)
"""File endings that are taken from folders: prose, program sources, records."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a corpus.

    Attributes:
        label: Path relative to its source, with ``/``; begins with the source's number and name
            if there are several. The same on every machine; files are ordered by it.
        path: Where it lies here.
        size: In bytes.
        mtime_ns: When it was modified.
        named: The user named the file itself, and not a folder that holds it.
    """

    label: str
    path: Path
    size: int
    mtime_ns: int
    named: bool

    @contextmanager
    def reading(self) -> Iterator[BufferedReader]:
        """Open the file, and check at the end of the block that nobody has written to it.

        Raises:
            DataError: It cannot be read, or has another size or modification time than when it
                was found.
        """
        try:
            with open_for_reading(self.path) as stream:
                yield stream
                stat = os.fstat(stream.fileno())
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read: {error.strerror}. Check its permissions, or "
                "exclude it"
            ) from error
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise DataError(
                f"{self.path} has changed while it was read: start again when nothing writes to it"
            )


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
    if not sources:
        raise DataError("no data: name at least one text file or folder")
    endings = tuple(s.lower() for s in (DEFAULT_SUFFIXES if suffixes is None else suffixes))
    others: Counter[str] = Counter()
    found: dict[tuple[int, int], SourceFile] = {}

    def add(label: str, path: Path, *, named: bool) -> None:
        stat = path.stat()
        file = SourceFile(label, path, stat.st_size, stat.st_mtime_ns, named)
        inode = stat.st_dev, stat.st_ino
        found[inode] = min(file, found.get(inode, file), key=lambda file: file.label)

    for number, source in enumerate(sources):
        name = f"{number}-{source.name}" if len(sources) > 1 else ""
        try:
            source.stat()  # what is missing is neither a folder nor a file
            if source.is_dir():
                for below in _walk(source, exclude):
                    if below.lower().endswith(endings):
                        add(f"{name}/{below}" if name else below, source / below, named=False)
                    else:
                        others[Path(below).suffix or "no suffix"] += 1
            elif source.is_file():
                add(name or source.name, source, named=True)
            else:
                raise DataError(f"{source} is not a regular file: copy its text into a file")
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
        seen = ", ".join(f"{count} x {suffix}" for suffix, count in others.most_common(5))
        there = f"there are only others ({seen})" if seen else "any others are hidden or left out"
        raise DataError(
            f"{', '.join(map(str, sources))}: no file ends in {' '.join(endings)}; {there}. Name "
            "the folder that holds the text, pass its suffixes, or leave less out"
        )
    return sorted(found.values(), key=lambda file: file.label)


def _walk(root: Path, exclude: Sequence[str]) -> Iterator[str]:
    """Yield the paths of regular files, relative to ``root``, with ``/``."""
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
                elif entry.is_file():
                    yield below
