"""Find the files of a corpus."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NoReturn, Self

from evener.errors import DataError

RECORD_SUFFIXES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")
"""Suffixes of files with a document per line or row."""

_PROSE: Final = ".txt .text .md .rst .tex"
_PROGRAMS: Final = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .js .jsx .ts .tsx .rb .php .pl .lua .jl .r "
    ".scala .swift .sh .sql"
)
DEFAULT_SUFFIXES: Final = (*_PROSE.split(), *_PROGRAMS.split(), *RECORD_SUFFIXES)
"""Suffixes of files that are read from folders: prose, program sources, records."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a corpus.

    Attributes:
        label: Path relative to its source, with ``/``; begins with the source's number and name
            if there are several. The same on every machine; files are ordered by it.
        path: Where the file is on this machine.
        size: In bytes.
        mtime_ns: When it was modified.
    """

    label: str
    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, label: str, path: Path) -> Self:
        """Return the file at ``path`` as it is now."""
        stat = path.stat()
        return cls(label, path, stat.st_size, stat.st_mtime_ns)

    @property
    def has_records(self) -> bool:
        """Whether the file has a document per line or row, by its name."""
        return self.path.name.lower().endswith(RECORD_SUFFIXES)


def stdlib_sources() -> tuple[Path, tuple[str, ...]]:
    """Find text that every machine has: the sources of Python's standard library.

    Returns:
        The root folder and the globs to exclude: tests, vendored tools, installed packages.
    """
    names = "test tests idle_test idlelib lib2to3 site-packages dist-packages lib-dynload ensurepip"
    return Path(sysconfig.get_path("stdlib")), (*names.split(), "__pycache__", "config-*")


def find_files(
    sources: Sequence[Path], suffixes: Sequence[str] | None, exclude: Sequence[str]
) -> list[SourceFile]:
    """List the files of a corpus in the order of their labels.

    Folders are searched recursively. Names that begin with a dot, linked folders, broken links and
    files that are not regular are skipped. A file that is itself a source is always used.

    Args:
        sources: Files and folders; at least one.
        suffixes: Suffixes of files to read from folders, of any case; ``""`` is every file; None
            is ``DEFAULT_SUFFIXES``.
        exclude: Globs. One without a slash is matched with the names of files and folders, one
            with a slash with the whole path relative to its source; ``*`` also matches slashes.
            A folder is excluded with its content.

    Raises:
        DataError: A source is missing or unreadable, or nothing matches.
    """
    endings = tuple(s.lower() for s in (DEFAULT_SUFFIXES if suffixes is None else suffixes))
    found: list[SourceFile] = []
    for number, source in enumerate(sources):
        prefix = f"{number}-{source.name}" if len(sources) > 1 else ""
        try:
            if source.is_dir():
                for below in _walk(source, exclude):
                    if below.lower().endswith(endings):
                        label = f"{prefix}/{below}" if prefix else below
                        found.append(SourceFile.of(label, source / below))
            elif source.is_file():
                found.append(SourceFile.of(prefix or source.name, source))
            else:
                raise DataError(
                    f"{source} does not exist, or is not a regular file: check the path to the "
                    f"training data (relative paths start at {Path.cwd()})"
                )
        except OSError as error:
            raise DataError(
                f"{error.filename} cannot be read: {error.strerror}. Check its permissions, or "
                "exclude it"
            ) from error
    if not found:
        raise DataError(
            f"{', '.join(map(str, sources))}: no file ends in {' '.join(endings)}. Name the folder "
            "that holds the text, pass its suffixes, or exclude less"
        )
    return sorted(found, key=lambda file: file.label)


def _walk(root: Path, exclude: Sequence[str]) -> Iterator[str]:
    """Yield the paths of regular files, relative to ``root``, with ``/``."""

    def is_wanted(below: Path) -> bool:
        return not below.name.startswith(".") and not any(
            fnmatchcase(below.as_posix() if "/" in glob else below.name, glob) for glob in exclude
        )

    for folder, folders, names in os.walk(root, onerror=_raise):
        here = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if is_wanted(here / name)]
        for below in filter(is_wanted, (here / name for name in names)):
            if (root / below).is_file():
                yield below.as_posix()


def _raise(error: OSError) -> NoReturn:
    raise error
