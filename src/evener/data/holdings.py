"""What a cache holds, and what it must drop: decided from sizes, uses and free memory alone.

A cache may hold as much as it leaves free. So R caches that grow side by side in one memory end
with equal parts of it and leave one more part, whatever R is. Pure: no torch, no clock, no I/O.
"""

from typing import final


@final
class Holdings:
    """The sizes and uses of the items that a cache holds.

    It does not replace one item by another when it is full. Where each epoch has another order,
    every item is used the same number of times, and what was used longest ago is needed soonest: to
    replace it would cost as many hits as it brings.

    Attributes:
        num_bytes: Sum of the sizes.
        is_full: Whether an item has been refused, or dropped.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_full = False
        self._allowance = 0
        self._sizes: dict[int, int] = {}
        self._uses: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, index: int) -> bool:
        return index in self._sizes

    def use(self, index: int) -> None:
        """Count a use of an item that is held."""
        self._uses[index] += 1

    def admit(self, index: int, num_bytes: int) -> bool:
        """Return whether a new item is held from now on."""
        if num_bytes > self._allowance:
            self.is_full = True
            return False
        self._allowance -= num_bytes
        self.num_bytes += num_bytes
        self._sizes[index], self._uses[index] = num_bytes, 0
        return True

    def fit(self, free_bytes: int) -> list[int]:
        """Adapt to the memory that is free now, beside what is held.

        Returns:
            The items to drop, which are not held any more: those that were used least.
        """
        # Half: what is added to the one is missing from the other.
        self._allowance = max(0, free_bytes - self.num_bytes) // 2
        gone: list[int] = []
        if self.num_bytes <= free_bytes:
            return gone
        for index in sorted(self._uses, key=self._uses.__getitem__):
            if self.num_bytes <= free_bytes:
                break
            gone.append(index)
            self.num_bytes -= self._sizes.pop(index)
            del self._uses[index]
        self.is_full = True
        return gone
