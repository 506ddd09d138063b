"""Sets of positions as ranges: what has been committed, at a cost that does not grow with it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from evener.errors import UsageError


class RangeSet:
    """A set of whole numbers, held as sorted, disjoint, non-adjacent ``[start, stop)`` ranges.

    Args:
        ranges: Pairs of start and stop, in any order.

    Raises:
        UsageError: A pair is empty, negative, or overlaps another.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``.

        Raises:
            UsageError: The range is empty or negative, or part of it is in the set already.
        """
        if not 0 <= start < stop:
            raise UsageError(f"[{start}, {stop}) is no range of positions")
        at = bisect_right(self._starts, start)
        if at > 0 and self._stops[at - 1] > start:
            raise UsageError(self._overlap(start, stop, at - 1))
        if at < len(self._starts) and self._starts[at] < stop:
            raise UsageError(self._overlap(start, stop, at))
        joins_left = at > 0 and self._stops[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == stop
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._stops[at - 1] = stop
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)

    def contains(self, start: int, stop: int) -> bool:
        """Whether every number of the non-empty ``[start, stop)`` is in the set."""
        at = bisect_right(self._starts, start)
        return at > 0 and self._stops[at - 1] >= stop > start

    def __contains__(self, position: int) -> bool:
        return self.contains(position, position + 1)

    @property
    def total(self) -> int:
        """How many numbers are in the set."""
        return sum(self._stops) - sum(self._starts)

    def gaps(self, limit: int) -> Iterator[range]:
        """The ranges of ``[0, limit)`` that are not in the set, from the lowest."""
        reached = 0
        for start, stop in zip(self._starts, self._stops, strict=True):
            if reached >= limit:
                return
            if reached < start:
                yield range(reached, min(start, limit))
            reached = stop
        if reached < limit:
            yield range(reached, limit)

    def first_gap(self, limit: int) -> range | None:
        """The lowest range of ``[0, limit)`` that is not in the set, or ``None``."""
        return next(self.gaps(limit), None)

    def to_list(self) -> list[list[int]]:
        """``[[start, stop], ...]`` from the lowest, as JSON holds it."""
        return [list(pair) for pair in zip(self._starts, self._stops, strict=True)]

    @classmethod
    def from_list(cls, ranges: Iterable[Sequence[int]]) -> "RangeSet":
        """Inverse of ``to_list``.

        Raises:
            UsageError: As the constructor does, and on bounds that are not whole numbers.
        """
        pairs = [tuple(pair) for pair in ranges]
        for pair in pairs:
            if len(pair) != 2 or not all(type(bound) is int for bound in pair):
                raise UsageError(f"{list(pair)} is no range of positions")
        return cls(pairs)

    def copy(self) -> "RangeSet":
        """An independent set with the same numbers."""
        twin = RangeSet()
        twin._starts, twin._stops = self._starts.copy(), self._stops.copy()
        return twin

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"RangeSet({self.to_list()})"

    def _overlap(self, start: int, stop: int, at: int) -> str:
        return (
            f"positions [{start}, {stop}) overlap [{self._starts[at]}, {self._stops[at]}), which "
            "is already there: a sample would count twice"
        )
