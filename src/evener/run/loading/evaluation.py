"""A loader for evaluation: every sample on one rank, once, with nothing trained."""

from collections import deque
from collections.abc import Iterator
from typing import Any, final

from evener.cadence.apportion import apportion
from evener.data.loader import Fetcher, Pending
from evener.run.loading.intake import Order
from evener.run.team.team import Meeting
from evener.run.windows.base import Engine

_AHEAD = 2  # micro-batches that are asked for before they are needed


@final
class EvaluationLoader:
    """Hands each rank a part of a data set, in proportion to its speed; no sample twice.

    Made by ``Ddp.eval_loader``. All ranks iterate over it together, and combine what
    they find with ``ddp.all_reduce(value, weight)``, which is exact however the parts differ.
    """

    def __init__(self, engine: Engine, fetcher: Fetcher, order: Order, *, batch_size: int) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._order = order
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Batches that one process would go through; each rank has some of them."""
        return -(-self._order.num_samples // self.batch_size)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """The same as iterating: an evaluation has one order."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of at most ``batch_size`` samples; all ranks call it together.

        Raises:
            CollectiveMismatchError: Some ranks do something else: evaluate in ``ddp.on_commit`` or
                after an epoch.
        """
        engine, rank = self._engine, self._engine.team.rank
        if engine.left:
            engine.settle()
        shares = apportion(self._order.num_samples, self._speeds())
        # Rank 0's word counts: arithmetic may round differently on another machine.
        rows, leaving = engine.team.meet(
            Meeting.EVALUATE,
            window=engine.window,
            leaving=int(engine.wants_stop()),
            payload=[float(share) for share in shares],
        )
        engine.stopping |= leaving > 0
        agreed = [int(share) for share in rows[0][: engine.team.world_size]]
        start = sum(agreed[:rank])
        indices = self._order.of(0)
        own = [indices[position] for position in range(start, start + agreed[rank])]
        waiting: deque[Pending] = deque()
        for first in range(0, len(own), self.batch_size):
            waiting.append(self._fetcher.submit(0, own[first : first + self.batch_size]))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        """Ends the fetching of data; idempotent."""
        self._fetcher.close()

    def _speeds(self) -> list[float]:
        team = self._engine.team
        speeds = list(self._engine.policy.solo_speeds(self.batch_size))
        if not all(speed > 0 for speed in speeds):
            speeds = [1.0] * team.world_size
        return [0.0 if rank in team.parked else speed for rank, speed in enumerate(speeds)]
