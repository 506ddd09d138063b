"""Files of records: JSON Lines, also compressed, and parquet; a document per line or row."""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, final

from evener.data.documents import Document, Rejects, text_of
from evener.data.sources import RECORD_SUFFIXES, SourceFile, changed, reading
from evener.data.text_files import BOM
from evener.errors import ConfigError, DataError
from evener.parsing import parse_json

_BUFFER_BYTES: Final = 1024 * 1024
_ROWS_AT_ONCE: Final = 1024


def holds_records(file: SourceFile) -> bool:
    """Whether a file holds a document per line or row; its name says so."""
    return file.path.name.lower().endswith(RECORD_SUFFIXES)


def read_records(
    file: SourceFile, expected_hash: str, *, text_key: str, rejects: Rejects
) -> Iterator[Document]:
    """Reads a file's documents in order; memory holds a buffer of them.

    A line of JSON holds an object with the text under ``text_key``, or the text itself; empty lines
    are left out. In parquet the column ``text_key`` holds texts. Labels end in ``#`` and the number
    of the line, from 1, or of the row, from 0.

    Args:
        file: What to read; see ``holds_records``.
        expected_hash: ``content_hash`` of the file.
        text_key: Key or column of the text.
        rejects: Told of lines and rows that hold no text.

    Raises:
        DataError: The file cannot be read, is damaged, has no such column, or has changed since it
            was hashed.
        ConfigError: It is parquet, and pyarrow is not installed.
    """
    if file.path.name.lower().endswith(".parquet"):
        yield from _read_parquet(file, text_key, rejects)
    else:
        yield from _read_lines(file, expected_hash, text_key, rejects)


# ── JSON Lines ───────────────────────────────────────────────────────────────────────────────────


def _read_lines(
    file: SourceFile, expected_hash: str, text_key: str, rejects: Rejects
) -> Iterator[Document]:
    with reading(file) as stream, _decompressed(file, stream) as (lines, raw):
        done = 0
        for number, line in enumerate(_until_damaged(file, lines), start=1):
            if number == 1:
                line = line.removeprefix(BOM)
            if not line or line.isspace():
                continue
            try:
                text = text_of(parse_line(line), text_key)
            except ValueError as error:
                rejects.add(f"{file.path}:{number}", str(error))
                continue
            read_bytes, done = raw.num_bytes - done, raw.num_bytes
            yield Document(f"{file.label}#{number}", text, len(text.encode()), read_bytes)
    if raw.hexdigest() != expected_hash:
        raise changed(file)


def parse_line(line: bytes) -> Any:
    """Reads a line of JSON.

    Raises:
        ValueError: It is none; says why and where.
    """
    try:
        return parse_json(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {line[error.start]:#04x} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None


@final
class _HashingStream(io.RawIOBase):
    """Hashes what is read from a file, and counts it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hasher = hashlib.blake2b(digest_size=16)
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._hasher.update(data)
        self.num_bytes += len(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


@contextmanager
def _decompressed(file: SourceFile, stream: BinaryIO) -> Iterator[tuple[BinaryIO, _HashingStream]]:
    """The lines of a file, and what tells how far it has been read."""
    raw = _HashingStream(stream)
    with io.BufferedReader(raw, _BUFFER_BYTES) as buffered:
        if not file.path.name.lower().endswith(".gz"):
            yield buffered, raw
            return
        with gzip.GzipFile(fileobj=buffered, mode="rb") as unpacked:
            yield unpacked, raw  # type: ignore[misc]


def _until_damaged(file: SourceFile, lines: BinaryIO) -> Iterator[bytes]:
    number = 0
    try:
        for line in lines:
            number += 1
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{file.path} is damaged after line {number}: {error}. Fetch or pack it again"
        ) from error


# ── parquet ──────────────────────────────────────────────────────────────────────────────────────


def _read_parquet(file: SourceFile, text_key: str, rejects: Rejects) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{file.path} needs {error.name}: pip install 'evener[data]', or give the text as "
            "JSON Lines"
        ) from None
    row, done = 0, 0
    try:
        with parquet.ParquetFile(file.path) as table:
            _check_column(file, table.schema_arrow, text_key)
            total = max(1, table.metadata.num_rows)
            batches = table.iter_batches(_ROWS_AT_ONCE, columns=[text_key], use_threads=False)
            for batch in batches:
                for value in batch.column(text_key):
                    try:
                        text = text_of({text_key: value.as_py()}, text_key)
                    except ValueError as error:  # a UnicodeDecodeError is one, too
                        rejects.add(f"{file.path}, row {row}", str(error))
                    else:
                        read = file.size * (row + 1) // total
                        yield Document(f"{file.label}#{row}", text, len(text.encode()), read - done)
                        done = read
                    row += 1
        stat = file.path.stat()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file.path} cannot be read as parquet: {error}. Fetch or write it again"
        ) from error
    if (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) != (file.size, *file.stamp):
        raise changed(file)


def _check_column(file: SourceFile, schema: Any, text_key: str) -> None:
    import pyarrow

    if schema.names.count(text_key) != 1:
        raise DataError(
            f"{file.path} has no column {text_key!r}; it has {', '.join(map(repr, schema.names))}: "
            "set data.text_key to the one that holds the text"
        )
    kind = schema.field(text_key).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(
            f"the column {text_key!r} of {file.path} holds {kind} and no text: set data.text_key "
            "to the one that holds the text"
        )
