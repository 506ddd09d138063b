"""The data of a classification run: read, checked, split, the same on every rank."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evener.config.classify import ClassifyRunConfig
from evener.engine.team import Team
from evener.errors import DataError
from evener.tasks.classification.label_files import given_records, read_labelled
from evener.tasks.classification.samples import LabelSet, Record
from evener.tasks.classification.splits import split_records
from evener.tasks.classification.stdlib_functions import stdlib_functions


@dataclass(frozen=True, slots=True)
class Side:
    """Training or held-out texts and the index of each one's class."""

    texts: tuple[str, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelledData:
    """What a run trains on and what it is measured by.

    Attributes:
        labels: The classes.
        train: Training samples.
        heldout: Held-out samples.
        signature: Hash of all of it.
        description: In words, for people.
    """

    labels: LabelSet
    train: Side
    heldout: Side
    signature: str
    description: str


def load_data(config: ClassifyRunConfig, samples: Iterable[Any] | None = None) -> LabelledData:
    """Reads and splits the data of a run.

    Args:
        config: Says where it is, unless it is given.
        samples: See ``given_records``.

    Raises:
        DataError: It is missing, malformed, has unknown labels, or lacks a class.
    """
    data = config.data
    if data.path is None and samples is None:
        records = stdlib_functions()
        labels = _labels(config, records)
        training, heldout = split_records(records, data.heldout_fraction, config.seed)
        words = "functions of Python's standard library by package, split by file"
    else:
        records, words = _read_or_check(config, samples)
        # Before the split: a misspelt label is no small class, nor are 0 and "0" two of them.
        labels = _labels(config, records)
        records = [replace(r, label=labels.names[labels.index(r.label, r.where)]) for r in records]
        if data.heldout_path is not None:
            training, heldout = records, _read(data.heldout_path, config)
        else:
            training, heldout = split_records(records, data.heldout_fraction, config.seed)
            words += f", split by {data.group_key or 'text'}"
    train, held = _side(training, labels), _side(heldout, labels)
    labels.require_all(train.indices, "the training data")
    hasher = hashlib.blake2b(digest_size=16)
    for side in (train, held):
        for text, index in zip(side.texts, side.indices, strict=True):
            hasher.update(f"{index} {len(text)} {text}".encode())
        hasher.update(b"|")
    return LabelledData(labels, train, held, hasher.hexdigest(), words)


def agree_on_data(team: Team, data: LabelledData) -> None:
    """Refuses ranks that see other data; all ranks call it together.

    Raises:
        DataError: Names the first rank that differs from rank 0.
    """
    answers = team.introduce({"data": data.signature})
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise DataError(
                f"rank {rank} sees other samples than rank 0; give every machine the same files"
                " (and, for the functions of the standard library, the same version of Python)"
            )


def _read_or_check(
    config: ClassifyRunConfig, samples: Iterable[Any] | None
) -> tuple[list[Record], str]:
    data = config.data
    if samples is None:
        return _read(str(data.path), config), str(data.path)
    keys = {"text_key": data.text_key, "label_key": data.label_key}
    return given_records(samples, **keys, group_key=data.group_key), "samples given from Python"


def _read(path: str, config: ClassifyRunConfig) -> list[Record]:
    data = config.data
    return read_labelled(
        Path(path).expanduser(),
        text_key=data.text_key,
        label_key=data.label_key,
        group_key=data.group_key,
    )


def _labels(config: ClassifyRunConfig, records: Sequence[Record]) -> LabelSet:
    return LabelSet.of(records) if config.labels is None else LabelSet(config.labels)


def _side(records: Sequence[Record], labels: LabelSet) -> Side:
    return Side(
        tuple(record.text for record in records),
        tuple(labels.index(record.label, record.where) for record in records),
    )
