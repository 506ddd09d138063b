"""Which files a corpus is made of, and how a file becomes documents.

One file is one document. A file that stands alone, or that is larger than 4 MiB, is cut into
documents at paragraph boundaries: a single text file then has a held-out part as well, and memory
stays bounded.
"""

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final

from evener.errors import DataError

DEFAULT_SUFFIXES: Final = (
    *(".txt", ".text", ".md", ".rst", ".tex"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt"),
    *(".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".scala", ".swift"),
    *(".sh", ".sql"),
)
"""File endings that are taken from folders: prose and program sources."""

LARGE_FILE_BYTES: Final = 4 * 1024 * 1024
"""A file above this size is cut into documents."""

PIECE_BYTES: Final = 64 * 1024
"""About the size of the documents that a file is cut into."""

_MIN_PIECE_BYTES: Final = 1024
_WANTED_PIECES: Final = 20
_BINARY_PROBE_BYTES: Final = 8192
_READ_BYTES: Final = 1024 * 1024
_BLANK_LINES: Final = re.compile(rb"\n(?:[ \t\r]*\n)+")
_BOM: Final = b"\xef\xbb\xbf"


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
    """Finds text that is on every machine: the sources of Python's standard library.

    Returns:
        The root folder and the globs to leave out: tests, vendored tools, installed packages.
    """
    names = "test tests idle_test idlelib lib2to3 site-packages dist-packages lib-dynload ensurepip"
    return Path(sysconfig.get_path("stdlib")), (*names.split(), "__pycache__", "config-*")


def find_files(
    sources: Sequence[Path], suffixes: Sequence[str] | None, exclude: Sequence[str]
) -> list[SourceFile]:
    """Lists the files of a corpus in the order of their labels.

    Folders are walked in depth. Left out are names that begin with a dot, linked folders, broken
    links, whatever is no regular file, and a file that was met before under another name (same
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
                named = _source_file(prefix[:-1] or source.name, source, source.stat(), named=True)
                if named is None:
                    raise DataError(f"{source} is no regular file: copy its text into a file")
                found.append(named)
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


def _source_file(label: str, path: Path, stat: os.stat_result, *, named: bool) -> SourceFile | None:
    if not S_ISREG(stat.st_mode):
        return None
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
                if entry.name.startswith(".") or _is_excluded(entry.name, below, exclude):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{below}/")
                elif not entry.is_file():
                    continue
                elif entry.name.lower().endswith(endings):
                    file = _source_file(prefix + below, Path(entry.path), entry.stat(), named=False)
                    if file is not None:
                        yield file
                else:
                    others[Path(entry.name).suffix or "no suffix"] += 1


def _is_excluded(name: str, below: str, exclude: tuple[str, ...]) -> bool:
    return any(fnmatchcase(below if "/" in glob else name, glob) for glob in exclude)


def _say_nothing_matches(
    sources: Sequence[Path], endings: tuple[str, ...], others: Counter[str]
) -> None:
    where = ", ".join(map(str, sources))
    seen = ", ".join(f"{count} x {suffix}" for suffix, count in others.most_common(5))
    there = f"there are only others ({seen})" if seen else "there are none that are not left out"
    raise DataError(
        f"{where}: no file ends in {' '.join(endings)}; {there}. Name the folder that holds the "
        f"text, pass its suffixes, or leave less out"
    )


def content_hash(file: SourceFile) -> str:
    """Hashes a file's bytes (BLAKE2b, 128 bits, hexadecimal), reading a piece at a time.

    Raises:
        DataError: The file cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    with _reading(file) as stream:
        while chunk := stream.read(_READ_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its label (unique in the corpus), its text, and its size in bytes."""

    label: str
    text: str
    num_bytes: int


def read_documents(
    file: SourceFile,
    expected_hash: str,
    *,
    alone: bool,
    on_binary: Callable[[SourceFile], None] | None,
) -> Iterator[Document]:
    """Reads a file's documents in order; text is UTF-8, a byte order mark is dropped.

    Args:
        file: What to read.
        expected_hash: ``content_hash`` of the file.
        alone: The corpus has no other file, so that this one is cut into documents.
        on_binary: Told of a file with a NUL byte near its start, which then has no documents;
            None makes that an error.

    Raises:
        DataError: The file cannot be read, is not UTF-8 (named with the offset), is binary, or
            has changed since it was hashed.
    """
    hasher = hashlib.blake2b(digest_size=16)
    with _reading(file) as stream:

        def read(num_bytes: int) -> bytes:
            chunk = stream.read(num_bytes)
            hasher.update(chunk)
            return chunk

        is_cut = alone or file.size > LARGE_FILE_BYTES
        pieces = cut_pieces(read, _piece_bytes(file.size)) if is_cut else iter([(0, read(-1))])
        for number, (offset, piece) in enumerate(pieces):
            if offset == 0 and (nul := piece.find(b"\0", 0, _BINARY_PROBE_BYTES)) >= 0:
                if on_binary is None or file.named:
                    raise DataError(
                        f"{file.path} is not text: NUL at byte {nul}. Exclude it, or convert it to "
                        f"UTF-8 if it is UTF-16"
                    )
                on_binary(file)
                return
            label = f"{file.label}#{number}" if is_cut else file.label
            yield Document(label, _decode(file, offset, piece), len(piece))
    if hasher.hexdigest() != expected_hash:
        raise DataError(
            f"{file.path} has changed while it was read: start again when nothing writes to it"
        )


def cut_pieces(read: Callable[[int], bytes], target_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Cuts a stream of UTF-8 into pieces that are about ``target_bytes`` long.

    A piece ends with the first blank line after ``target_bytes``; where there is none before twice
    that, with the first line end after it, or at the last possible character. Pieces are never
    longer than twice ``target_bytes``, and their concatenation is the stream.

    Args:
        read: Returns up to so many bytes, and none at the end.
        target_bytes: Wanted size, at least 4.

    Yields:
        (offset in the stream, bytes).
    """
    buffer, offset, is_open = b"", 0, True
    while True:
        # One byte more than is looked at, which tells whether a cut would split a character.
        while is_open and len(buffer) <= 2 * target_bytes:
            chunk = read(2 * target_bytes)
            is_open = bool(chunk)
            buffer += chunk
        if not buffer:
            return
        # What would be a stub stays with the last piece.
        is_last = not is_open and len(buffer) <= target_bytes + target_bytes // 2
        cut = len(buffer) if is_last else _find_cut(buffer, target_bytes)
        yield offset, buffer[:cut]
        buffer, offset = buffer[cut:], offset + cut


def _find_cut(buffer: bytes, target_bytes: int) -> int:
    limit = min(2 * target_bytes, len(buffer))
    if paragraph := _BLANK_LINES.search(buffer, target_bytes - 1, limit):
        return paragraph.end()
    if (line := buffer.find(b"\n", target_bytes, limit)) >= 0:
        return line + 1
    cut = limit
    while cut > limit - 4 and cut < len(buffer) and buffer[cut] & 0xC0 == 0x80:
        cut -= 1  # inside a character
    return cut


def _piece_bytes(size: int) -> int:
    """A short file is cut finer, so that a twentieth of it can be held out."""
    return min(PIECE_BYTES, max(_MIN_PIECE_BYTES, size // _WANTED_PIECES))


def _decode(file: SourceFile, offset: int, piece: bytes) -> str:
    if offset == 0:
        piece, offset = piece.removeprefix(_BOM), len(_BOM) if piece.startswith(_BOM) else 0
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path} is not UTF-8: {error.reason} {piece[error.start]:#04x} at byte "
            f"{offset + error.start}. Convert it (iconv -t UTF-8) or exclude it"
        ) from error


@contextmanager
def _reading(file: SourceFile) -> Iterator[BinaryIO]:
    try:
        with file.path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(
            f"{file.path} cannot be read: {error.strerror}. Check its permissions, or exclude it"
        ) from error
