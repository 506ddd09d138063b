"""A loader for evaluation: every sample on one rank, once, with nothing trained."""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, final

from evener.data.loader import Fetcher, Pending
from evener.engine.engine import Engine
from evener.engine.loaders.facts import Described, LikeDataLoader
from evener.engine.loaders.gathering import Gatherer
from evener.engine.loaders.intake import Order
from evener.engine.team import Meeting
from evener.errors import UsageError
from evener.planning.rounds import Round, evaluation_rounds

_AHEAD = 3  # batches that are asked for before they are needed


@final
class EvaluationLoader(LikeDataLoader):
    """Hands out a data set in rounds, in each of which the ranks have batches side by side.

    Made by ``Ddp.eval_loader``. All ranks iterate over it together. A round is a slice of the data
    set; its parts follow in rank order, and are as large as ranks are fast. Speeds decide about
    the sizes alone: the samples of all rounds, joined in rank order, are the data set in its order.

    Every rank has a batch in each round, but for one at most: with tiny batches, the last round but
    one may have fewer samples than ranks. A rank without a batch continues in the last round,
    where ``Ddp.gather`` also returns the rows that it has missed. Only with fewer samples than
    ranks in all, the loop's body does not run on the last ranks; they take part in what the others
    gather before their loop ends.
    """

    def __init__(
        self,
        engine: Engine,
        gatherer: Gatherer,
        given: Described,
        fetcher: Fetcher,
        order: Order,
        *,
        batch_size: int,
    ) -> None:
        super().__init__(given)
        self.drop_last = False  # an evaluation leaves no sample out
        self._engine = engine
        self._gatherer = gatherer
        self._fetcher = fetcher
        # A loader made anew for each evaluation takes its workers with it.
        self._closing = weakref.finalize(self, fetcher.close)
        self._closing.atexit = False
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
            UsageError: Ranks have data sets of unlike length or order.
        """
        engine = self._engine
        if engine.left:
            engine.settle()
        indices = self._order.of(0)
        rounds = self._agree(self._order.fingerprint(indices))
        self._tell_of_few_samples()
        parts = _parts_of(rounds, engine.team.rank)
        wanted = (self._fetch([indices[p] for p in part]) for part in parts if part)
        fetched = deque(islice(wanted, _AHEAD))
        with self._gatherer.evaluating(rounds) as gathering:
            for number, part in enumerate(parts):
                if part:
                    gathering.begin(number)
                    batch = self._received(fetched.popleft())
                    fetched.extend(islice(wanted, 1))
                    yield batch
            gathering.finish()

    def close(self) -> None:
        """Ends the fetching of data; idempotent."""
        self._closing()

    def _fetch(self, indices: Sequence[int]) -> Pending:
        return self._fetcher.submit(0, indices)

    def _agree(self, fingerprint: int) -> list[Round]:
        """The rounds, the same on every rank; rank 0's speeds count.

        Raises:
            UsageError: Ranks have unlike data.
        """
        engine, team = self._engine, self._engine.team
        own = [self._order.num_samples, fingerprint, self.batch_size]
        rows, leaving = team.meet(
            Meeting.EVALUATE,
            window=engine.window,
            leaving=int(engine.wants_stop()),
            payload=[*map(float, own), *self._speeds()],
        )
        engine.stopping |= leaving > 0
        for rank, row in enumerate(rows):
            if rank in team.parked:
                continue
            if row[0] != own[0]:
                raise UsageError(
                    f"the data set for evaluation has {row[0]:.0f} samples on rank {rank} and "
                    f"{own[0]} on rank {team.rank}; give every rank all of it, ddp.eval_loader "
                    "splits it"
                )
            if row[1] != own[1]:
                raise UsageError(
                    f"the sampler for evaluation draws other samples on rank {rank} than on rank "
                    f"{team.rank}; it must draw the same on every rank"
                )
        batch_sizes = [max(1, int(row[2])) for row in rows]
        return evaluation_rounds(own[0], batch_sizes, rows[0][len(own) :][: team.world_size])

    def _tell_of_few_samples(self) -> None:
        count, team = self._order.num_samples, self._engine.team
        ranks = team.world_size - len(team.parked)
        if 0 < count < ranks:
            self._engine.options.habits.tell_once(
                f"an evaluation of {count} sample(s) on {ranks} ranks: the loop's body does not "
                f"run on the last {ranks - count}, which ddp.gather gives no rows; compute what "
                "needs them on rank 0 (ddp.is_main_process)"
            )

    def _speeds(self) -> list[float]:
        team = self._engine.team
        speeds = list(self._engine.policy.solo_speeds(self.batch_size))
        if not all(speed > 0 for speed in speeds):
            speeds = [1.0] * team.world_size
        return [0.0 if rank in team.parked else speed for rank, speed in enumerate(speeds)]


def _parts_of(rounds: Sequence[Round], rank: int) -> list[range]:
    """A rank's positions in each round."""
    parts, start = [], 0
    for sizes in rounds:
        first = start + sum(sizes[:rank])
        parts.append(range(first, first + sizes[rank]))
        start += sum(sizes)
    return parts
