"""Labelled texts, checked: from files (JSON Lines and CSV, one sample a line) or from Python."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evener.data.record_files import parse_line
from evener.errors import DataError
from evener.files import open_for_reading
from evener.tasks.classification.samples import Record, Sample, bad_character, whole_label

_CSV = (".csv", ".tsv")
_LONGEST_FIELD = 2**31 - 1
_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz")


def read_labelled(
    path: Path, *, text_key: str, label_key: str | None, group_key: str | None = None
) -> list[Record]:
    """Reads a file of samples; empty lines are left out.

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
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not records:
        raise DataError(f"{path} holds no samples; give a file with one on each line")
    return records


def given_records(
    samples: Iterable[Any], *, text_key: str, label_key: str, group_key: str | None = None
) -> list[Record]:
    """Checks samples that were given from Python, as those of a file are checked.

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
        where = f"sample {number}"
        row: Any = sample
        if isinstance(sample, Sample):
            row = {text_key: sample.text, label_key: sample.label}
        if isinstance(row, Mapping):
            row = dict(row)
            label = row.get(label_key)
            if label is not None and not isinstance(label, str):
                row[label_key] = whole_label(label, where)
        records.append(_record(where, row, text_key, label_key, group_key))
    if not records:
        raise DataError("there are no samples; give some, each with a text and a label")
    return records


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    packed = path.name.lower().endswith(".gz")
    with (
        open_for_reading(path) as stream,
        gzip.GzipFile(fileobj=stream) if packed else stream as lines,
    ):
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not content.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, parse_line(content)
            except ValueError as error:
                raise DataError(f"{where} is malformed: {error}; mend the line") from None


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    delimiter = "\t" if path.name.lower().endswith(".tsv") else ","
    before = 1
    # Bytes that are no UTF-8 go through as surrogates, and are refused with the line they are in.
    decoded = io.TextIOWrapper(
        open_for_reading(path), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )
    with decoded as text, _fields_of_any_length():
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        try:
            _check_header(path, reader.fieldnames or ())
            for row in reader:
                where, before = f"{path}:{before + 1}", reader.line_num
                if None in row or None in row.values():
                    raise DataError(
                        f"{where} is malformed: {_num_columns(row)} columns where the first row "
                        f"names {len(reader.fieldnames or ())}; quote texts that hold a "
                        f"{delimiter!r}"
                    )
                yield where, row
        except csv.Error as error:
            raise DataError(f"{path}:{before + 1} is malformed: {error}; mend the line") from None


@contextmanager
def _fields_of_any_length() -> Iterator[None]:
    """The module's own limit is 128 kB, which a text may well have."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _check_header(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if bad := bad_character(name):
            raise DataError(f"{path}:1 is malformed: {bad} is no character; save the file as UTF-8")
        if names.count(name) > 1:
            raise DataError(f"{path}:1 names two columns {name!r}; give each a name of its own")


def _num_columns(row: dict[Any, Any]) -> int:
    surplus = row.get(None) or ()  # DictReader puts what has no name there
    return sum(value is not None for key, value in row.items() if key is not None) + len(surplus)


def _record(
    where: str, row: Any, text_key: str, label_key: str | None, group_key: str | None
) -> Record:
    if isinstance(row, str) and label_key is None:
        row = {text_key: row}
    if not isinstance(row, dict):
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
        if isinstance(value, str) and (bad := bad_character(value)):
            raise DataError(
                f"{where} is malformed: {key!r} holds {bad}, which is no character; save the file "
                "as UTF-8, or mend the line"
            )
    text, label = row[text_key], row[label_key] if label_key is not None else 0
    if not isinstance(text, str) or not text.strip():
        what = "an empty text" if isinstance(text, str) else f"{text!r} as its text"
        raise DataError(f"{where} has {what}; give it a text, or leave the line out")
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise DataError(f"{where} has {label!r} as its label; give a class by name or by index")
    group = None if group_key is None else row[group_key]
    if group_key is not None and (group is None or group == ""):
        raise DataError(
            f"{where} has {group!r} as its {group_key!r}; give every sample a group (of its own, "
            "where it has nothing in common with others), or leave data.group_key out"
        )
    return Record(text, label, None if group is None else str(group), where)
