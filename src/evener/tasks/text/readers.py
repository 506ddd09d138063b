"""Lines of JSON."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from evener.errors import DataError
from evener.parsing import parse_json


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
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
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
