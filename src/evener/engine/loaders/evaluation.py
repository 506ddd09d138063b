"""A loader for evaluation: every sample on one rank, once, with nothing trained."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, final

from evener.engine.answers import AskingEngine
from evener.engine.loaders.base import LikeDataLoader
from evener.engine.loaders.gathering import Gatherer, Place, ask
from evener.engine.loaders.intake import Intake, compare_orders, fingerprint
from evener.errors import CollectiveMismatchError
from evener.planning.evaluation_slices import Parts, evaluation_slices
from evener.protocol.formation import EVALUATING
from evener.protocol.row import Purpose

_AHEAD = 3  # batches that are asked for before they are needed


@final
class EvaluationLoader(LikeDataLoader):
    """Hands out a data set in rounds, in each of which every rank has a part of a slice.

    Made by ``Ddp.eval_loader``. All ranks iterate over it together. The parts of a slice follow in
    rank order, and are as large as ranks are fast; see ``evaluation_slices``. A part is one batch.
    Only the last one may be two, with tiny batches, and the rows of both are gathered with the
    second.

    If there are fewer samples than ranks, the first rank evaluates them all. The loop's body does
    not run on the others, and ``Ddp.gather`` returns the first rank's own rows.

    In an elastic team all ranks meet at the end of the loop. What a rank had that was lost until
    then is handed out to those who remain, apart from rounds whose rows ``Ddp.gather`` has given to
    all. On a rank whose script is where the team has been before it joined, the loop's body runs
    for the first batch alone, so that what follows finds its names.

    Attributes:
        num_samples: Samples of the batch that was handed out last.
    """

    num_samples = 0
    batch_size: int

    def __init__(self, engine: AskingEngine, gatherer: Gatherer, intake: Intake) -> None:
        super().__init__(intake)
        self.drop_last = False  # an evaluation leaves no sample out
        self._engine = engine
        self._gatherer = gatherer
        #: Positions that ranks have evaluated for themselves in the newest loop, by rank.
        self._held: dict[int, list[Sequence[int]]] = {}
        #: Whether rows are gathered in the newest loop.
        self._gathers = False
        self._order = intake.order
        self._fetcher = intake.fetcher()

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
        self._held, self._gathers = {}, False
        batches: Iterator[Any] | None = self._evaluate(
            range(min(count, self.batch_size) if engine.is_alone else count)
        )
        while batches is not None:
            yield from batches
            is_elastic = engine.team.is_elastic
            batches = self.make_up(ask(engine, Purpose.EVALUATE, None)) if is_elastic else None
        self._gatherer.end(self._held)

    def make_up(self, ranks: Collection[int]) -> Iterator[Any] | None:
        """Return batches of what other ranks have evaluated in the newest loop, and were lost.

        All ranks call it together, and iterate over them.

        Args:
            ranks: Those that are present, the same on every rank.

        Returns:
            The batches; ``None`` if nothing is lost.
        """
        lost = sorted(set(self._held).difference(ranks))
        if not lost:
            return None
        if self._gathers:
            self._engine.habits.tell_once(
                f"rank {lost[0]} was lost in an evaluation: in what ddp.gather returns, the rows "
                "of its remaining samples come last, not in the order of the data set"
            )
        return self._evaluate([p for rank in lost for part in self._held.pop(rank) for p in part])

    def _evaluate(self, positions: Sequence[int]) -> Iterator[Any]:
        """Yield this rank's batches of some positions of the data set, in their order."""
        engine, size, indices = self._engine, self.batch_size, self._order.of(0)
        num_ranks, rounds = self._agree(positions, fingerprint(indices))
        # Fewer samples than ranks are the first one's. Where rows are gathered, the others come by
        # the same calls of gather, with an echo of a sample.
        echo = positions[:1] if self._gathers else ()
        parts = [by_rank.get(engine.rank, echo) for by_rank in rounds]
        batches = [[part[k : k + size] for k in range(0, len(part), size)] for part in parts]
        place = Place(
            in_training=engine.is_training,
            is_shared=self._gathers or len(positions) >= num_ranks,
            is_echo=not any(engine.rank in by_rank for by_rank in rounds),
        )
        wanted = (
            self._fetcher.submit(0, [indices[p] for p in batch]) for own in batches for batch in own
        )
        fetched = deque(islice(wanted, _AHEAD))
        with self._gatherer.in_loop(place):
            for number, (by_rank, own) in enumerate(zip(rounds, batches, strict=True)):
                place.name, place.given = f"round {number}", frozenset()
                for batch in own:
                    data = self._received(fetched.popleft())
                    fetched.extend(islice(wanted, 1))
                    engine.team.declare(EVALUATING, done=1)
                    place.call, place.is_last = 0, batch is own[-1]
                    self.num_samples = len(batch)
                    yield data
                if place.kept:
                    raise CollectiveMismatchError(
                        f"ddp.gather was called {place.call} times for the last batch of "
                        f"{place.name}, and {max(place.kept) + 1} times for a batch before; call "
                        "it equally often for each batch of the loop"
                    )
                self._gathers |= bool(place.given)
                for rank in by_rank.keys() - place.given:
                    self._held.setdefault(rank, []).append(by_rank[rank])

    def close(self) -> None:
        """End the fetching of data; idempotent."""
        self._fetcher.close()

    def _agree(self, positions: Sequence[int], order: int) -> tuple[int, list[Parts]]:
        """Return how many ranks evaluate, and the parts of each in all rounds.

        Args:
            positions: What is evaluated.
            order: Fingerprint of the order of the data set.

        Raises:
            UsageError: Ranks have different data.
        """
        engine, count = self._engine, len(positions)
        own = [[count, order], self.batch_size, [*engine.policy.solo_speeds(self.batch_size)]]
        told = ask(engine, Purpose.EVALUATE, own)
        compare_orders({rank: other for rank, (other, *_) in told.items()}, engine.rank)
        first = min(told)
        if 0 < count < len(told) and not self._gathers:
            engine.habits.tell_once(
                f"an evaluation of {count} sample(s) on {len(told)} ranks: rank {first} does it "
                "alone, the loop's body does not run on the others"
            )
        # Those of one rank: others may have been parked, and have missed windows.
        *_, known = told[first]
        is_known = all(known[rank] > 0 for rank in told)
        speeds = {rank: known[rank] if is_known else 1.0 for rank in told}
        sizes = {rank: size for rank, (_, size, _) in told.items()}
        return len(told), evaluation_slices(positions, sizes, speeds)
