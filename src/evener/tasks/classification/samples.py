"""Labelled texts and the classes they belong to."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, SupportsIndex

from evener.errors import ConfigError, DataError

#: Digits of an index.
_LONGEST_INDEX = 18


@dataclass(frozen=True, slots=True)
class Sample:
    """A text and its class.

    Attributes:
        text: What is classified.
        label: The class, by name or by index from 0; also a number of NumPy or a tensor.
    """

    text: str
    label: str | SupportsIndex


@dataclass(frozen=True, slots=True)
class Record:
    """A sample as it was given, in a file or from Python.

    Attributes:
        text: What is classified.
        label: The class as it stands there.
        group: What it has in common with others; ``None`` where that plays no part.
        where: File and line, or its number, for errors.
    """

    text: str
    label: str | int
    group: str | None
    where: str


def bad_character(text: str) -> str | None:
    """The first half of a character in a text, as an escape; ``None`` for a text in order."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start])
    return None


class LabelSet:
    """The classes, in the order of their indices.

    Args:
        names: Two or more different names; ``None`` where a configuration names no classes.

    Raises:
        ConfigError: None, fewer than two, or one twice.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        if names is None:
            raise ConfigError("ClassifyConfig.labels is missing; name the classes in order")
        if len(names) < 2 or len(set(names)) != len(names):
            raise ConfigError(f"labels are {list(names)}; give two or more different class names")
        self.names = tuple(names)
        self._index = {name: i for i, name in enumerate(names)}

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.names)

    @classmethod
    def of(cls, records: Sequence[Record]) -> "LabelSet":
        """The classes that occur: sorted names, or as many as the highest index says.

        Raises:
            DataError: Fewer than two, names beside indices, or an index that is no class's.
        """
        named = [record for record in records if _as_index(record.label) is None]
        numbered = [record for record in records if isinstance(record.label, int)]
        if named and numbered:
            raise DataError(
                f"{numbered[0].where} has the index {numbered[0].label} as its label, and "
                f"{named[0].where} the name {named[0].label!r}; give all classes by name or all by "
                "index, or say with labels which index is which name"
            )
        if named:
            names = sorted({str(record.label) for record in records})
        else:
            names = _indices(records)
        if len(names) < 2:
            where = records[0].where if records else "the data"
            raise DataError(
                f"{where} and what follows have {len(names)} class(es) {names}; classification "
                "needs two or more"
            )
        return cls(names)

    def index(self, label: str | SupportsIndex, where: str) -> int:
        """The index of a class.

        Args:
            label: Its name, or its index; a name goes before.
            where: What it belongs to, for the error.

        Raises:
            DataError: It is unknown or out of range.
        """
        if not isinstance(label, str):
            label = whole_label(label, where)
        if isinstance(label, str) and label in self._index:
            return self._index[label]
        index = _as_index(label)
        shown = ", ".join(map(repr, self.names[:10])) + (", ..." if len(self.names) > 10 else "")
        if index is None:
            raise DataError(
                f"{where}: label {label!r} is unknown; the {len(self)} classes are {shown}"
            )
        if not 0 <= index < len(self.names):
            raise DataError(
                f"{where}: label {label!r} is out of range; the {len(self)} classes have the "
                f"indices 0 to {len(self) - 1} ({shown})"
            )
        return index

    def require_all(self, indices: Iterable[int], what: str) -> None:
        """Refuses data in which a class does not occur.

        Args:
            indices: The classes of the samples.
            what: The data, for the error.

        Raises:
            DataError: Names the classes that are missing.
        """
        counts = Counter(indices)
        missing = [name for i, name in enumerate(self.names) if not counts[i]]
        if missing:
            raise DataError(
                f"no sample of {', '.join(map(repr, missing))} in {what}: a class that never "
                "occurs cannot be learnt. Add samples of it, or leave it out of labels"
            )

    def weights(
        self,
        chosen: Literal["balanced"] | Sequence[float] | Mapping[str, float] | None,
        indices: Sequence[int],
    ) -> tuple[float, ...] | None:
        """A weight for each class; ``None`` for 1 each.

        Args:
            chosen: See ``ClassifyConfig.class_weights``. With ``"balanced"``, class c weighs
                num_samples / (num_classes · samples of c), as in scikit-learn.
            indices: The classes of the training samples.

        Raises:
            ConfigError: Not one for each class, or an unknown name.
        """
        if chosen is None:
            return None
        if chosen == "balanced":
            if not indices:
                raise ConfigError(
                    "class_weights is 'balanced', which needs training samples to count; give a "
                    "number for each class instead"
                )
            self.require_all(indices, "the training data")
            counts = Counter(indices)
            return tuple(len(indices) / (len(self) * counts[i]) for i in range(len(self)))
        if isinstance(chosen, Mapping):
            if unknown := [name for name in chosen if name not in self._index]:
                raise ConfigError(
                    f"class_weights names {unknown[0]!r}, which is no class; the classes are "
                    f"{', '.join(map(repr, self.names))}"
                )
            return tuple(float(chosen.get(name, 1.0)) for name in self.names)
        if len(chosen) != len(self):
            raise ConfigError(
                f"class_weights has {len(chosen)} numbers for {len(self)} classes; give one for "
                "each, in the order of labels"
            )
        return tuple(float(weight) for weight in chosen)


def whole_label(label: SupportsIndex, where: str) -> int:
    """The number of a label: Python's, NumPy's, or a tensor of one.

    Raises:
        DataError: It is none.
    """
    try:
        if isinstance(label, bool):
            raise TypeError
        return operator.index(label)
    except TypeError:
        raise DataError(
            f"{where}: label {label!r} is a {type(label).__name__}; give a class by name or by "
            "index"
        ) from None


def _as_index(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    # Python turns no longer texts into numbers; none is the index of a class.
    short = len(label) <= _LONGEST_INDEX
    return int(label) if short and label.isascii() and label.isdigit() else None


def _indices(records: Sequence[Record]) -> list[str]:
    """The classes from 0 to the highest index, as names.

    Raises:
        DataError: There are more of them than samples, so that most have none.
    """
    where: dict[int, str] = {}
    for record in records:
        if (index := _as_index(record.label)) is not None:
            where.setdefault(index, record.where)
    highest = max(where, default=-1)
    if highest >= max(2, len(records)):
        raise DataError(
            f"{where[highest]}: label {highest} would make {highest + 1:,} classes, for "
            f"{len(records):,} samples; number the classes from 0, or name them with labels"
        )
    if where and min(where) != 0:
        raise DataError(
            f"{where[min(where)]}: the lowest label is {min(where)}, and indices begin with 0; "
            "number the classes from 0, or write them as texts and name them with labels"
        )
    return [str(i) for i in range(highest + 1)]
