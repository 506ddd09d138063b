"""The data of a classification run: read from JSON Lines, CSV or Python, checked and split."""

import csv
import gzip
import hashlib
import io
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from evener.config.runs import ClassifyDataConfig, ClassifyRunConfig
from evener.errors import DataError
from evener.files import open_for_reading
from evener.parsing import parse_json
from evener.tasks.classification.samples import (
    LabelSet,
    Pair,
    Record,
    Sample,
    checked_label,
    checked_text,
)
from evener.tasks.classification.stdlib_names import stdlib_names

_LONGEST_FIELD = 2**31 - 1
"""The module ``csv`` refuses fields above 128 kB by default, and a text may be longer."""


@dataclass(frozen=True, slots=True)
class LabelledData:
    """The samples of a run, the same on every rank.

    Attributes:
        labels: The classes.
        train: Training samples.
        heldout: Held-out samples.
        signature: Hash of all samples.
        description: A description as text.
    """

    labels: LabelSet
    train: list[Pair]
    heldout: list[Pair]
    signature: str
    description: str


def load_data(config: ClassifyRunConfig, samples: Iterable[Any] | None = None) -> LabelledData:
    """Read and split the data of a run.

    Args:
        config: Names the files, unless samples are given.
        samples: Instances of ``Sample``, or mappings with text and label under ``data.text_key``
            and ``data.label_key``.

    Raises:
        DataError: It is missing, malformed, has unknown labels, or lacks a class.
    """
    data = config.data
    has_groups = data.group_key is not None
    if samples is not None:
        records, words = _given_records(samples, data), "samples given from Python"
    elif data.path is not None:
        records, words = read_records(Path(data.path).expanduser(), data), data.path
    else:
        records, words, has_groups = stdlib_names(), "names in Python's standard library", True
    labels = LabelSet.of(records) if config.labels is None else LabelSet(config.labels)
    # A misspelt label is an error, not a small class; 0 and "0" are one class.
    records = [replace(r, label=labels.index(r.label, r.where)) for r in records]
    if data.heldout_path is not None:
        training, heldout = records, read_records(Path(data.heldout_path).expanduser(), data)
    else:
        training, heldout = split_records(
            records, data.heldout_fraction, config.seed, has_groups=has_groups
        )
        words += f", split by {data.group_key or ('file' if has_groups else 'text')}"
    train, held = (
        [(record.text, labels.index(record.label, record.where)) for record in side]
        for side in (training, heldout)
    )
    labels.require_all(index for _, index in train)
    hasher = hashlib.blake2b(digest_size=16)
    for pair in (*train, len(train), *held):
        hasher.update(repr(pair).encode())
    return LabelledData(labels, train, held, hasher.hexdigest(), words)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def read_records(path: Path, data: ClassifyDataConfig, *, has_labels: bool = True) -> list[Record]:
    """Read a file of samples; empty lines are skipped.

    Args:
        path: JSON Lines (``.jsonl`` or any other name, also ``.gz``), or ``.csv`` or ``.tsv``,
            whose first row names the columns.
        data: Names the keys or columns.
        has_labels: Whether samples need labels; without, a JSON line may be the text alone.

    Raises:
        DataError: The file is missing, unreadable or empty; a line is malformed, lacks a key, or
            has an empty text. Names the file and the line.
    """
    is_table = path.suffix.lower() in (".csv", ".tsv")
    try:
        with _opened(path) as file:
            rows = _csv_rows(path, file) if is_table else _json_rows(path, file)
            records = [_record(where, row, data, has_labels) for where, row in rows]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not records:
        raise DataError(f"{path} holds no samples; give a file with one on each line")
    return records


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    # Bytes that are not UTF-8 become surrogates, which are refused with the line they are in.
    with open_for_reading(path) as binary:
        packed = path.suffix.lower() == ".gz"
        plain: Any = gzip.GzipFile(fileobj=binary) if packed else binary
        with io.TextIOWrapper(plain, "utf-8-sig", "surrogateescape", newline="") as file:
            yield file


def _json_rows(path: Path, file: IO[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", parse_json(line)
            except ValueError as error:
                raise DataError(f"{path}:{number} is not JSON: {error}; fix the line") from None


def _csv_rows(path: Path, file: IO[str]) -> Iterator[tuple[str, dict[str, str]]]:
    limit = csv.field_size_limit(_LONGEST_FIELD)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise DataError(
                    f"{where} has another number of columns than the first row, which names "
                    f"{len(reader.fieldnames or ())}; quote texts that hold a separator"
                )
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num + 1} is not CSV: {error}; fix the line") from None
    finally:
        csv.field_size_limit(limit)


def _given_records(samples: Iterable[Any], data: ClassifyDataConfig) -> list[Record]:
    records = []
    for number, sample in enumerate(samples):
        row = sample
        if isinstance(sample, Sample):
            row = {data.text_key: sample.text, data.label_key: sample.label}
        records.append(_record(f"sample {number}", row, data, has_labels=True))
    if not records:
        raise DataError("no samples were given; give at least one, with a text and a label")
    return records


def _record(where: str, row: Any, data: ClassifyDataConfig, has_labels: bool) -> Record:
    if isinstance(row, str) and not has_labels:
        row = {data.text_key: row}
    keys = [data.text_key] + [data.label_key, data.group_key] * has_labels
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where} holds a {type(row).__name__}; "
            f'write {{"{data.text_key}": ..., "{data.label_key}": ...}}'
        )
    for key in keys:
        if key is not None and row.get(key) is None:
            raise DataError(
                f"{where} lacks {key!r}; it has {', '.join(map(repr, row)) or 'nothing'}. Name the "
                "keys with data.text_key, data.label_key and data.group_key"
            )
    text = checked_text(row[data.text_key], where)
    label = checked_label(row[data.label_key], where) if has_labels else 0
    group = row[data.group_key] if has_labels and data.group_key is not None else text
    return Record(text, label, str(group), where)


# ── splitting ────────────────────────────────────────────────────────────────────────────────────


def split_records(
    records: Sequence[Record], fraction: float, seed: int, *, has_groups: bool
) -> tuple[list[Record], list[Record]]:
    """Split samples into training and held-out ones, every class on both sides.

    Args:
        records: The samples.
        fraction: Fraction to hold out, between 0 and 1, about the same of each class.
        seed: Seed of the choice.
        has_groups: Whether ``group`` is more than the text. Either way, the samples of one group
            stay together.

    Raises:
        DataError: A class has too few groups to be on both sides.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    # Groups of many samples are balanced against one another, which takes a millisecond for each.
    splitter = StratifiedGroupKFold if has_groups else StratifiedKFold
    units = records if has_groups else list({record.group: record for record in records}.values())
    labels, groups = [unit.label for unit in units], [unit.group for unit in units]
    most_folds = min(round(1 / min(fraction, 1 - fraction)), max(Counter(labels).values()))
    for num_folds in range(max(2, most_folds), 1, -1):
        with warnings.catch_warnings(action="ignore"):  # on classes smaller than num_folds
            folds = splitter(num_folds, shuffle=True, random_state=seed)
            for many, few in folds.split(labels, labels, groups):
                held = {groups[place] for place in (few if fraction <= 0.5 else many)}
                training = [record for record in records if record.group not in held]
                heldout = [record for record in records if record.group in held]
                if {r.label for r in training} == {r.label for r in heldout} == set(labels):
                    return training, heldout
    num_groups = Counter(label for label, _ in {(r.label, r.group) for r in records})
    fewest = min(records, key=lambda record: num_groups[record.label])
    raise DataError(
        f"{fewest.where}: its class has too few {'groups' if has_groups else 'different texts'} to "
        "be both in training and in the held-out part; add samples of it, or give the held-out "
        "part as data.heldout_path"
    )
