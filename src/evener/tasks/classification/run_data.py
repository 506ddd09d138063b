"""The data of a classification run: read, checked, split, the same on every rank."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evener.config.runs import ClassifyRunConfig
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
    """Read and split the data of a run.

    Args:
        config: Says where it is, unless it is given.
        samples: See ``given_records``.

    Raises:
        DataError: It is missing, malformed, has unknown labels, or lacks a class.
    """
    data = config.data
    keys: dict[str, Any] = {
        "text_key": data.text_key,
        "label_key": data.label_key,
        "group_key": data.group_key,
    }
    parted_by = data.group_key or "text"
    if samples is not None:
        records, words = given_records(samples, **keys), "samples given from Python"
    elif data.path is not None:
        records, words = read_labelled(Path(data.path).expanduser(), **keys), data.path
    else:
        records, words = stdlib_functions(), "functions of Python's standard library by package"
        parted_by = "file"
    # Before the split: a misspelt label is no small class, nor are 0 and "0" two of them.
    labels = LabelSet.of(records) if config.labels is None else LabelSet(config.labels)
    records = [replace(r, label=labels.names[labels.index(r.label, r.where)]) for r in records]
    if data.heldout_path is not None:
        training, heldout = records, read_labelled(Path(data.heldout_path).expanduser(), **keys)
    else:
        training, heldout = split_records(records, data.heldout_fraction, config.seed)
        words += f", split by {parted_by}"
    train, held = _side(training, labels), _side(heldout, labels)
    labels.require_all(train.indices)
    hasher = hashlib.blake2b(digest_size=16)
    for side in (train, held):
        for text, index in zip(side.texts, side.indices, strict=True):
            hasher.update(f"{index} {len(text)} {text}".encode())
        hasher.update(b"|")
    return LabelledData(labels, train, held, hasher.hexdigest(), words)


def agree_on_data(team: Team, data: LabelledData) -> None:
    """Refuse ranks that see other data; all ranks call it together.

    Raises:
        DataError: Names the first rank that differs from rank 0.
    """
    answers = team.introduce(data.signature)
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise DataError(
                f"rank {rank} sees other samples than rank 0; give every machine the same files"
                " (and, for the functions of the standard library, the same version of Python)"
            )


def _side(records: Sequence[Record], labels: LabelSet) -> Side:
    return Side(
        tuple(record.text for record in records),
        tuple(labels.index(record.label, record.where) for record in records),
    )
