"""``ddp.gather``: every rank gets the rows of all ranks, in the order of the data set."""

from collections.abc import Iterable, Iterator
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
        told = ask(engine, Purpose.GATHER, [kind, len(own), own.device.type != "cpu"])
        if any(other != kind for other, *_ in told.values()):
            said = "; ".join(f"rank {rank} gathers {kind}" for rank, (kind, *_) in told.items())
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
        device = engine.device if on_device else torch.device("cpu")
        ranks, rows = engine.gather_rows(own, counts, own.shape[1:], own.dtype, device)
        return ranks, rows.to(own.device)
