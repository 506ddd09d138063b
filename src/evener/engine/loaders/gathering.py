"""``ddp.gather``: every rank gets the rows of all ranks, in the order of the data set."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evener.engine.answers import AskingEngine
from evener.errors import CollectiveError, CollectiveMismatchError, UsageError
from evener.places import here
from evener.protocol.row import Purpose

T = TypeVar("T")


def ask(engine: AskingEngine, purpose: Purpose, told: Any) -> dict[int, Any]:
    """Give every rank that is present the JSON of each one, by rank; all call it together.

    Raises:
        CollectiveMismatchError: Ranks came for different things.
    """
    engine.ask(purpose)
    return dict(engine.introduce([engine.rank, told]))


@dataclass(slots=True, eq=False)
class Place:
    """Where this rank is in the loop of an evaluation.

    Attributes:
        ranks: Ranks that evaluate.
        in_training: Whether the loop was begun inside a training loop.
        round: Number of the slice of the data set; -1 outside of any loop.
        is_shared: Whether all ranks have a batch in this round, so that they can exchange rows.
        is_echo: Whether the batch repeats a sample of another rank: its rows do not count.
        is_last: Whether it is the last batch of this rank's part of the round.
        call: How often ``gather`` was called for the batch.
        kept: Rows of earlier batches of the part, by call.
        given: Ranks whose rows of this round all ranks have.
    """

    ranks: frozenset[int] = frozenset()
    in_training: bool = False
    round: int = -1
    is_shared: bool = True
    is_echo: bool = False
    is_last: bool = True
    call: int = 0
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    given: frozenset[int] = frozenset()

    def describe(self, call: int, dtype: str, row: Iterable[int]) -> str:
        """Return what a rank gathers here, for people."""
        sizes = ", ".join(map(str, ("*", *row)))
        where = f"number {call + 1} of round {self.round}"
        where = f"as {where}" if self.round >= 0 else "outside of an evaluation's loop"
        return f"gathers rows of shape ({sizes}) and dtype {dtype} {where}"

    def end_round(self) -> None:
        """Check that the rows of all batches have been exchanged.

        Raises:
            CollectiveMismatchError: ``gather`` was called more often for an earlier batch.
        """
        if self.kept:
            raise CollectiveMismatchError(
                f"ddp.gather was called {self.call} times for the last batch of round "
                f"{self.round}, and {max(self.kept) + 1} times for a batch before; call it "
                "equally often for each batch of the loop"
            )

    def note_given(self, call: int, ranks: Collection[int]) -> None:
        """Note the ranks whose rows of a call all ranks have.

        Raises:
            CollectiveError: A rank was lost between two calls of one round.
        """
        if call == 0:
            self.given = frozenset(ranks)
        for rank in self.given.difference(ranks):
            raise CollectiveError(
                f"rank {rank} was lost in round {self.round} of an evaluation, before ddp.gather "
                f"number {call + 1}: what it has given to the calls before would have no "
                "counterpart. Evaluate again"
            )


@final
class Gatherer:
    """Exchanges rows of all ranks, in the loop of an evaluation and outside."""

    def __init__(self, engine: AskingEngine) -> None:
        self._engine = engine
        #: Of the loops that are not over, the innermost one last.
        self._places: list[Place] = []
        #: The window before which an evaluation has ended, and the ranks that have results of it.
        self._ended: tuple[int, frozenset[int]] = (-1, frozenset())

    @contextmanager
    def in_loop(self, place: Place) -> Iterator[None]:
        """Exchange rows of this place, in a ``with`` block."""
        self._places.append(place)
        try:
            yield
        finally:
            self._places.remove(place)

    def end(self, ranks: Iterable[int]) -> None:
        """Note the ranks that have results of the evaluation that has just ended."""
        self._ended = self._engine.window, frozenset(ranks)

    def check_complete(self) -> None:
        """Warn where a rank was lost after an evaluation and before its results were averaged."""
        engine, (window, ranks) = self._engine, self._ended
        lost = sorted(ranks - engine.summed_ranks)
        if lost and window == engine.window and not engine.is_alone:
            self._ended = -1, frozenset()
            engine.habits.notice(
                f"rank {lost[0]} was lost after its part of an evaluation, and before the result "
                f"was averaged at {here()}: the average is that of the other ranks' samples"
            )

    def gather(self, value: T) -> T:
        """See ``Ddp.gather``."""
        # An iterator that a script holds on to is no reason to gather in a training loop.
        place = self._places[-1] if self._places else Place()
        if self._engine.is_training and not (self._engine.committing or place.in_training):
            raise UsageError(
                "ddp.gather inside a training loop, in which ranks run different numbers of "
                "iterations; gather in the loop of ddp.eval_loader, or average a number with "
                "ddp.weighted_mean in ddp.on_commit(fn) or after the epoch"
            )
        return tree_map(partial(self._gather_tensor, place), value)  # type: ignore[no-any-return]

    def _gather_tensor(self, place: Place, leaf: Any) -> Tensor:
        """Gather the rows of a tensor; a scalar is one row.

        Raises:
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
        return self._exchange(place, call, own) if place.is_shared else own

    def _exchange(self, place: Place, call: int, own: Tensor) -> Tensor:
        """Return the rows of all ranks in rank order, on the device of this rank's.

        Raises:
            CollectiveMismatchError: Ranks are not at the same call, or have rows of another kind.
        """
        engine = self._engine
        kind = [place.round, call, str(own.dtype), [*own.shape[1:]]]
        told = ask(engine, Purpose.GATHER, [kind, len(own), own.device.type != "cpu"])
        if any(other != kind for other, *_ in told.values()):
            said = "; ".join(
                f"rank {rank} {Place(round=number).describe(*rest)}"
                for rank, ((number, *rest), *_) in told.items()
            )
            raise CollectiveMismatchError(
                f"ranks gather different rows: {said}. Remedy: in each round of the loop call "
                "ddp.gather on all ranks equally often, in the same order, with the same dtype "
                "and the same shape but for the first dimension (pad longer rows: "
                "torch.nn.functional.pad), and leave the loop on all ranks in the same round"
            )
        counts = {rank: count for rank, (_, count, _) in told.items()}
        # NCCL takes tensors of GPUs, and Gloo all others, so ranks must not differ in where theirs
        # lie.
        on_device = all(on_device for *_, on_device in told.values())
        where = engine.device if on_device else torch.device("cpu")
        ranks, rows = engine.gather_rows(own, counts, own.shape[1:], own.dtype, where)
        place.note_given(call, ranks)
        for rank in place.ranks.difference(ranks):
            engine.habits.tell_once(
                f"rank {rank} was lost in an evaluation: in what ddp.gather returns, the rows of "
                "its remaining samples come last, not in the order of the data set"
            )
        return rows.to(own.device)
