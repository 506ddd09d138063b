"""``ddp.gather``: every rank gets the rows of all ranks, in the order of the data set."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evener.engine.engine import Engine
from evener.errors import CollectiveError, CollectiveMismatchError, UsageError
from evener.places import here
from evener.planning.evaluation_slices import Parts
from evener.protocol.row import pack, unpack

T = TypeVar("T")
#: A round of an evaluation, and how often a rank has called ``gather`` in it before.
Place = tuple[int, int]

#: What may travel; the same numbers on every rank, as all ranks run the same versions.
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
_OUTSIDE = -1  # the round of a call outside of any evaluation
_MOST_DIMENSIONS = 16
_GATHERING = "gathering rows (ddp.gather, or the end of an evaluation's loop)"


class _Offer(NamedTuple):
    """A rank's offer in an exchange of rows.

    Attributes:
        round: Where the rank is; -1 outside of any evaluation.
        turn: How often it has called ``gather`` in this round before.
        on_device: Whether its rows lie on an accelerator.
        dtype: Number of the dtype in ``_DTYPES``.
        shape: Of its rows; empty where it brings none, as it has come to the end of the loop.
    """

    round: int
    turn: int
    on_device: bool = False
    dtype: int = 0
    shape: tuple[int, ...] = ()

    @property
    def place(self) -> Place:
        """Return the line at which the rank is."""
        return self.round, self.turn

    @property
    def kind(self) -> tuple[int, tuple[int, ...]]:
        """Return what must be equal on all ranks: the dtype, and the shape without the rows."""
        return self.dtype, self.shape[1:]

    def __str__(self) -> str:
        if not self.shape:
            return "has come to the end of the evaluation's loop"
        sizes = ", ".join(str(size) for size in ("*", *self.shape[1:]))
        rows = f"rows of shape ({sizes}) and dtype {_DTYPES[self.dtype]}"
        if self.round == _OUTSIDE:
            return f"gathers {rows} outside of an evaluation's loop"
        return f"gathers {rows} as number {self.turn + 1} of round {self.round}"


@final
class EvaluationPass:
    """One rank's way through an evaluation's loop, and the rows that it has missed on it.

    Args:
        engine: Whose ranks evaluate.
        rounds: Samples of each rank that is present, by round; none outside of any evaluation.
        delivered: By rank, in the order of ``rounds``, how many rounds are over in which it has
            given its rows; kept up to date.
        in_training: Whether the loop was begun inside a training loop.
        echoes: Whether this rank has no samples, and comes by the calls of ``gather`` all the same.
    """

    def __init__(
        self,
        engine: Engine,
        rounds: Sequence[Parts],
        delivered: dict[int, int],
        *,
        in_training: bool,
        echoes: bool = False,
    ) -> None:
        self.in_training = in_training
        self._echoes = echoes
        self._engine = engine
        self._ranks = tuple(delivered)
        self._rounds, self._delivered = rounds, delivered
        self._round, self._turn = _OUTSIDE, 0
        #: By turn: the rows of rounds in which this rank had no batch, until its next call.
        self._gathered: dict[int, list[Tensor]] = {}

    def go_through(self) -> Iterator[None]:
        """Pause in each round in which this rank has a batch; all ranks call it together.

        A rank that has no batch in the last round takes part at the end in what others gather in
        it. Where all have one, that exchanges nothing.
        """
        place = self._ranks.index(self._engine.rounds.rank)
        for number, parts in enumerate(self._rounds):
            if parts[place] or self._echoes:
                self._round, self._turn = number, 0
                yield
        if self._rounds and 0 in self._rounds[-1]:
            self._meet((len(self._rounds), 0), None)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of this round, after those of rounds in which this rank had no batch."""
        round_, turn = self._round, self._turn
        if round_ != _OUTSIDE:
            self._turn += 1
        self._meet((round_, turn), rows[:0] if self._echoes else rows)
        *missed, gathered = parts = self._gathered.pop(turn)
        for before in missed:
            if (before.dtype, before.shape[1:]) != (gathered.dtype, gathered.shape[1:]):
                raise UsageError(
                    f"ddp.gather number {turn + 1} of round {round_} gets rows of shape "
                    f"{tuple(gathered.shape[1:])} and {gathered.dtype}; in a round before, in "
                    f"which rank {self._engine.rounds.rank} had no batch, they were of shape "
                    f"{tuple(before.shape[1:])} and {before.dtype}. Pad rows to one length for "
                    "the whole data set (torch.nn.functional.pad)"
                )
        return torch.cat(parts) if missed else gathered

    def _meet(self, place: Place, rows: Tensor | None) -> None:
        """Exchange rows with the others until they have come to this place, too."""
        own = _Offer(*place)
        if rows is not None:
            on_device = rows.device.type != "cpu"
            own = _Offer(*place, on_device, _DTYPES.index(rows.dtype), tuple(rows.shape))
        front = None
        while front != place:
            told = self._engine.collectives.ask(_GATHERING, pack(own))
            offers = {rank: unpack(_Offer, numbers) for rank, numbers in told.items()}
            front = min(offer.place for offer in offers.values())
            if not self._fits(front, offers):
                said = "; ".join(f"rank {rank} {offer}" for rank, offer in offers.items())
                raise CollectiveMismatchError(
                    f"ranks gather different rows: {said}. Remedy: in each round of the loop call "
                    "ddp.gather on all ranks equally often, in the same order, with the same dtype "
                    "and the same shape but for the first dimension (pad longer rows: "
                    "torch.nn.functional.pad), and leave the loop on all ranks in the same round"
                )
            self._gathered.setdefault(front[1], []).append(self._exchange(front, offers, rows))

    def _fits(self, front: Place, offers: Mapping[int, _Offer]) -> bool:
        """Return whether ranks ahead of others had no batch since, and rows are of one kind."""
        kinds = {offer.kind for offer in offers.values() if offer.place == front}
        first = front[0]
        return len(kinds) == 1 and all(
            first != _OUTSIDE
            and first < offer.place[0]
            and not any(self._has_part(rank, q) for q in range(first, offer.place[0]))
            for rank, offer in offers.items()
            if offer.place != front
        )

    def _has_part(self, rank: int, number: int) -> bool:
        return number < len(self._rounds) and self._rounds[number][self._ranks.index(rank)] > 0

    def _exchange(self, front: Place, offers: Mapping[int, _Offer], own: Tensor | None) -> Tensor:
        """Return the rows of all ranks that are at one place, in rank order.

        Args:
            front: This place.
            offers: Each rank's offer; the others offer nothing yet.
            own: This rank's rows; the result lies where they do, or with ``None`` on the model's
                device.
        """
        home = self._engine.flat.groups[0].data.device
        bringing = [offer for offer in offers.values() if offer.place == front]
        dtype, shape = bringing[0].kind
        counts = {
            rank: offer.shape[0] if offer.shape and offer.place == front else 0
            for rank, offer in offers.items()
        }
        # NCCL takes tensors of GPUs, and Gloo all others, so ranks must not differ in where theirs
        # lie.
        where = home if all(offer.on_device for offer in bringing) else torch.device("cpu")
        brought = own if offers[self._engine.rounds.rank].place == front else None
        ranks, rows = self._engine.collectives.gather_rows(
            brought, counts, shape, _DTYPES[dtype], where
        )
        if bringing[0].shape:
            self._note_delivered(front, ranks)
        return rows.to(home if own is None else own.device)

    def _note_delivered(self, front: Place, ranks: Collection[int]) -> None:
        """Note whose rows all ranks have, and what a rank has not given that was lost.

        Raises:
            CollectiveError: A rank was lost between two calls of one round.
        """
        (number, turn), engine = front, self._engine
        for rank in self._delivered.keys() - ranks:
            if self._delivered[rank] > number and self._has_part(rank, number):
                raise CollectiveError(
                    f"rank {rank} was lost in round {number} of an evaluation, before "
                    f"ddp.gather number {turn + 1}: what it has given to the calls before would "
                    "have no counterpart. Evaluate again"
                )
            if self._delivered[rank] <= number:
                engine.options.habits.tell_once(
                    f"rank {rank} was lost in an evaluation: in what ddp.gather returns, the rows "
                    "of its remaining samples come last, not in the order of the data set"
                )
        self._delivered.update(dict.fromkeys(self._delivered.keys() & ranks, number + 1))


@final
class Gatherer:
    """Knows whether this rank is in the loop of an evaluation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # first: outside of any
        self._passes = [EvaluationPass(engine, (), {}, in_training=False)]
        #: The window before which an evaluation has ended, and the ranks that have results of it.
        self._ended: tuple[int, frozenset[int]] = (-1, frozenset())

    def end(self, ranks: Iterable[int]) -> None:
        """Note the ranks that have results of the evaluation that has just ended."""
        self._ended = self._engine.window, frozenset(ranks)

    def check_complete(self, summed: Collection[int]) -> None:
        """Warn where a rank was lost after an evaluation and before its results were averaged."""
        engine, (window, ranks) = self._engine, self._ended
        lost = sorted(ranks.difference(summed))
        if lost and window == engine.window and not engine.generations.is_alone:
            self._ended = -1, frozenset()
            engine.options.habits.notice(
                f"rank {lost[0]} was lost after its part of an evaluation, and before the result "
                f"was averaged at {here()}: the average is that of the other ranks' samples"
            )

    def evaluate(
        self, rounds: Sequence[Parts], delivered: dict[int, int], *, echoes: bool
    ) -> Iterator[None]:
        """Go through an evaluation; see ``EvaluationPass``."""
        engine = self._engine
        in_training = engine.is_training
        current = EvaluationPass(engine, rounds, delivered, in_training=in_training, echoes=echoes)
        self._passes.append(current)
        try:
            yield from current.go_through()
        finally:
            self._passes.remove(current)

    def gather(self, value: T) -> T:
        """See ``Ddp.gather``."""
        # An iterator that a script holds on to keeps its pass open after the evaluation.
        allowed = self._passes[-1].in_training or self._engine.rounds.committing
        if self._engine.is_training and not allowed:
            raise UsageError(
                "ddp.gather inside a training loop, in which ranks run different numbers of "
                "iterations; gather in the loop of ddp.eval_loader, or average a number with "
                "ddp.weighted_mean in ddp.on_commit(fn) or after the epoch"
            )
        return tree_map(self._gather_tensor, value)  # type: ignore[no-any-return]

    def _gather_tensor(self, leaf: Any) -> Tensor:
        """Gather the rows of a tensor; a scalar is one row.

        Raises:
            UsageError: It is not a tensor, or of a kind that cannot be gathered.
        """
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"ddp.gather was given {leaf!r:.80} of type {type(leaf).__name__}; give tensors, "
                "or lists, tuples and dicts of them: torch.tensor(value) makes one of numbers, a "
                "tokenizer one of texts"
            )
        room = _MOST_DIMENSIONS
        if leaf.layout != torch.strided or leaf.dtype not in _DTYPES or leaf.dim() > room:
            raise UsageError(
                f"ddp.gather was given a tensor of layout {leaf.layout}, dtype {leaf.dtype} and "
                f"{leaf.dim()} dimensions; it gathers dense tensors of a plain dtype with up to "
                f"{room} dimensions: convert it, by .to_dense(), .float() or .flatten(1)"
            )
        return self._passes[-1].gather(leaf.detach().reshape(leaf.shape or (1,)))
