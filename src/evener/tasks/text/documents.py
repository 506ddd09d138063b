"""Sources of a corpus's documents: files of text, JSON Lines and parquet, or a data set.

A file of plain text is one document. A single file, or a file larger than 4 MiB, is cut into
documents at paragraph boundaries, so that a single text file has a held-out part, too, and memory
stays bounded. In other kinds of files, each line or row is a document.
"""

import gzip
import hashlib
import io
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TextIO, final

from evener.config.runs import DataConfig
from evener.errors import ConfigError, DataError
from evener.files import blake2b, open_for_reading
from evener.parsing import parse_json, short
from evener.tasks.text.sources import SourceFile, find_files, stdlib_sources
from evener.team.terminal import say, warn

LARGE_FILE_BYTES: Final = 4 * 1024 * 1024
"""A file of plain text above this size is cut into documents."""

_PIECE: Final = 64 * 1024
"""Approximate size of the documents that a file is cut into; smaller for a short file."""

_MIN_PIECE: Final = 1024
_WANTED_PIECES: Final = 20
_ROWS_AT_ONCE: Final = 1024
_PROGRESS_S: Final = 5.0


class Document(NamedTuple):
    """One document of a source.

    Attributes:
        label: Unique in the source, the same on every machine; determines whether it is held out.
        text: Its text.
        position: Bytes of the source up to its end.
    """

    label: str
    text: str
    position: int

    def hash_label(self) -> int:
        """Return a hash of the label, below 2**64."""
        label = self.label.encode("utf-8", "surrogateescape")
        return int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "little")


class DocumentSource(ABC):
    """A source of documents. They are the same in every pass.

    Args:
        data: The key of a record's text, and what to do with a record without one.
        quiet: Print no progress.

    Attributes:
        quiet: As given.
        name: Its name in messages.
        num_bytes: Bytes that are read in one pass.
        identity: JSON that differs if documents differ.
    """

    name: str
    num_bytes: int = 0
    identity: list[Any]

    def __init__(self, data: DataConfig, *, quiet: bool) -> None:
        self.quiet = quiet
        self._text_key = data.text_key
        self._on_error = data.on_error
        self._has_warned = False

    def documents(self, activity: str) -> Iterator[Document]:
        """Yield all documents that are not blank.

        Args:
            activity: The purpose, for a progress line every five seconds.

        Raises:
            DataError: The source cannot be read, changes meanwhile, or has no text.
        """
        is_empty, shown_s = True, time.monotonic()
        for document in self._read():
            if not self.quiet and time.monotonic() - shown_s > _PROGRESS_S:
                shown_s = time.monotonic()
                whole = f" of {self.num_bytes / 1e6:.1f}" if self.num_bytes else ""
                say(f"{activity}: {document.position / 1e6:.1f}{whole} MB of text")
            if document.text and not document.text.isspace():
                is_empty = False
                yield document
        if is_empty:
            raise DataError(
                f"{self.name}: it holds no text. Give some text, or check data.text_key"
            )

    @abstractmethod
    def _read(self) -> Iterator[Document]:
        """Yield documents in their order; the text may be empty."""

    def _text_of(self, place: str, record: object) -> str:
        """Return the text of a record, empty if it has none and such records are skipped.

        Args:
            place: Its place for messages, such as ``web.jsonl:17``.
            record: A text, a mapping with a text, or either as a line of JSON.

        Raises:
            DataError: It has no text.
        """
        try:
            value = parse_json(record) if isinstance(record, bytes) else record
            text = value.get(self._text_key) if isinstance(value, Mapping) else value
            if not isinstance(text, str):
                raise ValueError(f"{short(text)} is not a text")
            text.encode()  # half a surrogate pair cannot be encoded in UTF-8
        except ValueError as error:
            return self._reject(place, f"{error} (data.text_key is {self._text_key!r})")
        return text

    def _reject(self, place: str, why: str) -> str:
        if self._on_error == "stop":
            raise DataError(
                f"{place}: {why}. Correct it, or skip such records with data.on_error: skip"
            )
        if not self._has_warned:
            warn(f"{place}: {why}: skipped, like all records without a text")
            self._has_warned = True
        return ""


@final
class FileSource(DocumentSource):
    """Text files, JSON Lines (also compressed) and parquet.

    A file is identified by its path, its size and its modification time.

    Args:
        data: Names files and folders; see ``find_files`` for the files of a folder. Without any,
            the sources of Python's standard library.
        quiet: Print no progress.

    Raises:
        DataError: A path is missing or unreadable, or nothing matches.
    """

    def __init__(self, data: DataConfig, *, quiet: bool = False) -> None:
        super().__init__(data, quiet=quiet)
        paths, exclude = [Path(path).expanduser() for path in data.paths], data.exclude
        if not paths:
            root, globs = stdlib_sources()
            paths, exclude = [root], [*exclude, *globs]
        self._files = files = find_files(paths, data.suffixes, exclude)
        others = len(files) - 1
        more = f" and {others} other file{'s' if others > 1 else ''}" if others else ""
        self.name = f"{files[0].path}{more}"
        self.num_bytes = sum(file.size for file in files)
        self.identity = [[f.label, str(f.path.absolute()), f.size, f.mtime_ns] for f in files]
        self.identity.append(data.on_error)
        if any(file.has_records for file in files):
            self.identity.append(data.text_key)

    def _read(self) -> Iterator[Document]:
        before = 0
        for file in self._files:
            read = self._read_text
            if file.has_records:
                is_table = file.path.name.lower().endswith(".parquet")
                read = self._read_rows if is_table else self._read_lines
            try:
                with open_for_reading(file.path) as stream:
                    for label, text in read(file, stream):
                        yield Document(label, text, before + stream.tell())
                now = SourceFile.of(file.label, file.path)
            except OSError as error:
                raise DataError(
                    f"{file.path} cannot be read: {error}. Check its permissions, or exclude it"
                ) from error
            if now != file:
                raise DataError(
                    f"{file.path} changed while it was read: start again when nothing writes to it"
                )
            before += file.size

    def _read_text(self, file: SourceFile, stream: BinaryIO) -> Iterator[tuple[str, str]]:
        """Yield label and text of each document; text is UTF-8, without a byte order mark."""
        is_whole = len(self._files) > 1 and file.size <= LARGE_FILE_BYTES
        size = min(_PIECE, max(_MIN_PIECE, file.size // _WANTED_PIECES))
        try:
            with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
                for number, piece in enumerate(
                    [text.read()] if is_whole else cut_pieces(text, size)
                ):
                    yield file.label if is_whole else f"{file.label}#{number}", piece
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            self._reject(str(file.path), f"not UTF-8: {error.reason} {byte:#x}")

    def _read_lines(self, file: SourceFile, stream: BinaryIO) -> Iterator[tuple[str, str]]:
        """Yield label and text of each line that is not empty; lines are numbered from 1."""
        is_packed = file.path.name.lower().endswith(".gz")
        try:
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=stream) if is_packed else stream
            for number, line in enumerate(lines, 1):
                content = line.removeprefix(b"\xef\xbb\xbf").strip()
                if content:
                    yield f"{file.label}#{number}", self._text_of(f"{file.path}:{number}", content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file.path} is damaged: {error}. Get or create it again") from error

    def _read_rows(self, file: SourceFile, stream: BinaryIO) -> Iterator[tuple[str, str]]:
        """Yield label and text of each row of a parquet file; rows are numbered from 0."""
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
            if self._text_key not in table.schema_arrow.names:
                raise DataError(
                    f"{file.path} has no column {self._text_key!r}; it has "
                    f"{', '.join(map(repr, table.schema_arrow.names))}: set data.text_key to the "
                    "one that holds the text"
                )
            columns = [self._text_key]
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
                for row in batch.column(0).to_pylist():
                    text = self._text_of(f"{file.path}, row {number}", row)
                    yield f"{file.label}#{number}", text
                    number += 1
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(
                f"{file.path} cannot be read as parquet: {error}. Get or create it again"
            ) from error


def cut_pieces(stream: TextIO, size: int) -> Iterator[str]:
    """Cut a text into pieces of about ``size`` characters, whose concatenation is the text.

    A piece ends with the first blank line after ``size`` characters. If there is none within twice
    that size, it ends with a line, and a line longer than ``size`` is cut.

    Args:
        stream: The text.
        size: Characters of a piece.
    """
    piece = ""
    while line := stream.readline(size):
        if len(piece) + len(line) > 2 * size:
            yield piece
            piece = ""
        piece += line
        if len(piece) >= size and line.isspace():
            yield piece
            piece = ""
    if piece:
        yield piece


@final
class RecordSource(DocumentSource):
    """Documents from an iterable that can be read more than once.

    For example a list of texts, or a Hugging Face ``datasets.Dataset``. The constructor reads and
    hashes them, to find whether they have been tokenised before.

    Args:
        records: Texts, or mappings with a text.
        data: The key of a mapping's text, and what to do with a record without one.
        quiet: Print no progress.

    Raises:
        ConfigError: It can be iterated over only once, or not at all.
        DataError: It has no text, or a record without one.
    """

    def __init__(self, records: Iterable[object], data: DataConfig, *, quiet: bool = False) -> None:
        super().__init__(data, quiet=quiet)
        given: object = records  # users may pass any type
        kind = type(given).__name__
        if not isinstance(given, Iterable) or isinstance(given, Iterator | Mapping | str | bytes):
            raise ConfigError(
                f"the data set is of type {kind}; give an iterable that can be read more than "
                "once: a list of texts, or mappings with the text under "
                f"{data.text_key!r}, such as a datasets.Dataset"
            )
        self.name = f"the data set ({kind})"
        self._records = records
        hasher = blake2b()
        for document in self.documents("reading"):
            self.num_bytes = document.position
            hasher.update(f"{document.label} {document.position} {document.text}".encode())
        self.identity = ["data set", hasher.hexdigest()]

    def _read(self) -> Iterator[Document]:
        done = 0
        for number, record in enumerate(self._records):
            text = self._text_of(f"record {number} of {self.name}", record)
            done += len(text.encode())
            yield Document(f"#{number}", text, done)
