"""Queues of batches, one a rank: what is handed out, done, handed on. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from evener.data.cursor import Cursor, Slice
from evener.errors import ProtocolError


class LeaseBook:
    """Which rank holds which batches of the epoch.

    A batch is the samples of one local step, and is done as a whole. Every rank keeps an equal book
    and drives it with the same numbers. A rank works through its queue from the front; what it has
    done is a prefix, which is *retired* when a window closes. Queues are filled up at the back,
    ahead of need. Batches are handed on only on request: at the tail of an epoch.

    Args:
        cursor: Where the team is in the epoch; its outstanding leases are released first.
        batch_size: Samples of a batch; fewer at the end of the epoch or of a gap.
        ranks: Their numbers.
        avoid_ones: Make no batch of a single sample where it can go into the one before: layers
            with batch statistics refuse it.
    """

    def __init__(
        self, cursor: Cursor, batch_size: int, ranks: Iterable[int], *, avoid_ones: bool = False
    ) -> None:
        cursor.release()
        self._avoid_ones = avoid_ones and batch_size > 1
        self.cursor = cursor
        self.batch_size = batch_size
        self._queues: dict[int, deque[Slice]] = {rank: deque() for rank in ranks}

    @property
    def num_left(self) -> int:
        """Batches of the epoch that are not retired."""
        return self.num_free + sum(map(len, self._queues.values()))

    @property
    def num_free(self) -> int:
        """Batches that are in no queue so far."""
        free = 0
        for gap in self.cursor.free_gaps():
            whole, rest = divmod(gap, self.batch_size)
            free += whole + (rest > (1 if self._avoid_ones and whole else 0))
        return free

    def queue(self, rank: int) -> tuple[Slice, ...]:
        """Return the batches of a rank, in the order in which it does them."""
        return tuple(self._queues[rank])

    def retire(self, rank: int, num_batches: int, num_samples: int) -> list[Slice]:
        """Take what a rank has done off the front of its queue.

        Returns:
            The leases, to be committed once that is known to be applied everywhere.

        Raises:
            ProtocolError: The rank has done other work than it was given.
        """
        queue = self._queues[rank]
        done = [queue.popleft() for _ in range(min(num_batches, len(queue)))]
        held = sum(piece.size for piece in done)
        if held != num_samples:
            raise ProtocolError(
                f"rank {rank} has done {num_batches} batches with {num_samples} samples, and its "
                f"queue held {held}; ranks run different code, or this is a bug of evener"
            )
        return done

    def fill(self, sizes: Sequence[int], *, hand_on: bool = False) -> None:
        """Fill queues up, evenly, as long as there is something to hand out.

        Args:
            sizes: Batches that each queue should hold, by rank.
            hand_on: Take the back of longer queues away first, and give it to others. What then
                fits nowhere is shared out all the same.
        """
        spare: deque[Slice] = deque()
        if hand_on:
            for rank, queue in self._queues.items():
                while len(queue) > sizes[rank]:
                    spare.appendleft(queue.pop())
        heap = [self._need(rank, sizes) for rank in self._queues]
        heapify(heap)
        while heap:
            is_full, _, rank = heappop(heap)
            if is_full and not spare:
                return
            piece = spare.popleft() if spare else self._take()
            if piece is None:
                return
            self._queues[rank].append(piece)
            heappush(heap, self._need(rank, sizes))

    def _take(self) -> Slice | None:
        gap = next(self.cursor.free_gaps(), 0)
        one_over = self._avoid_ones and gap == self.batch_size + 1
        return self.cursor.take(self.batch_size + one_over)

    def _need(self, rank: int, sizes: Sequence[int]) -> tuple[bool, float, int]:
        """Return a key by which the emptiest queue for its size comes first, and full ones last."""
        held, size = len(self._queues[rank]), sizes[rank]
        return held >= size, held / max(1, size), rank
