"""Labelled texts and the classes they belong to."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

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
        group: What it has in common with others; its text where that is nothing else.
        where: File and line, or its number, for errors.
    """

    text: str
    label: str | int
    group: str
    where: str


def require_characters(value: object, what: str, where: str) -> None:
    """Refuse a text that holds half a character; ``what`` and ``where`` name it.

    Raises:
        DataError: It does.
    """
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} is malformed: {what} holds {error.object[error.start]!a}, which is no "
            "character; save the file as UTF-8, or decode the text with the right encoding"
        ) from None


def checked_text(text: object, where: str) -> str:
    """Return what is classified, if it is a text and not blank.

    Raises:
        DataError: It is something else.
    """
    if not isinstance(text, str) or not text.strip():
        what = "an empty text" if isinstance(text, str) else f"{text!r} as its text"
        raise DataError(f"{where} has {what}; give it a text, or leave it out")
    require_characters(text, "'text'", where)
    return text


def checked_label(label: Any, where: str) -> str | int:
    """Return a class by name, or by the number of Python, NumPy, or a tensor.

    Raises:
        DataError: It is neither.
    """
    if isinstance(label, str) and label:
        return label
    try:
        if not isinstance(label, bool):
            return operator.index(label)
    except TypeError:
        pass
    kind = "empty" if label == "" else f"a {type(label).__name__}"
    raise DataError(f"{where}: label {label!r} is {kind}; give a class by name or by index")


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
        """Return the number of classes."""
        return len(self.names)

    @classmethod
    def of(cls, records: Sequence[Record]) -> "LabelSet":
        """Return the classes that occur: sorted names, or as many as the highest index says.

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
        names = sorted({str(r.label) for r in records}) if named else _indices(records)
        if len(names) < 2:
            where = records[0].where if records else "the data"
            raise DataError(
                f"{where} and what follows have {len(names)} class(es) {names}; classification "
                "needs two or more"
            )
        return cls(names)

    def index(self, label: str | SupportsIndex, where: str) -> int:
        """Return the index of a class.

        Args:
            label: Its name, or its index; a name takes precedence.
            where: What it belongs to, for the error.

        Raises:
            DataError: It is unknown or out of range.
        """
        if isinstance(label, str) and label in self._index:
            return self._index[label]
        index = _as_index(checked_label(label, where))
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

    def require_all(self, indices: Iterable[int]) -> None:
        """Refuse training data in which a class does not occur.

        Args:
            indices: The classes of the samples.

        Raises:
            DataError: Names the classes that are missing.
        """
        counts = Counter(indices)
        missing = [name for i, name in enumerate(self.names) if not counts[i]]
        if missing:
            raise DataError(
                f"no sample of {', '.join(map(repr, missing))} in the training data: a class that "
                "never occurs cannot be learnt. Add samples of it, or leave it out of labels"
            )

    def weights(
        self,
        chosen: Literal["balanced"] | Sequence[float] | Mapping[str, float] | None,
        indices: Sequence[int],
    ) -> tuple[float, ...] | None:
        """Return a weight for each class; ``None`` for 1 each.

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
            self.require_all(indices)
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


def _as_index(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    # Python turns no longer texts into numbers; none is the index of a class.
    short = len(label) <= _LONGEST_INDEX
    return int(label) if short and label.isascii() and label.isdigit() else None


def _indices(records: Sequence[Record]) -> list[str]:
    """Return the classes from 0 to the highest index, as names.

    Raises:
        DataError: There are more of them than samples, so that most have none.
    """
    where = {int(record.label): record.where for record in reversed(records)}
    lowest, highest = min(where, default=0), max(where, default=-1)
    if highest >= max(2, len(records)):
        raise DataError(
            f"{where[highest]}: label {highest} would make {highest + 1:,} classes, for "
            f"{len(records):,} samples; number the classes from 0, or name them with labels"
        )
    if lowest != 0:
        raise DataError(
            f"{where[lowest]}: the lowest label is {lowest}, and indices begin with 0; "
            "number the classes from 0, or write them as texts and name them with labels"
        )
    return [str(i) for i in range(highest + 1)]
