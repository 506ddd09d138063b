"""Labelled texts, checked: from files (JSON Lines and CSV, one sample a line) or from Python."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evener.errors import DataError
from evener.files import open_for_reading
from evener.tasks.classification.samples import (
    Record,
    Sample,
    checked_label,
    checked_text,
    require_characters,
)
from evener.tasks.text.readers import parse_line, read_lines

_CSV = (".csv", ".tsv")
_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz")

_LONGEST_FIELD = 2**31 - 1
"""The limit of the module ``csv`` itself is 128 kB, which a text may well have."""


def read_labelled(
    path: Path, *, text_key: str, label_key: str | None, group_key: str | None = None
) -> list[Record]:
    """Read a file of samples; empty lines are left out.

    Args:
        path: ``.jsonl`` (also ``.jsonl.gz``), ``.csv`` or ``.tsv``, whose first row
            names the columns.
        text_key: Key or column of the text.
        label_key: Key or column of the label; ``None`` where only texts are wanted, which may then
            be any lines.
        group_key: Key or column of what texts have in common.

    Raises:
        DataError: The file is missing, unreadable, of another kind or empty; a line is malformed,
            lacks a key, or has an empty text. Names the file and the line.
    """
    name = path.name.lower()
    if not name.endswith(_CSV + _LINES):
        raise DataError(
            f"{path} is neither JSON Lines nor CSV by its name; give a file that ends in "
            f"{', '.join((*_LINES[:2], *_CSV))}"
        )
    try:
        rows = _csv_rows(path) if name.endswith(_CSV) else _json_rows(path)
        records = [_record(where, row, text_key, label_key, group_key) for where, row in rows]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not records:
        raise DataError(f"{path} holds no samples; give a file with one on each line")
    return records


def given_records(
    samples: Iterable[Any], *, text_key: str, label_key: str, group_key: str | None = None
) -> list[Record]:
    """Check samples that were given from Python, as those of a file are checked.

    Args:
        samples: Instances of ``Sample``, or mappings with the keys of the next arguments.
        text_key: Key of the text.
        label_key: Key of the label: a name or an index, also a number of NumPy or a tensor.
        group_key: Key of what texts have in common.

    Raises:
        DataError: There is none, or one is malformed; names it by its number, from 0.
    """
    records = []
    for number, sample in enumerate(samples):
        row = sample
        if isinstance(sample, Sample):
            row = {text_key: sample.text, label_key: sample.label}
        records.append(_record(f"sample {number}", row, text_key, label_key, group_key))
    if not records:
        raise DataError("there are no samples; give some, each with a text and a label")
    return records


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with open_for_reading(path) as stream:
        for number, line in read_lines(path, stream):
            try:
                yield f"{path}:{number}", parse_line(line)
            except ValueError as error:
                raise DataError(f"{path}:{number} is malformed: {error}; mend the line") from None


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    delimiter = "\t" if path.name.lower().endswith(".tsv") else ","
    where = f"{path}:1"
    # Bytes that are no UTF-8 go through as surrogates, and are refused with the line they are in.
    stream = io.TextIOWrapper(
        open_for_reading(path), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with stream:
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            names = next(reader, [])
            for name in names:
                require_characters(name, "a column's name", where)
                if names.count(name) > 1:
                    raise DataError(
                        f"{where} names two columns {name!r}; give each a name of its own"
                    )
            where = f"{path}:{reader.line_num + 1}"
            for row in reader:
                if row and len(row) != len(names):
                    raise DataError(
                        f"{where} is malformed: {len(row)} columns where the first row names "
                        f"{len(names)}; quote texts that hold a {delimiter!r}"
                    )
                if row:
                    yield where, dict(zip(names, row, strict=True))
                where = f"{path}:{reader.line_num + 1}"
    except csv.Error as error:
        raise DataError(f"{where} is malformed: {error}; mend the line") from None
    finally:
        csv.field_size_limit(limit)


def _record(
    where: str, row: Any, text_key: str, label_key: str | None, group_key: str | None
) -> Record:
    if isinstance(row, str) and label_key is None:
        row = {text_key: row}
    if not isinstance(row, Mapping):
        raise DataError(
            f'{where} holds a {type(row).__name__}; write {{"{text_key}": ..., "{label_key}": ...}}'
        )
    for key in (text_key, label_key, group_key):
        if key is not None and key not in row:
            raise DataError(
                f"{where} lacks {key!r}; it has {', '.join(map(repr, row)) or 'nothing'}. Name the "
                "keys with data.text_key, data.label_key and data.group_key"
            )
    for key, value in row.items():
        require_characters(value, repr(key), where)
    text = checked_text(row[text_key], where)
    label = checked_label(row[label_key], where) if label_key is not None else 0
    group = text if group_key is None else row[group_key]
    if group is None or group == "":
        raise DataError(
            f"{where} has {group!r} as its {group_key!r}; give every sample a group (of its own, "
            "where it has nothing in common with others), or leave data.group_key out"
        )
    return Record(text, label, str(group), where)
