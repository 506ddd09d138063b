"""One cursor over the data: every sample of an epoch exactly once, whoever computes it.

An epoch is one seeded permutation of the sample indices, evaluated point by point, so that it costs
no memory. Positions of the permutation are leased to windows and committed when their window is;
the state is ``(seed, epoch, committed ranges)`` and holds no rank count and no batch size, so a run
can go on with other numbers of both. Pure: no torch, no clock, no I/O.
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

    MULTIPLIERS = (_MIX_1, _MIX_2)

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        _require_samples(num_samples)
        self._num_samples = num_samples
        self._rows = math.isqrt(num_samples - 1) + 1
        self._columns = -(-num_samples // self._rows)
        keys = [derive_seed("permutation", seed, epoch, number) for number in range(_NUM_ROUNDS)]
        self._key_pairs = tuple(zip(keys[::2], keys[1::2], strict=True))

    @property
    def network(self) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """Rows, columns and keys, for those who evaluate it for many positions at once."""
        return self._rows, self._columns, self._key_pairs

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> int:
        """Sample index at ``position``; ``IndexError`` outside ``[0, num_samples)``."""
        if not 0 <= position < self._num_samples:
            raise IndexError(f"position {position} is outside an epoch of {self._num_samples}")
        value = self._shuffle(position)
        while value >= self._num_samples:
            value = self._shuffle(value)
        return value

    def indices(self, ranges: Iterable[range]) -> list[int]:
        """Sample indices at the positions in ``ranges``, in that order."""
        return [self[position] for part in ranges for position in part]

    def _shuffle(self, value: int) -> int:
        """One pass over ``[0, rows * columns)``, a bijection of it."""
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
            raise UsageError(f"[{start}, {stop}) is no range of positions: give 0 <= start < stop")
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
                raise UsageError(
                    f"{list(pair)} is no range of positions: give start and stop, 0 <= start < stop"
                )
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


class Cursor:
    """Where the team is in the data: leased and committed positions of the current epoch.

    Every rank holds an equal cursor and drives it with the same plans, so no rank count appears in
    it. Planning may be ahead of committing within an epoch, never across two: ``take`` ends with
    ``None`` at the end of the epoch, and ``begin`` moves on.

    Args:
        num_samples: Samples of the data set, at least 1.
        seed: Seed of the run; with the epoch it fixes the order.
        epoch: First epoch that is not yet committed as a whole.
        committed: Positions of ``epoch`` that are committed.

    Raises:
        DataError: The data set is empty.
        UsageError: ``committed`` reaches past the data set.
    """

    #: More cannot be in a checkpoint: at one epoch a second, those of a lifetime.
    MOST_EPOCHS = 2**31

    def __init__(
        self,
        num_samples: int,
        seed: int,
        epoch: int = 0,
        committed: RangeSet | None = None,
    ) -> None:
        _require_samples(num_samples)
        if epoch < 0:
            raise UsageError(f"epoch={epoch} must not be negative")
        self.num_samples = num_samples
        self.seed = seed
        self._epoch = epoch
        self._planning_epoch = epoch
        self._committed = RangeSet()
        self._leases: list[Slice] = []
        # Leased or committed: what take() must not hand out.
        self._busy = RangeSet()
        self._restore(epoch, RangeSet() if committed is None else committed.copy())

    @property
    def epoch(self) -> int:
        """The first epoch that is not yet committed as a whole."""
        return self._epoch

    @property
    def committed(self) -> RangeSet:
        """A copy of the committed positions of ``epoch``."""
        return self._committed.copy()

    @property
    def leases(self) -> tuple[Slice, ...]:
        """What is taken and neither committed nor released, in the order it was taken."""
        return tuple(self._leases)

    def permutation(self, epoch: int) -> Permutation:
        """The order of the samples in ``epoch``."""
        return Permutation(self.num_samples, self.seed, epoch)

    def is_committed(self, epoch: int) -> bool:
        """Whether nothing of ``epoch`` is left to do."""
        return epoch < self._epoch

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
        if epoch > self._epoch:
            if self._leases or (self._committed.total > 0 and not abandon):
                raise UsageError(
                    f"epoch {epoch} cannot begin: epoch {self._epoch} has "
                    f"{self._committed.total} of {self.num_samples} samples committed and "
                    f"{sum(lease.size for lease in self._leases)} under way. Run the loop over "
                    f"epoch {self._epoch} to its end first"
                )
            self._epoch = epoch
            self._committed = RangeSet()
            self._busy = RangeSet()
        self._planning_epoch = epoch
        return epoch == self._epoch

    def take(self, size: int) -> Slice | None:
        """Lease the next positions of the planning epoch, lowest gap first.

        Args:
            size: Most samples to lease; fewer come back at the end of the epoch or of a gap.

        Returns:
            The lease, or ``None`` when every position of the epoch is leased or committed.
        """
        if size < 1:
            raise UsageError(f"a window of size={size} samples is impossible; give at least 1")
        if self._planning_epoch != self._epoch:
            return None
        gap = self._busy.first_gap(self.num_samples)
        if gap is None:
            return None
        lease = Slice(self._epoch, gap.start, min(size, len(gap)))
        self._busy.add(lease.start, lease.stop)
        self._leases.append(lease)
        return lease

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
        self._leases.remove(lease)
        if self._committed.contains(0, self.num_samples):
            self._epoch += 1
            self._committed = RangeSet()
            self._busy = RangeSet()

    def release(self) -> None:
        """Drop every outstanding lease, so that ``take`` goes on from the first gap."""
        self._leases = []
        self._busy = self._committed.copy()

    def num_windows(self, batch_size: int) -> int:
        """Windows of a whole epoch at ``batch_size`` samples each."""
        return -(-self.num_samples // batch_size)

    def free_gaps(self) -> Iterator[int]:
        """Sizes of the gaps of the epoch that ``take`` can still lease from, in its order."""
        if self._planning_epoch == self._epoch:
            for gap in self._busy.gaps(self.num_samples):
                yield len(gap)

    def state_dict(self) -> dict[str, Any]:
        """Committed progress as plain JSON types; leases are not part of it."""
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "epoch": self._epoch,
            "committed": self._committed.to_list(),
        }

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Whether ``state`` is of a data set of this size, with this seed."""
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
            committed = RangeSet.from_list(fields.items("committed"))
            _require_within(committed, self.num_samples)
        except (TypeError, ValueError, UsageError) as error:
            raise CheckpointError(
                f"the checkpoint's data cursor is damaged ({error}): resume from an older "
                "checkpoint"
            ) from error
        self._restore(epoch, committed)

    def restart(self) -> None:
        """Begin with the first epoch anew; outstanding leases are dropped."""
        self._restore(0, RangeSet())

    def _restore(self, epoch: int, committed: RangeSet) -> None:
        _require_within(committed, self.num_samples)
        if committed.total == self.num_samples:
            epoch, committed = epoch + 1, RangeSet()
        self._epoch = epoch
        self._planning_epoch = epoch
        self._committed = committed
        self._busy = committed.copy()
        self._leases = []


def _require_samples(num_samples: int) -> None:
    if num_samples < 1:
        raise DataError(
            f"the data set has {num_samples} samples: there is nothing to train on. "
            "Check its path and its filters"
        )


def _require_within(committed: RangeSet, num_samples: int) -> None:
    ranges = committed.to_list()
    if ranges and ranges[-1][1] > num_samples:
        raise UsageError(
            f"committed positions reach {ranges[-1][1]}, but the data set has {num_samples} samples"
        )
