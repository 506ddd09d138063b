"""Lists of any length in bounded memory. Pure."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

MOST_LISTED: Final = 500
"""The most lines of a list, such as that of the checkpoints; a longer one loses its middle."""

_Item = TypeVar("_Item")


class Listed(Generic[_Item]):
    """The first and the last items of a list.

    Args:
        most: So many are kept.

    Attributes:
        count: How many there were.
    """

    def __init__(self, most: int = MOST_LISTED) -> None:
        self._at_an_end = most // 2
        self._first: list[_Item] = []
        self._last: deque[_Item] = deque(maxlen=self._at_an_end)
        self.count = 0

    def append(self, item: _Item) -> None:
        """Add an item at the end."""
        self.count += 1
        (self._first if len(self._first) < self._at_an_end else self._last).append(item)

    def __iter__(self) -> Iterator[_Item]:
        return chain(self._first, self._last)
