"""One cursor over the data: every sample of an epoch exactly once, whoever computes it.

An epoch is one seeded permutation of the sample indices, evaluated point by point, so that it costs
no memory. Positions of the permutation are leased to windows and committed when their window is;
the state is ``(seed, epoch, committed ranges)`` and holds no rank count and no batch size, so a run
can resume with other numbers of both. Pure: no torch, no clock, no I/O.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.errors import CheckpointError, DataError, UsageError
from evener.parsing import Fields

_NUM_ROUNDS = 8
"""Feistel rounds; below six, neighbouring positions of small data sets stay correlated."""

_MASK_64 = 2**64 - 1
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
"""Odd multipliers with good diffusion, known from the splitmix64 generator."""


def derive_seed(*parts: int | str) -> int:
    """Derive a seed from what it is for, so that randomness need not be stored.

    Args:
        parts: What the seed is for, such as ``(seed, window, position)``; order and type count, and
            ``("ab", "c")`` differs from ``("a", "bc")``.

    Returns:
        A whole number in ``[0, 2**63)``, the same on every machine and Python version.
    """
    whole = b""
    for part in parts:
        if isinstance(part, str):
            text = part.encode()
            whole += b"s%d:%s" % (len(text), text)
        else:
            text = b"%d" % int(part)
            whole += b"i%d:%s" % (len(text), text)
    return int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little") >> 1


class Permutation:
    """A seeded shuffle of ``range(num_samples)`` that holds no list.

    A position is split into two digits of about ``sqrt(num_samples)`` values each. An alternating
    Feistel network adds to one digit, in turn, a keyed hash of the other: each round can be undone,
    so the whole is a bijection. The digits span slightly more than ``num_samples`` values; what
    falls outside is sent through again until it is inside, which keeps it a bijection.

    Args:
        num_samples: Samples of the data set, at least 1.
        seed: Seed of the run.
        epoch: Epochs differ in their order.

    Raises:
        DataError: The data set is empty.
    """

    __slots__ = ("_columns", "_key_pairs", "_num_samples", "_rows")

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        _require_samples(num_samples)
        self._num_samples = num_samples
        self._rows = math.isqrt(num_samples - 1) + 1
        self._columns = -(-num_samples // self._rows)
        keys = [derive_seed("permutation", seed, epoch, number) for number in range(_NUM_ROUNDS)]
        self._key_pairs = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> int:
        """Sample index at ``position``; ``IndexError`` outside ``[0, num_samples)``."""
        if not 0 <= position < self._num_samples:
            raise IndexError(f"position {position} is outside an epoch of {self._num_samples}")
        value: int = self.shuffle(position)
        while value >= self._num_samples:
            value = self.shuffle(value)
        return value

    def shuffle(self, value: Any) -> Any:
        """Pass once over ``[0, rows * columns)``, a bijection of it.

        Args:
            value: A number, or an array of unsigned 64-bit numbers that wraps around.
        """
        rows, columns = self._rows, self._columns
        row, column = divmod(value, columns)
        # Written out and not as a function of one round: this runs once for every sample read.
        for row_key, column_key in self._key_pairs:
            mixed = (column ^ row_key) * _MIX_1 & _MASK_64
            mixed = (mixed ^ (mixed >> 32)) * _MIX_2 & _MASK_64
            row = (row + (mixed >> 32)) % rows
            mixed = (row ^ column_key) * _MIX_1 & _MASK_64
            mixed = (mixed ^ (mixed >> 32)) * _MIX_2 & _MASK_64
            column = (column + (mixed >> 32)) % columns
        return row * columns + column


@dataclass(frozen=True, slots=True)
class Slice:
    """Positions ``[start, start + size)`` of one epoch, leased for a window."""

    epoch: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.size


class RangeSet:
    """A set of whole numbers, held as sorted, disjoint, non-adjacent ``[start, stop)`` ranges.

    What has been committed is held in it, at a cost that does not grow with how much that is.

    Args:
        ranges: Pairs of start and stop, in any order.

    Raises:
        UsageError: A pair is empty, negative, or overlaps another.
    """

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``.

        Raises:
            UsageError: It is not a range of whole numbers, or overlaps what is already there.
        """
        if not (type(start) is type(stop) is int and 0 <= start < stop):
            raise UsageError(f"[{start}, {stop}) is no range of positions: give 0 <= start < stop")
        first = last = bisect_right(self._ranges, (start, math.inf))
        for other in self._ranges[max(0, first - 1) : first + 1]:
            if other[0] < stop and start < other[1]:
                raise UsageError(
                    f"positions [{start}, {stop}) overlap [{other[0]}, {other[1]}), which is "
                    f"already there: a sample would count twice"
                )
            if other[1] == start:
                first, start = first - 1, other[0]
            elif other[0] == stop:
                last, stop = last + 1, other[1]
        self._ranges[first:last] = [(start, stop)]

    @property
    def total(self) -> int:
        """How many numbers are in the set."""
        return sum(stop - start for start, stop in self._ranges)

    def gaps(self, limit: int) -> Iterator[range]:
        """Yield the ranges of ``[0, limit)`` that are not in the set, from the lowest."""
        reached = 0
        for start, stop in self._ranges:
            if reached >= limit:
                return
            if reached < start:
                yield range(reached, min(start, limit))
            reached = stop
        if reached < limit:
            yield range(reached, limit)

    def to_list(self) -> list[list[int]]:
        """Return pairs of start and stop in ascending order, fit for JSON."""
        return [list(pair) for pair in self._ranges]

    def copy(self) -> "RangeSet":
        """Return an independent copy."""
        return RangeSet(self._ranges)


class Cursor:
    """Where the team is in the data: leased and committed positions of the current epoch.

    Every rank holds an equal cursor and drives it with the same plans, so no rank count appears in
    it. Planning may be ahead of committing within an epoch, never across two: ``take`` ends with
    ``None`` at the end of the epoch, and ``begin`` moves on.

    Args:
        num_samples: Samples of the data set, at least 1.
        seed: Seed of the run; with the epoch it fixes the order.

    Attributes:
        num_samples: Samples of the data set.
        seed: Seed of the run.
        epoch: The first epoch that is not yet committed as a whole.

    Raises:
        DataError: The data set is empty.
    """

    #: More cannot be in a checkpoint: at one epoch a second, those of a lifetime.
    MOST_EPOCHS = 2**31

    def __init__(self, num_samples: int, seed: int) -> None:
        _require_samples(num_samples)
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = self._planning_epoch = 0
        self._committed = RangeSet()
        # Leased or committed: what take() must not hand out.
        self._busy = RangeSet()
        #: Those that are outstanding, in the order in which they were taken.
        self._leases: dict[Slice, None] = {}

    @property
    def leases(self) -> tuple[Slice, ...]:
        """What is taken and neither committed nor released, in the order it was taken."""
        return tuple(self._leases)

    def is_committed(self, epoch: int) -> bool:
        """Return whether nothing of ``epoch`` is left to do."""
        return epoch < self.epoch

    def begin(self, epoch: int, *, abandon: bool = False) -> bool:
        """Move planning to ``epoch``.

        An epoch that nobody has begun may be passed over; it then counts as committed.

        Args:
            epoch: The epoch.
            abandon: An earlier epoch that is partly done counts as committed, too.

        Returns:
            Whether there is anything to do in it: ``False`` for a committed epoch, from which
            ``take`` leases nothing.

        Raises:
            UsageError: An earlier epoch is partly done or has leases outstanding.
        """
        if epoch < 0:
            raise UsageError(f"epoch={epoch} must not be negative")
        if epoch > self.epoch:
            if self._leases or (self._committed.total > 0 and not abandon):
                raise UsageError(
                    f"epoch {epoch} cannot begin: epoch {self.epoch} has "
                    f"{self._committed.total} of {self.num_samples} samples committed and "
                    f"{sum(lease.size for lease in self._leases)} under way. Run the loop over "
                    f"epoch {self.epoch} to its end first"
                )
            self._enter(epoch, RangeSet())
        self._planning_epoch = epoch
        return epoch == self.epoch

    def take(self, size: int) -> Slice | None:
        """Lease the next positions of the planning epoch, lowest gap first.

        Args:
            size: Most samples to lease; fewer come back at the end of the epoch or of a gap.

        Returns:
            The lease, or ``None`` when every position of the epoch is leased or committed.
        """
        if size < 1:
            raise UsageError(f"a window of size={size} samples is impossible; give at least 1")
        if self._planning_epoch != self.epoch:
            return None
        gap = next(self._busy.gaps(self.num_samples), None)
        if gap is None:
            return None
        lease = Slice(self.epoch, gap.start, min(size, len(gap)))
        self._busy.add(lease.start, lease.stop)
        self._leases[lease] = None
        return lease

    def lease(self, piece: Slice) -> None:
        """Lease exactly these positions, which another rank has taken.

        Raises:
            UsageError: Some of them are leased or committed.
        """
        self._busy.add(piece.start, piece.stop)
        self._leases[piece] = None

    def commit(self, lease: Slice) -> None:
        """Turn a lease into committed positions; the last one of an epoch ends the epoch.

        Raises:
            UsageError: ``lease`` is not outstanding: committed before, released, or never taken.
        """
        if lease not in self._leases:
            raise UsageError(
                f"{lease} is not leased (outstanding: {list(self._leases)}): it was committed "
                "before, released, or never taken"
            )
        self._committed.add(lease.start, lease.stop)
        del self._leases[lease]
        if self._committed.total == self.num_samples:
            self.epoch += 1
            self._committed, self._busy = RangeSet(), RangeSet()

    def release(self) -> None:
        """Drop every outstanding lease, so that ``take`` continues from the first gap."""
        self._leases = {}
        self._busy = self._committed.copy()

    def num_windows(self, batch_size: int) -> int:
        """Windows of a whole epoch at ``batch_size`` samples each."""
        return -(-self.num_samples // batch_size)

    def free_gaps(self) -> Iterator[int]:
        """Sizes of the gaps of the epoch that ``take`` can still lease from, in its order."""
        if self._planning_epoch == self.epoch:
            for gap in self._busy.gaps(self.num_samples):
                yield len(gap)

    def state_dict(self) -> dict[str, Any]:
        """Return committed progress as plain JSON types; leases are not part of it."""
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "epoch": self.epoch,
            "committed": self._committed.to_list(),
        }

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Return whether ``state`` is of a data set of this size, with this seed."""
        return state.get("num_samples") == self.num_samples and state.get("seed") == self.seed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; outstanding leases are dropped.

        Raises:
            CheckpointError: The state is for another data set or seed, or is damaged.
        """
        for name, mine in (("num_samples", self.num_samples), ("seed", self.seed)):
            theirs = state.get(name)
            if theirs != mine:
                raise CheckpointError(
                    f"the checkpoint's data cursor has {name}={theirs!r}, this run has "
                    f"{name}={mine!r}: going on would repeat or miss samples. Use the data set "
                    "and the seed of that run, start a new run, or begin this data anew with "
                    'ddp.load(path, allow=("data",))'
                )
        try:
            fields = Fields(dict(state))
            epoch = fields.whole("epoch", most=self.MOST_EPOCHS)
            committed = RangeSet(fields.items("committed"))
            reached = max((stop for _, stop in committed.to_list()), default=0)
            if reached > self.num_samples:
                raise UsageError(
                    f"committed positions reach {reached}, but the data set has "
                    f"{self.num_samples} samples"
                )
        except (TypeError, ValueError, UsageError) as error:
            raise CheckpointError(
                f"the checkpoint's data cursor is damaged ({error}): resume from an older "
                "checkpoint"
            ) from error
        if committed.total == self.num_samples:
            epoch, committed = epoch + 1, RangeSet()
        self._enter(epoch, committed)

    def restart(self) -> None:
        """Begin with the first epoch anew; outstanding leases are dropped."""
        self._enter(0, RangeSet())

    def _enter(self, epoch: int, committed: RangeSet) -> None:
        self.epoch = self._planning_epoch = epoch
        self._committed = committed
        self._busy = committed.copy()
        self._leases = {}


def _require_samples(num_samples: int) -> None:
    if num_samples < 1:
        raise DataError(
            f"the data set has {num_samples} samples: there is nothing to train on. "
            "Check its path and its filters"
        )
