"""Labelled texts and the classes they belong to."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

from evener.errors import ConfigError, DataError

Pair = tuple[str, int]
"""A text and the index of its class."""


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
    """A checked sample, from a file or from Python.

    Attributes:
        text: What is classified.
        label: The class by name or by index.
        group: Samples of one group are held out together.
        where: File and line, or its number, for errors.
    """

    text: str
    label: str | int
    group: str
    where: str


def checked_text(text: object, where: str) -> str:
    """Return a text that is not blank and can be encoded.

    Raises:
        DataError: It is something else.
    """
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where} has {text!r} as its text; give it a text, or leave it out")
    _require_encodable(text, where)
    return text


def checked_label(label: Any, where: str) -> str | int:
    """Return a class by name, or by index as an ``int``.

    Raises:
        DataError: It is neither.
    """
    if isinstance(label, str) and label.strip():
        _require_encodable(label, where)
        return label
    try:
        if not isinstance(label, bool):
            return operator.index(label)
    except TypeError:
        pass
    raise DataError(
        f"{where}: label {label!r} is a {type(label).__name__} that names no class; give a class "
        "by name or by index"
    )


def _require_encodable(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} is not UTF-8: it holds {error.object[error.start]!a}; save the file as "
            "UTF-8, or decode the text with the right encoding"
        ) from None


class LabelSet:
    """The classes, in the order of their indices.

    Args:
        names: Two or more different names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        numbers = {str(index): index for index in range(len(names))}
        self._index = numbers | {name: index for index, name in enumerate(names)}

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self.names)

    @classmethod
    def of(cls, records: Sequence[Record]) -> "LabelSet":
        """Return the classes that occur: sorted names, or indices that count from 0.

        Raises:
            DataError: Fewer than two, names beside indices, or indices with gaps.
        """
        found = {str(record.label): record for record in reversed(records)}
        if len(found) < 2:
            raise DataError(
                f"{records[0].where} and what follows have the only class {list(found)}; "
                "classification needs two or more"
            )
        numbered = all(name.isdecimal() for name in found)
        if not numbered and not any(isinstance(r.label, int) for r in found.values()):
            return cls(sorted(found))
        names = [str(index) for index in range(len(found))]
        for name in sorted(found.keys() - set(names)):
            raise DataError(
                f"{found[name].where}: label {name!r} is not among the {len(names)} indices from 0 "
                f"to {len(names) - 1} that as many classes have; number the classes from 0 without "
                "gaps, or list their names as labels"
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
        checked = checked_label(label, where)
        index = self._index.get(checked, -1) if isinstance(checked, str) else checked
        if not 0 <= index < len(self):
            shown = ", ".join(map(repr, self.names[:10])) + (", ..." if len(self) > 10 else "")
            raise DataError(
                f"{where}: label {checked!r} is unknown; the {len(self)} classes are {shown}, or "
                f"by index 0 to {len(self) - 1}"
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
        missing = [name for index, name in enumerate(self.names) if not counts[index]]
        if missing:
            raise DataError(
                f"no sample of {', '.join(map(repr, missing))} in the training data, so that it "
                "cannot be learnt; add samples of it, or leave it out of labels"
            )

    def weights(
        self,
        chosen: Literal["balanced"] | Sequence[float] | Mapping[str, float] | None,
        indices: Sequence[int],
    ) -> list[float]:
        """Return a weight for each class.

        Args:
            chosen: See ``ClassifyConfig.class_weights``; ``"balanced"`` is as in
                scikit-learn.
            indices: The classes of the training samples.

        Raises:
            ConfigError: Not one for each class, or an unknown name.
        """
        if chosen is None:
            return [1.0] * len(self)
        if chosen == "balanced":
            if not indices:
                raise ConfigError(
                    "class_weights is 'balanced', which needs training samples to count; give a "
                    "number for each class instead"
                )
            counts = Counter(indices)
            return [len(indices) / (len(self) * counts[i]) for i in range(len(self))]
        if isinstance(chosen, Mapping):
            if unknown := chosen.keys() - set(self.names):
                raise ConfigError(
                    f"class_weights names {min(unknown)!r}, which is not a class; the classes are "
                    f"{', '.join(map(repr, self.names))}"
                )
            return [float(chosen.get(name, 1.0)) for name in self.names]
        if len(chosen) != len(self):
            raise ConfigError(
                f"class_weights has {len(chosen)} numbers for {len(self)} classes; give one for "
                "each, in the order of labels"
            )
        return [float(weight) for weight in chosen]
