"""Evaluation by all ranks: each sample on one of them, once; ``ddp.gather`` collects the rows."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, tee
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evener.engine.engine import Engine
from evener.engine.loaders.dataset_arguments import (
    DatasetArguments,
    LikeDataLoader,
    compare_orders,
    fingerprint,
)
from evener.errors import CollectiveError, CollectiveMismatchError, UsageError
from evener.places import here
from evener.planning.evaluation_slices import Parts, evaluation_slices
from evener.protocol.formation import EVALUATING

T = TypeVar("T")

_GATHERING = "gathering rows (ddp.gather)"
_EVALUATING = "starting an evaluation (iterating over its loader)"
_AHEAD = 3  # batches that are asked for before they are needed


@dataclass(slots=True, eq=False)
class EvaluationPlace:
    """Where this rank is in the loop of an evaluation.

    Attributes:
        name: Which round it is.
        in_training: Whether the loop was begun inside a training loop.
        is_shared: Whether all ranks have a batch in this round, so that they can exchange rows.
        is_echo: Whether the batch repeats a sample of another rank: its rows do not count.
        is_last: Whether it is the last batch of this rank's part of the round.
        call: How often ``gather`` was called for the batch.
        kept: Rows of earlier batches of the part, by call.
        given: Ranks whose rows of this round all ranks have.
    """

    name: str = "outside of an evaluation"
    in_training: bool = False
    is_shared: bool = True
    is_echo: bool = False
    is_last: bool = True
    call: int = 0
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    given: frozenset[int] = frozenset()


@final
class Gatherer:
    """Exchanges rows of all ranks, in the loop of an evaluation and outside."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Of the loops that are not over, the innermost one last.
        self._places: list[EvaluationPlace] = []
        #: The window before which an evaluation has ended, and the ranks that have results of it.
        self._ended: tuple[int, frozenset[int]] = (-1, frozenset())

    @contextmanager
    def in_loop(self, place: EvaluationPlace) -> Iterator[None]:
        """Exchange rows of this place, in a ``with`` block."""
        self._places.append(place)
        try:
            yield
        finally:
            self._places.remove(place)

    def end(self, ranks: Iterable[int]) -> None:
        """Note the ranks that have results of the evaluation that has just ended."""
        self._ended = self._engine.window, frozenset(ranks)

    def check_complete(self, averaged: Collection[int]) -> None:
        """Warn where a rank was lost after an evaluation and before its results were averaged.

        Args:
            averaged: Ranks whose results were averaged.
        """
        engine, (window, ranks) = self._engine, self._ended
        lost = sorted(ranks.difference(averaged))
        if lost and window == engine.window and not engine.generations.is_alone:
            self._ended = -1, frozenset()
            engine.options.guards.notice(
                f"rank {lost[0]} was lost after its part of an evaluation, and before the result "
                f"was averaged at {here()}: the average is that of the other ranks' samples"
            )

    def gather(self, value: T) -> T:
        """See ``Ddp.gather``."""
        # An iterator that a script holds on to is no reason to gather in a training loop.
        place = self._places[-1] if self._places else EvaluationPlace()
        if self._engine.is_training and not (self._engine.rounds.committing or place.in_training):
            raise UsageError(
                "ddp.gather inside a training loop, in which ranks run different numbers of "
                "iterations; gather in the loop of ddp.eval_loader, or average a number with "
                "ddp.weighted_mean in ddp.on_commit(fn) or after the epoch"
            )
        return tree_map(partial(self._gather_tensor, place), value)  # type: ignore[no-any-return]

    def _gather_tensor(self, place: EvaluationPlace, leaf: Any) -> Tensor:
        """Gather the rows of a tensor; a scalar is one row.

        Raises:
            CollectiveError: A rank was lost between two calls of one round.
            UsageError: It is not a dense tensor.
        """
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            raise UsageError(
                f"ddp.gather was given {leaf!r:.80} of type {type(leaf).__name__}; give dense "
                "tensors, or lists, tuples and dicts of them: torch.tensor(value) makes one of "
                "numbers, a tokenizer one of texts, .to_dense() one of a sparse tensor"
            )
        rows = leaf.detach().reshape(leaf.shape or (1,))[: 0 if place.is_echo else None]
        call, place.call = place.call, place.call + 1
        place.kept.setdefault(call, []).append(rows)
        if not place.is_last:  # they travel with those of the last batch of this part
            return rows[:0]
        own = torch.cat(place.kept.pop(call))
        if not place.is_shared:
            return own
        ranks, gathered = self._exchange(own, f"{place.name}, number {call + 1}")
        if call == 0:
            place.given = frozenset(ranks)
        for rank in place.given.difference(ranks):
            raise CollectiveError(
                f"rank {rank} was lost in {place.name} of an evaluation, before ddp.gather number "
                f"{call + 1}: what it has given to the calls before would have no counterpart. "
                "Evaluate again"
            )
        return gathered

    def _exchange(self, own: Tensor, where: str) -> tuple[tuple[int, ...], Tensor]:
        """Return the ranks that are present, and their rows in rank order.

        Raises:
            CollectiveMismatchError: Ranks are not at the same call, or have rows of another kind.
        """
        engine, sizes = self._engine, ", ".join(map(str, ("*", *own.shape[1:])))
        kind = f"rows of shape ({sizes}) and dtype {own.dtype} ({where})"
        gathered = engine.collectives.ask(_GATHERING, [kind, len(own), own.device.type != "cpu"])
        if any(other != kind for other, *_ in gathered.values()):
            kinds = "; ".join(
                f"rank {rank} gathers {kind}" for rank, (kind, *_) in gathered.items()
            )
            raise CollectiveMismatchError(
                f"ranks gather different rows: {kinds}. Remedy: in each round of the loop call "
                "ddp.gather on all ranks the same number of times, in the same order, with one "
                "dtype and one shape, except for the first dimension (pad longer rows: "
                "torch.nn.functional.pad), and leave the loop on all ranks in the same round"
            )
        counts = {rank: count for rank, (_, count, _) in gathered.items()}
        # NCCL takes tensors of GPUs, and Gloo all others, so ranks must not differ in where theirs
        # lie.
        on_device = all(on_device for *_, on_device in gathered.values())
        device = engine.flat.groups[0].data.device if on_device else torch.device("cpu")
        ranks, rows = engine.collectives.gather_rows(own, counts, own.shape[1:], own.dtype, device)
        return ranks, rows.to(own.device)


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

    def __init__(self, engine: Engine, gatherer: Gatherer, arguments: DatasetArguments) -> None:
        super().__init__(arguments)
        self.drop_last = False  # an evaluation leaves no sample out
        self._engine = engine
        self._gatherer = gatherer
        #: Positions that ranks have evaluated for themselves in the newest loop, by rank.
        self._held: dict[int, list[Sequence[int]]] = {}
        #: Whether rows are gathered in the newest loop.
        self._gathers = False
        self._arguments = arguments
        self._fetcher = arguments.fetcher()

    def __len__(self) -> int:
        """Return the batches of one process; each rank has some of them."""
        return -(-self._arguments.num_samples // self.batch_size)

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
        engine, count = self._engine, self._arguments.num_samples
        self._held, self._gathers = {}, False
        batches: Iterator[Any] | None = self._evaluate(
            range(min(count, self.batch_size) if engine.generations.is_alone else count)
        )
        while batches is not None:
            yield from batches
            is_elastic = engine.team.is_elastic
            batches = (
                self.make_up(engine.collectives.ask(_EVALUATING, None)) if is_elastic else None
            )
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
            self._engine.options.guards.warn_once(
                f"rank {lost[0]} was lost in an evaluation: in what ddp.gather returns, the rows "
                "of its remaining samples come last, not in the order of the data set"
            )
        return self._evaluate([p for rank in lost for part in self._held.pop(rank) for p in part])

    def _evaluate(self, positions: Sequence[int]) -> Iterator[Any]:
        """Yield this rank's batches of some positions of the data set, in their order."""
        engine, indices = self._engine, self._arguments.order(0)
        ranks, slices = self._agree(positions, fingerprint(indices))
        rounds, ahead = tee(slices)
        place = EvaluationPlace(in_training=engine.is_training)
        echo: Sequence[int] = ()
        if len(positions) < len(ranks):  # all are the first rank's
            place.is_shared, place.is_echo = self._gathers, engine.rounds.rank != ranks[0]
            # The others come by its calls of gather, with an echo of a sample.
            echo = positions[:1] if self._gathers else ()
        wanted = (
            self._fetcher.submit(0, [indices[p] for p in batch])
            for parts in ahead
            for batch in self._cut(parts.get(engine.rounds.rank, echo))
        )
        fetched = deque(islice(wanted, _AHEAD))
        with self._gatherer.in_loop(place):
            for number, parts in enumerate(rounds):
                place.name, place.given = f"round {number}", frozenset()
                own = self._cut(parts.get(engine.rounds.rank, echo))
                for batch in own:
                    data = self._received(fetched.popleft())
                    fetched.extend(islice(wanted, 1))
                    engine.team.membership.declare(EVALUATING, done=1)
                    place.call, place.is_last = 0, batch is own[-1]
                    self.num_samples = len(batch)
                    yield data
                if place.kept:
                    raise CollectiveMismatchError(
                        f"ddp.gather was called {place.call} times for the last batch of "
                        f"{place.name}, and {max(place.kept) + 1} times for a batch before; call "
                        "it the same number of times for each batch of the loop"
                    )
                self._gathers |= bool(place.given)
                for rank in parts.keys() - place.given:
                    self._held.setdefault(rank, []).append(parts[rank])

    def close(self) -> None:
        """End the fetching of data; idempotent."""
        self._fetcher.close()

    def _cut(self, part: Sequence[int]) -> list[Sequence[int]]:
        """Return the batches of this rank's part of a round."""
        return [part[k : k + self.batch_size] for k in range(0, len(part), self.batch_size)]

    def _agree(self, positions: Sequence[int], order: int) -> tuple[list[int], Iterator[Parts]]:
        """Return the ranks that evaluate, and the parts of each in all rounds.

        Args:
            positions: What is evaluated.
            order: Fingerprint of the order of the data set.

        Raises:
            UsageError: Ranks have different data.
        """
        engine, count = self._engine, len(positions)
        own = [[count, order], self.batch_size, [*engine.policy.solo_speeds(self.batch_size)]]
        gathered = engine.collectives.ask(_EVALUATING, own)
        compare_orders({rank: other for rank, (other, *_) in gathered.items()}, engine.rounds.rank)
        ranks = [*gathered]
        if 0 < count < len(ranks) and not self._gathers:
            engine.options.guards.warn_once(
                f"an evaluation of {count} sample(s) on {len(ranks)} ranks: rank {ranks[0]} does "
                "it alone, the loop's body does not run on the others"
            )
        # Those of one rank: others may have been parked, and have missed windows.
        *_, known = gathered[ranks[0]]
        is_known = all(known[rank] > 0 for rank in ranks)
        speeds = {rank: known[rank] if is_known else 1.0 for rank in ranks}
        sizes = {rank: size for rank, (_, size, _) in gathered.items()}
        return ranks, evaluation_slices(positions, sizes, speeds)
