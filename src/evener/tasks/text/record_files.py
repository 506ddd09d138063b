"""Files of records: JSON Lines, also compressed, and parquet; a document per line or row."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from evener.errors import ConfigError, DataError
from evener.parsing import parse_json
from evener.tasks.text.documents import Document, Rejects, text_of
from evener.tasks.text.sources import RECORD_SUFFIXES, SourceFile, reading_unchanged
from evener.tasks.text.text_files import BOM

_ROWS_AT_ONCE: Final = 1024


def holds_records(file: SourceFile) -> bool:
    """Return whether a file holds a document per line or row; its name says so."""
    return file.path.name.lower().endswith(RECORD_SUFFIXES)


def read_records(
    file: SourceFile, expected_hash: str, *, text_key: str, rejects: Rejects
) -> Iterator[Document]:
    """Read a file's documents in order; memory holds a buffer of them.

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
    is_table, done = file.path.name.lower().endswith(".parquet"), 0
    with reading_unchanged(file, expected_hash) as stream:
        # Asking for the position costs a system call.
        lines = (
            (number, line, done if number % 64 else stream.tell())
            for number, line in read_lines(file.path, stream)
        )
        rows: Iterator[tuple[int, Any, int]] = _parquet_rows(file, text_key) if is_table else lines
        for number, record, position in rows:
            try:
                value = {text_key: record.as_py()} if is_table else parse_line(record)
                text = text_of(value, text_key)
            except ValueError as error:  # a UnicodeDecodeError is one, too
                where = f", row {number}" if is_table else f":{number}"
                rejects.add(f"{file.path}{where}", str(error))
                continue
            yield Document(f"{file.label}#{number}", text, len(text.encode()), position - done)
            done = position


# ── JSON Lines ───────────────────────────────────────────────────────────────────────────────────


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
            content = line.removeprefix(BOM) if number == 1 else line
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


# ── parquet ──────────────────────────────────────────────────────────────────────────────────────


def _parquet_rows(file: SourceFile, text_key: str) -> Iterator[tuple[int, Any, int]]:
    """Yield number (from 0), value, and how much of the file has been read up to it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{file.path} needs {error.name}: pip install 'evener[data]', or give the text as "
            "JSON Lines"
        ) from None
    try:
        with parquet.ParquetFile(file.path) as table:
            _check_column(file, table.schema_arrow, text_key)
            total = max(1, table.metadata.num_rows)
            batches = table.iter_batches(_ROWS_AT_ONCE, columns=[text_key], use_threads=False)
            values = (value for batch in batches for value in batch.column(text_key))
            for row, value in enumerate(values):
                yield row, value, file.size * (row + 1) // total
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file.path} cannot be read as parquet: {error}. Fetch or write it again"
        ) from error


def _check_column(file: SourceFile, schema: Any, text_key: str) -> None:
    import pyarrow

    if schema.names.count(text_key) != 1:
        raise DataError(
            f"{file.path} has no column {text_key!r}; it has {', '.join(map(repr, schema.names))}: "
            "set data.text_key to the one that holds the text"
        )
    kind, types = schema.field(text_key).type, pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(
            f"the column {text_key!r} of {file.path} holds {kind} and no text: set data.text_key "
            "to the one that holds the text"
        )
