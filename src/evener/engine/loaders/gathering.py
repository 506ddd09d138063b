"""``ddp.gather``: every rank gets the rows of all ranks, in the order of the data set."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self, TypeVar, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evener.engine.engine import Engine
from evener.engine.team import Meeting
from evener.errors import CollectiveMismatchError, UsageError
from evener.planning.rounds import Round

T = TypeVar("T")

#: What may travel; the same numbers on every rank, as all ranks run the same versions.
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
_OUTSIDE = -1  # the round of a call outside of any evaluation


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank brings to a meeting.

    Attributes:
        round: In which round of the evaluation it is.
        turn: How often it has called ``gather`` in this round before.
        on_device: Whether its rows lie on an accelerator.
        dtype: Number of the dtype in ``_DTYPES``.
        shape: Of its rows; empty where it brings none, as it has come to the end of the loop.
    """

    round: int
    turn: int
    on_device: bool
    dtype: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, place: tuple[int, int], rows: Tensor | None) -> Self:
        if rows is None:
            return cls(*place, False, 0, ())
        on_device = rows.device.type != "cpu"
        return cls(*place, on_device, _DTYPES.index(rows.dtype), tuple(rows.shape))

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> Self:
        round_, turn, on_device, dtype, dimensions, *shape = (int(n) for n in numbers)
        return cls(round_, turn, bool(on_device), dtype, tuple(shape[:dimensions]))

    def encode(self) -> list[float]:
        head = (self.round, self.turn, self.on_device, self.dtype, len(self.shape))
        return [float(n) for n in (*head, *self.shape)]

    @property
    def place(self) -> tuple[int, int]:
        return self.round, self.turn

    @property
    def kind(self) -> tuple[int, tuple[int, ...]]:
        """What must be the same on all ranks: dtype, and all of the shape but the rows."""
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

    Attributes:
        in_training: Whether that loop was begun inside a training loop.
    """

    def __init__(self, engine: Engine, rounds: Sequence[Round]) -> None:
        self.in_training = _is_training(engine)
        self._engine = engine
        self._rounds = rounds
        self._round = self._turn = 0
        #: Rows of rounds in which this rank had no batch, by turn: its next call returns them.
        self._missed: dict[int, list[Tensor]] = {}

    def begin(self, number: int) -> None:
        """Comes to a round."""
        self._round, self._turn = number, 0

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows of this round, after those of rounds in which this rank had no batch."""
        place = (self._round, self._turn)
        self._turn += 1
        gathered = self._meet(place, rows)
        missed = self._missed.pop(place[1], [])
        for before in missed:
            if (before.dtype, before.shape[1:]) != (gathered.dtype, gathered.shape[1:]):
                raise UsageError(
                    f"ddp.gather number {place[1] + 1} of round {place[0]} gets rows of shape "
                    f"{tuple(gathered.shape[1:])} and {gathered.dtype}; in a round before, in "
                    f"which rank {self._engine.team.rank} had no batch, they were of shape "
                    f"{tuple(before.shape[1:])} and {before.dtype}. Pad rows to one length for "
                    "the whole data set (torch.nn.functional.pad)"
                )
        return torch.cat([*missed, gathered]) if missed else gathered

    def finish(self) -> None:
        """Takes part in what others gather in a last round in which some rank has no batch.

        All ranks call it together; where all had a batch, it exchanges nothing.
        """
        absent = self._engine.team.parked
        last = self._rounds[-1] if self._rounds else ()
        if any(part == 0 for rank, part in enumerate(last) if rank not in absent):
            self._meet((len(self._rounds), 0), None)

    def _meet(self, place: tuple[int, int], rows: Tensor | None) -> Tensor:
        """Meets the others until they have come to this place, too."""
        while True:
            offers = _exchange_offers(self._engine, _Offer.of(place, rows))
            front = min(offer.place for offer in offers.values())
            behind = {
                rank: offer
                for rank, offer in offers.items()
                if offer.place != front and not self._may_skip(rank, front, offer)
            }
            if behind or len({o.kind for o in offers.values() if o.place == front}) > 1:
                _refuse(offers)
            if front == place:
                return _exchange_rows(self._engine, offers, front, rows)
            missed = _exchange_rows(self._engine, offers, front, None if rows is None else rows[:0])
            self._missed.setdefault(front[1], []).append(missed)

    def _may_skip(self, rank: int, front: tuple[int, int], offer: _Offer) -> bool:
        """Whether a rank that is further on had no batch since the round that others are in."""
        since = self._rounds[front[0] : offer.round] if front[0] >= 0 else ()
        return bool(since) and not any(parts[rank] for parts in since)


@final
class Gatherer:
    """Knows whether this rank is in the loop of an evaluation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._passes: list[EvaluationPass] = []

    @contextmanager
    def evaluating(self, rounds: Sequence[Round]) -> Iterator[EvaluationPass]:
        """The length of an evaluation's loop."""
        current = EvaluationPass(self._engine, rounds)
        self._passes.append(current)
        try:
            yield current
        finally:
            self._passes.remove(current)

    def gather(self, value: T) -> T:
        """See ``Ddp.gather``."""
        engine = self._engine
        # An iterator that a script holds on to keeps its pass open after the evaluation.
        evaluates = bool(self._passes) and self._passes[-1].in_training
        if _is_training(engine) and not evaluates and not engine.committing:
            raise UsageError(
                "ddp.gather inside a training loop, which ranks go round a different number of "
                "times; gather in the loop of ddp.eval_loader, or average a number with "
                "ddp.weighted_mean in ddp.on_commit(fn) or after the epoch"
            )
        if engine.left:
            engine.settle()
        return tree_map(self._gather_tensor, value)  # type: ignore[no-any-return]

    def _gather_tensor(self, leaf: Any) -> Tensor:
        rows = self._rows_of(leaf)
        if self._passes:
            return self._passes[-1].gather(rows)
        own = _Offer.of((_OUTSIDE, 0), rows)
        offers = _exchange_offers(self._engine, own)
        if any((o.place, o.kind) != (own.place, own.kind) for o in offers.values()):
            _refuse(offers)
        return _exchange_rows(self._engine, offers, own.place, rows)

    def _rows_of(self, leaf: Any) -> Tensor:
        """What travels of a tensor: its rows; a scalar is one row.

        Raises:
            UsageError: It is no tensor, or of a kind that cannot be gathered.
        """
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"ddp.gather was given {leaf!r:.80} of type {type(leaf).__name__}; give tensors, "
                "or lists, tuples and dicts of them: torch.tensor(value) makes one of numbers, a "
                "tokenizer one of texts"
            )
        room = self._engine.team.whole.payload_length - len(_Offer(0, 0, False, 0, ()).encode())
        if leaf.layout != torch.strided or leaf.dtype not in _DTYPES or leaf.dim() > room:
            raise UsageError(
                f"ddp.gather was given a tensor of layout {leaf.layout}, dtype {leaf.dtype} and "
                f"{leaf.dim()} dimensions; it gathers dense tensors of a plain dtype with up to "
                f"{room} dimensions: convert it, by .to_dense(), .float() or .flatten(1)"
            )
        rows = leaf.detach()
        return rows.reshape(1) if rows.dim() == 0 else rows


def _is_training(engine: Engine) -> bool:
    return engine.in_epoch or engine.share.in_micro_batch


def _exchange_offers(engine: Engine, own: _Offer) -> dict[int, _Offer]:
    """What each rank brings, by rank; without those that are parked."""
    rows, leaving = engine.team.meet(
        Meeting.GATHER,
        window=engine.window,
        leaving=int(engine.wants_stop()),
        payload=own.encode(),
    )
    engine.stopping |= leaving > 0
    absent = engine.team.parked
    return {rank: _Offer.decode(row) for rank, row in enumerate(rows) if rank not in absent}


def _exchange_rows(
    engine: Engine, offers: Mapping[int, _Offer], place: tuple[int, int], own: Tensor | None
) -> Tensor:
    """The rows of all ranks that are at ``place``, in rank order; the others bring none.

    Args:
        engine: Whose team exchanges.
        offers: What each rank brings.
        place: Where those are that bring rows.
        own: This rank's rows, on the device for the result; ``None`` takes the model's.
    """
    bringing = [offer for offer in offers.values() if offer.place == place]
    kind = bringing[0]
    counts = [o.shape[0] if o.place == place and o.shape else 0 for o in offers.values()]
    comm = engine.team.comm
    home = engine.flat.groups[0].data.device
    device = home if own is None else own.device
    # NCCL takes tensors of GPUs, and Gloo all others, so ranks must not differ in where theirs lie.
    on_device = all(offer.on_device for offer in bringing) and home.type != "cpu"
    parts = torch.empty(
        (len(counts), max(counts), *kind.shape[1:]),
        dtype=_DTYPES[kind.dtype],
        device=home if on_device else "cpu",
    )
    if own is not None and len(own):
        parts[comm.rank, : len(own)] = own
    comm.all_gather_parts(parts, what="rows of all ranks (ddp.gather)")
    if min(counts) == max(counts):
        return parts.flatten(0, 1).to(device)
    rows = [part[:count] for part, count in zip(parts, counts, strict=True)]
    return torch.cat(rows).to(device)


def _refuse(offers: Mapping[int, _Offer]) -> NoReturn:
    said = "; ".join(f"rank {rank} {offer}" for rank, offer in offers.items())
    raise CollectiveMismatchError(
        f"ranks gather unlike rows: {said}. Remedy: in each round of the loop call ddp.gather on "
        "all ranks equally often, in the same order, with the same dtype and the same shape but "
        "for the first dimension (pad longer rows: torch.nn.functional.pad), and leave the loop on "
        "all ranks in the same round"
    )
