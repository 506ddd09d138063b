"""A loader for evaluation: every sample on one rank, once, with nothing trained."""

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, final

from evener.engine.engine import Engine
from evener.engine.loaders.facts import LikeDataLoader
from evener.engine.loaders.gathering import Gatherer
from evener.engine.loaders.intake import Intake
from evener.errors import UsageError
from evener.places import here
from evener.planning.evaluation_slices import Parts, evaluation_slices
from evener.protocol.formation import EVALUATING

_EVALUATING = "starting an evaluation (iterating over its loader)"
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

    In an elastic team all ranks meet at the end of the loop. What a rank had that was lost until
    then is handed out to those who remain, apart from rounds whose rows ``Ddp.gather`` has given to
    all. On a rank whose script is where the team has been before it joined, the loop's body runs
    for the first batch alone, so that what follows finds its names.

    Attributes:
        num_samples: Samples of the batch that was handed out last.
    """

    num_samples = 0

    def __init__(self, engine: Engine, gatherer: Gatherer, intake: Intake) -> None:
        super().__init__(intake)
        self.drop_last = False  # an evaluation leaves no sample out
        self.batch_size = intake.batch_size
        self._engine = engine
        self._gatherer = gatherer
        #: Positions that ranks have evaluated for themselves in the newest loop, by rank.
        self._held: dict[int, list[int]] = {}
        self._lost: tuple[int, ...] = ()
        #: Whether rows are gathered in the newest loop.
        self._gathers = False
        self._order = intake.order
        self._fetcher = intake.fetcher()
        # A loader made for one evaluation ends its workers with it.
        self._closing = weakref.finalize(self, self._fetcher.close)
        self._closing.atexit = False

    def __len__(self) -> int:
        """Return the batches of one process; each rank has some of them."""
        return -(-self._order.num_samples // self.batch_size)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return the same as iterating: an evaluation has one order."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of at most ``batch_size`` samples; all ranks call it together.

        Raises:
            CollectiveMismatchError: Some ranks do something else: evaluate in ``ddp.on_commit`` or
                after an epoch.
            UsageError: Ranks have data sets of different length or order.
        """
        engine, count = self._engine, self._order.num_samples
        if engine.generations.is_alone:
            yield from self._first_batch()
            return
        self._held, self._gathers = {}, False
        yield from self._evaluate(range(count))
        while engine.team.is_elastic and not self.is_complete(engine.collectives.ask(_EVALUATING)):
            yield from self.make_up()
        self._gatherer.end(self._held)

    def is_complete(self, ranks: Collection[int]) -> bool:
        """Return whether no other rank than these has evaluated something in the newest loop."""
        self._lost = tuple(rank for rank in self._held if rank not in ranks)
        return not self._lost

    def make_up(self) -> Iterator[Any]:
        """Yield batches of what ranks had that were lost; all ranks call it together.

        Call it after ``is_complete``, to which every rank has given the same ranks.
        """
        missed = [p for rank in self._lost for p in self._held.pop(rank)]
        yield from self._evaluate(missed)

    def _first_batch(self) -> Iterator[Any]:
        indices = self._order.of(0)
        first = [indices[p] for p in range(min(self.batch_size, self._order.num_samples))]
        if first:
            habits, rank = self._engine.options.habits, self._engine.rounds.rank
            habits.tell_once(
                f"the evaluation at {here()} was made before rank {rank} joined the "
                "team: its loop sees one batch here, and ddp.weighted_mean returns what the team "
                "has found"
            )
            yield self._received(self._fetcher.submit(0, first))

    def _evaluate(self, positions: Sequence[int]) -> Iterator[Any]:
        """Yield this rank's batches of some positions of the data set, in their order."""
        indices, engine = self._order.of(0), self._engine
        ranks, rounds = self._agree(len(positions), self._order.fingerprint(indices))
        parts: dict[int, list[Sequence[int]]] = {rank: [] for rank in ranks}
        start = 0
        for sizes in rounds:
            for rank, size in zip(ranks, sizes, strict=True):
                parts[rank].append(positions[start : start + size])
                start += size
        own = [part for part in parts[engine.rounds.rank] if part]
        # A rank without a sample has got rows in this loop before. It is given the last ones by the
        # same calls of gather, to which it comes by an echo of another rank's sample.
        echoes = self._gathers and not own
        own += [positions[:1]] * echoes
        wanted = (self._fetcher.submit(0, [indices[p] for p in part]) for part in own)
        fetched = deque(islice(wanted, _AHEAD))
        own_sizes = map(len, own)
        delivered = dict.fromkeys(ranks, 0)
        try:
            for _ in self._gatherer.evaluate(rounds, delivered, echoes=echoes):
                batch = self._received(fetched.popleft())
                fetched.extend(islice(wanted, 1))
                engine.team.membership.declare(EVALUATING, done=1)
                self.num_samples = next(own_sizes)
                yield batch
        finally:
            self._gathers = any(delivered.values())
            for rank in ranks:
                rest = [p for part in parts[rank][delivered[rank] :] for p in part]
                if rest:
                    self._held.setdefault(rank, []).extend(rest)

    def close(self) -> None:
        """End the fetching of data; idempotent."""
        self._closing()

    def _agree(self, count: int, fingerprint: int) -> tuple[list[int], list[Parts]]:
        """Return the ranks that evaluate, and their rounds, by the planner's speeds.

        Args:
            count: Samples that are evaluated.
            fingerprint: Of the order of the data set.

        Raises:
            UsageError: Ranks have different data.
        """
        engine = self._engine
        speeds = engine.policy.solo_speeds(self.batch_size)
        if not all(speed > 0 for speed in speeds):
            speeds = (1.0,) * engine.team.world_size
        rows = engine.collectives.ask(_EVALUATING, [count, fingerprint, self.batch_size, *speeds])
        for rank, (samples, order, *_) in rows.items():
            if samples != count:
                raise UsageError(
                    f"the data set for evaluation has {samples:.0f} samples on rank {rank} and "
                    f"{count} on rank {engine.rounds.rank}; give every rank all of it, "
                    "ddp.eval_loader splits it"
                )
            if order != fingerprint:
                raise UsageError(
                    f"the sampler for evaluation draws other samples on rank {rank} than on rank "
                    f"{engine.rounds.rank}; it must draw the same on every rank"
                )
        if 0 < count < len(rows):
            engine.options.habits.tell_once(
                f"an evaluation of {count} sample(s) on {len(rows)} ranks: the loop's body does "
                f"not run on the last {len(rows) - count}, which ddp.gather gives no rows; compute "
                f"what needs them on rank {next(iter(rows))}"
            )
        # Others may have been parked, and have missed windows. In an elastic team the first one
        # has planned; it may be lost by now, and others go by what it has said.
        known = rows[next(iter(rows)) if engine.team.is_elastic else engine.rounds.state.planner]
        sizes = [int(row[2]) for row in rows.values()]
        return [*rows], evaluation_slices(count, sizes, [known[3 + rank] for rank in rows])
