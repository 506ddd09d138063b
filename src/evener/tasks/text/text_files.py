"""Plain text: how a file becomes documents.

One file is one document. A file that stands alone, or that is larger than 4 MiB, is cut into
documents at paragraph boundaries: a single text file then has a held-out part as well, and memory
stays bounded.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

from evener.errors import DataError
from evener.tasks.text.documents import Document
from evener.tasks.text.sources import SourceFile, reading_unchanged

LARGE_FILE_BYTES: Final = 4 * 1024 * 1024
"""A file above this size is cut into documents."""

PIECE_BYTES: Final = 64 * 1024
"""About the size of the documents that a file is cut into."""

BOM: Final = b"\xef\xbb\xbf"
"""What some editors put before UTF-8."""

_MIN_PIECE_BYTES: Final = 1024
_WANTED_PIECES: Final = 20
_BINARY_PROBE_BYTES: Final = 8192
_BLANK_LINES: Final = re.compile(rb"\n(?:[ \t\r]*\n)+")


def read_text(
    file: SourceFile, expected_hash: str, *, alone: bool, binary: list[SourceFile] | None
) -> Iterator[Document]:
    """Read a file's documents in order; text is UTF-8, a byte order mark is dropped.

    Args:
        file: What to read.
        expected_hash: ``content_hash`` of the file.
        alone: The corpus has no other file, so that this one is cut into documents.
        binary: Receives a file with a NUL byte near its start, which then has no documents;
            None, or a file that was named itself, makes that an error.

    Raises:
        DataError: The file cannot be read, is not UTF-8 (named with the offset), is binary, or
            has changed since it was hashed.
    """
    is_cut = alone or file.size > LARGE_FILE_BYTES
    with reading_unchanged(file, expected_hash) as stream:
        pieces = cut_pieces(stream, _piece_bytes(file.size)) if is_cut else [(0, stream.read())]
        for number, (offset, piece) in enumerate(pieces):
            if offset == 0 and (nul := piece.find(b"\0", 0, _BINARY_PROBE_BYTES)) >= 0:
                if binary is None or file.named:
                    raise DataError(
                        f"{file.path} is not text: NUL at byte {nul}. Exclude it, or convert it to "
                        f"UTF-8 if it is UTF-16"
                    )
                binary.append(file)
                return
            label = f"{file.label}#{number}" if is_cut else file.label
            yield Document(label, _decode(file, offset, piece), len(piece), len(piece))


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


def _piece_bytes(size: int) -> int:
    """A short file is cut finer, so that a twentieth of it can be held out."""
    return min(PIECE_BYTES, max(_MIN_PIECE_BYTES, size // _WANTED_PIECES))


def _decode(file: SourceFile, offset: int, piece: bytes) -> str:
    if offset == 0:
        piece, offset = piece.removeprefix(BOM), len(BOM) if piece.startswith(BOM) else 0
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path} is not UTF-8: {error.reason} {piece[error.start]:#04x} at byte "
            f"{offset + error.start}. Convert it (iconv -t UTF-8) or exclude it"
        ) from error
