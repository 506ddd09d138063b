"""How a file becomes documents: plain text, JSON Lines (also compressed) and parquet.

A file of plain text is one document. One that stands alone, or that is larger than 4 MiB, is cut
into documents at paragraph boundaries: a single text file then has a held-out part as well, and
memory stays bounded. Of the other kinds, each line or row is a document.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from evener.errors import ConfigError, DataError
from evener.parsing import parse_json
from evener.tasks.text.documents import Document, Rejects, text_of
from evener.tasks.text.sources import RECORD_SUFFIXES, SourceFile

LARGE_FILE_BYTES: Final = 4 * 1024 * 1024
"""A file of plain text above this size is cut into documents."""

_PIECE_BYTES: Final = 64 * 1024
"""About the size of the documents that a file is cut into; a short file is cut finer."""

_MIN_PIECE_BYTES: Final = 1024
_WANTED_PIECES: Final = 20
_BINARY_PROBE_BYTES: Final = 8192
_BLANK_LINES: Final = re.compile(rb"\n(?:[ \t\r]*\n)+")
_BOM: Final = b"\xef\xbb\xbf"
"""What some editors put before UTF-8."""

_ROWS_AT_ONCE: Final = 1024


def holds_records(file: SourceFile) -> bool:
    """Return whether a file holds a document per line or row; its name says so."""
    return file.path.name.lower().endswith(RECORD_SUFFIXES)


# ── plain text ───────────────────────────────────────────────────────────────────────────────────


def find_nul(file: SourceFile) -> int:
    """Return the place of a NUL byte near the start of a file, which is then not text; else -1."""
    with file.reading() as stream:
        return stream.read(_BINARY_PROBE_BYTES).find(b"\0")


def read_text(file: SourceFile, *, alone: bool) -> Iterator[Document]:
    """Read a file's documents in order; text is UTF-8, a byte order mark is dropped.

    Args:
        file: What to read.
        alone: The corpus has no other file, so that this one is cut into documents.

    Raises:
        DataError: The file cannot be read, is not UTF-8 (named with the offset), is binary, or
            changes meanwhile.
    """
    if (nul := find_nul(file)) >= 0:
        raise DataError(
            f"{file.path} is not text: NUL at byte {nul}. Exclude it, or convert it to UTF-8 if it "
            "is UTF-16"
        )
    is_cut = alone or file.size > LARGE_FILE_BYTES
    size = min(_PIECE_BYTES, max(_MIN_PIECE_BYTES, file.size // _WANTED_PIECES))
    with file.reading() as stream:
        pieces = cut_pieces(stream, size) if is_cut else [(0, stream.read())]
        for number, (offset, piece) in enumerate(pieces):
            label = f"{file.label}#{number}" if is_cut else file.label
            yield Document(label, _decode(file, offset, piece), offset + len(piece))


def cut_pieces(stream: BinaryIO, target_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Cut a stream of UTF-8 into pieces that are about ``target_bytes`` long.

    A piece ends with the first blank line after ``target_bytes``; where there is none before twice
    that, with the first line end after it, or at the last possible character. Pieces are never
    longer than twice ``target_bytes``, and their concatenation is the stream.

    Args:
        stream: The bytes.
        target_bytes: Wanted size, at least 4.

    Yields:
        (offset in the stream, bytes).
    """
    buffer, offset = b"", 0
    # One byte more than is looked at, which tells whether a cut would split a character.
    while buffer := buffer + stream.read(2 * target_bytes + 1 - len(buffer)):
        # What would be a stub stays with the last piece.
        is_last = len(buffer) <= target_bytes + target_bytes // 2
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


# ── records ──────────────────────────────────────────────────────────────────────────────────────


def read_records(file: SourceFile, text_key: str, rejects: Rejects) -> Iterator[Document]:
    """Read a file's documents in order; memory holds a buffer of them.

    A line of JSON holds an object with the text under ``text_key``, or the text itself; empty lines
    are left out. In parquet the column ``text_key`` holds texts. Labels end in ``#`` and the number
    of the line, from 1, or of the row, from 0.

    Args:
        file: What to read; see ``holds_records``.
        text_key: Key or column of the text.
        rejects: Told of lines and rows that hold no text.

    Raises:
        DataError: The file cannot be read, is damaged, has no such column, or changes meanwhile.
        ConfigError: It is parquet, and pyarrow is not installed.
    """
    is_table = file.path.name.lower().endswith(".parquet")
    with file.reading() as stream:
        rows = _read_rows(file, stream, text_key) if is_table else read_lines(file.path, stream)
        for number, row in rows:
            try:
                text = text_of(row if is_table else parse_line(row), text_key)
            except ValueError as error:
                place = f", row {number}" if is_table else f":{number}"
                rejects.add(f"{file.path}{place}", str(error))
            else:
                yield Document(f"{file.label}#{number}", text, stream.tell())


def read_lines(path: Path, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield number (from 1) and bytes of the lines that are not empty; ``.gz`` is unpacked.

    Args:
        path: The file's name.
        stream: Its content.

    Raises:
        DataError: It cannot be unpacked.
    """
    is_packed, number = path.name.lower().endswith(".gz"), 0
    try:
        for line in gzip.GzipFile(fileobj=stream) if is_packed else stream:
            number += 1
            content = line.removeprefix(_BOM) if number == 1 else line
            if content and not content.isspace():
                yield number, content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is damaged after line {number}: {error}. Fetch or pack it again"
        ) from error


def parse_line(line: bytes) -> Any:
    """Read a line of JSON.

    Raises:
        ValueError: It is none; says why and where.
    """
    try:
        return parse_json(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {line[error.start]:#04x} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None


def _read_rows(file: SourceFile, stream: BinaryIO, text_key: str) -> Iterator[tuple[int, Any]]:
    """Yield number (from 0) and content of the rows of a parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{file.path} needs {error.name}: pip install 'evener[data]', or give the text as "
            "JSON Lines"
        ) from None
    number = 0
    try:
        table = parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        if names.count(text_key) != 1:
            raise DataError(
                f"{file.path} has no column {text_key!r}; it has {', '.join(map(repr, names))}: "
                "set data.text_key to the one that holds the text"
            )
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[text_key], use_threads=False):
            for row in batch.to_pylist():
                yield number, row
                number += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file.path} cannot be read as parquet: {error}. Fetch or write it again"
        ) from error
