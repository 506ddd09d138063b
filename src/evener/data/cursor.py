"""One cursor over the data: every sample of an epoch exactly once, on whichever rank.

An epoch is one seeded permutation of the sample indices (``order.py``), of which only positions
count here. They are leased to windows and committed when their window is;
the state is ``(seed, epoch, committed ranges)`` and holds no rank count and no batch size, so a run
can resume with other numbers of both. Pure: no torch, no clock, no I/O.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.errors import CheckpointError, UsageError


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
        kind, text = (b"s", part.encode()) if isinstance(part, str) else (b"i", b"%d" % int(part))
        whole += b"%b%d:%b" % (kind, len(text), text)
    return int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little") >> 1


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
        ranges: Pairs of start and stop, such as those of ``to_list``.

    Attributes:
        total: How many numbers are in the set.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._ranges = [(start, stop) for start, stop in ranges]
        self.total = sum(stop - start for start, stop in self._ranges)

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``, of which nothing is in the set."""
        ranges = self._ranges
        self.total += stop - start
        first = last = bisect_left(ranges, (start, stop))
        if first > 0 and ranges[first - 1][1] == start:
            first -= 1
            start = ranges[first][0]
        if last < len(ranges) and ranges[last][0] == stop:
            stop = ranges[last][1]
            last += 1
        ranges[first:last] = [(start, stop)]

    def gaps(self, limit: int) -> list[range]:
        """Return the ranges of ``[0, limit)`` that are not in the set, which ends before."""
        starts = [0, *(stop for _, stop in self._ranges)]
        stops = [*(start for start, _ in self._ranges), limit]
        return [gap for gap in map(range, starts, stops) if gap]

    def to_list(self) -> list[list[int]]:
        """Return pairs of start and stop in ascending order, fit for JSON."""
        return [list(pair) for pair in self._ranges]


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
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = self._planning_epoch = 0
        self._committed = RangeSet()
        self.release()

    @property
    def leases(self) -> tuple[Slice, ...]:
        """What is taken and neither committed nor released, in the order it was taken."""
        return tuple(self._leases)

    def is_committed(self, epoch: int) -> bool:
        """Return whether nothing of ``epoch`` is left to do."""
        return epoch < self.epoch

    def begin(self, epoch: int, *, abandon: bool = False) -> bool:
        """Move planning to ``epoch``.

        An epoch that no rank has begun may be skipped; it then counts as committed.

        Args:
            epoch: The epoch.
            abandon: An earlier epoch that is partly done counts as committed, too.

        Returns:
            Whether there is anything to do in it: ``False`` for a committed epoch, from which
            ``take`` leases nothing.

        Raises:
            UsageError: An earlier epoch is partly done or has leases outstanding.
        """
        if epoch > self.epoch:
            if self._leases or (self._committed.total > 0 and not abandon):
                raise UsageError(
                    f"epoch {epoch} cannot begin: epoch {self.epoch} has "
                    f"{self._committed.total} of {self.num_samples} samples committed and "
                    f"{sum(lease.size for lease in self._leases)} under way. Run the loop over "
                    f"epoch {self.epoch} to its end first"
                )
            self._enter(epoch)
        self._planning_epoch = epoch
        return epoch == self.epoch

    def take(self, size: int) -> Slice | None:
        """Lease the next positions of the planning epoch, lowest gap first.

        Args:
            size: Most samples to lease; fewer come back at the end of the epoch or of a gap.

        Returns:
            The lease, or ``None`` when every position of the epoch is leased or committed.
        """
        if self._planning_epoch != self.epoch or not self._free:
            return None
        gap = self._free[0]
        lease = Slice(self.epoch, gap.start, min(size, len(gap)))
        self.lease(lease)
        return lease

    def lease(self, piece: Slice) -> None:
        """Lease exactly these positions, which another rank has taken.

        Raises:
            UsageError: Some of them are leased or committed.
        """
        for number, gap in enumerate(self._free):
            if gap.start <= piece.start and piece.stop <= gap.stop:
                rest = range(gap.start, piece.start), range(piece.stop, gap.stop)
                self._free[number : number + 1] = filter(None, rest)
                self._leases[piece] = None
                return
        raise UsageError(f"{piece} is leased or committed already: a sample would count twice")

    def commit(self, lease: Slice) -> None:
        """Turn a lease into committed positions; the last one of an epoch ends the epoch.

        Raises:
            KeyError: ``lease`` is not outstanding: committed before, released, or never taken.
        """
        del self._leases[lease]
        self._committed.add(lease.start, lease.stop)
        if self._committed.total == self.num_samples:
            self.epoch += 1
            self._committed = RangeSet()
            self.release()

    def release(self) -> None:
        """Drop every outstanding lease, so that ``take`` continues from the first gap."""
        #: Those that are outstanding, in the order in which they were taken.
        self._leases: dict[Slice, None] = {}
        #: What is neither leased nor committed.
        self._free = self._committed.gaps(self.num_samples)

    def num_windows(self, batch_size: int) -> int:
        """Windows of a whole epoch at ``batch_size`` samples each."""
        return -(-self.num_samples // batch_size)

    def free_gaps(self) -> Iterator[int]:
        """Sizes of the gaps of the epoch that ``take`` can still lease from, in its order."""
        return map(len, self._free if self._planning_epoch == self.epoch else ())

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
        """Continue from ``state``; outstanding leases are dropped.

        Raises:
            CheckpointError: The state is for another data set or seed.
        """
        if not self.is_of(state):
            raise CheckpointError(
                f"the checkpoint's data cursor has num_samples={state.get('num_samples')!r} and "
                f"seed={state.get('seed')!r}, this run has num_samples={self.num_samples} and "
                f"seed={self.seed}: to continue would repeat or miss samples. Use the data set and "
                "the seed of that run, start a new run, or begin this data again with "
                'ddp.load(path, allow=("data",))'
            )
        self._enter(state["epoch"], state["committed"])

    def restart(self) -> None:
        """Begin again with the first epoch; outstanding leases are dropped."""
        self._enter(0)

    def _enter(self, epoch: int, committed: Iterable[Sequence[int]] = ()) -> None:
        self.epoch = self._planning_epoch = epoch
        self._committed = RangeSet(committed)
        self.release()
