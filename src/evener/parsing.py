"""Values from JSON that another program may have written or damaged: checked when they are read.

Everything here raises ``ValueError`` with the key, the value and what was expected. The caller
knows the file and the remedy, and says both. Pure: no I/O.
"""

import json
import math
import reprlib
from typing import Any, Final, TypeVar

_Kind = TypeVar("_Kind")

MOST_DEPTH: Final = 100
"""Lists and objects within one another; nothing that evener or transformers writes comes near."""

MOST_WHOLE: Final = 2**53
"""Whole numbers up to here are the same in JSON readers that have doubles only."""


def parse_json(data: bytes | str) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: It is not JSON, not UTF-8, nested more than ``MOST_DEPTH`` deep, or holds a
            number of more digits than Python converts.
    """
    text = data.decode() if isinstance(data, bytes) else data
    too_deep = f"lists or objects are nested more than {MOST_DEPTH} deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("[") + text.count("{") > MOST_DEPTH and not _is_flat_enough(value):
        raise ValueError(too_deep)
    return value


def _is_flat_enough(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return not any(isinstance(one, dict | list) for one in level)


_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def short(value: object) -> str:
    """Return a value as text for a message, whatever its size."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Fields:
    """A JSON object whose values are read by key and kind.

    Args:
        value: What should be an object.
        where: Its place in the document, such as ``progress``; empty for the whole document.

    Raises:
        ValueError: It is something else.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'the document'} is {short(value)}, not a JSON object")
        self.values: dict[str, Any] = value
        self._where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise ValueError(f"{self._place(key)} is missing")
        return self.values[key]

    def whole(self, key: str, *, least: int = 0, most: int = MOST_WHOLE) -> int:
        """Return a whole number from ``least`` to ``most``."""
        return whole(self[key], self._place(key), least=least, most=most)

    def number(self, key: str, *, least: float = -math.inf) -> float:
        """Return a finite number, at least ``least``."""
        value = self[key]
        good = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before the conversion, which fails for large whole numbers.
        if not good or not max(least, -1e308) <= value <= 1e308:
            limit = "" if least == -math.inf else f" from {least:g}"
            raise ValueError(f"{self._place(key)} is {short(value)}, not a finite number{limit}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return ``True`` or ``False``."""
        return self._of_kind(key, bool, "true or false")

    def text(self, key: str) -> str:
        """Return a text."""
        return self._of_kind(key, str, "a text")

    def texts(self, key: str) -> list[str]:
        """Return a list of texts."""
        if not all(isinstance(one, str) for one in self.items(key)):
            raise ValueError(f"{self._place(key)} is {short(self[key])}, not a list of texts")
        return self.items(key)

    def items(self, key: str) -> list[Any]:
        """Return a list."""
        return self._of_kind(key, list, "a list")

    def fields(self, key: str) -> "Fields":
        """Return an object within this one."""
        return Fields(self[key], self._place(key))

    def _of_kind(self, key: str, kind: type[_Kind], noun: str) -> _Kind:
        value = self[key]
        if not isinstance(value, kind):
            raise ValueError(f"{self._place(key)} is {short(value)}, not {noun}")
        return value

    def _place(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def whole(value: Any, what: str, *, least: int = 0, most: int = MOST_WHOLE) -> int:
    """Return a value that is a whole number from ``least`` to ``most``.

    Raises:
        ValueError: It is something else; ``what`` names it.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {short(value)}, not a whole number from {least} to {most}")
    return value
