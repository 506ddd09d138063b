"""The communicator, by which ranks exchange tensors, rows and bytes, and what a transport is.

``Communicator`` checks, counts, waits and ends; a ``Transport`` moves the bytes.
"""

import json
import math
import struct
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import reduce
from typing import Any, Final, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from evener.closing import Closing
from evener.comm.c10d import ABORT_S
from evener.comm.calls import Call
from evener.comm.forks import NotInherited, close_in_children
from evener.comm.messages import closed_message, first_line, mismatch_message, name_call
from evener.comm.notices import NoticeBoard
from evener.comm.rounding import packed_bytes
from evener.errors import CollectiveError, CollectiveMismatchError, ConfigError

DEFAULT_TIMEOUT_S = 300.0
_ORPHAN_S = 10.0  # how long a call may last after the script ended without closing its team
_WAIT_S = 0.25  # a shorter wait for others is nothing to report
_LENGTH = struct.Struct("=q")
#: Payloads of up to so many bytes travel with their lengths, in a cell of any transport.
_SHORT_BYTES = 960
# What each cell begins with: number of the call, bytes of payload, checksum of label, label.
_HEADER = struct.Struct("=qqq88s")
#: The least length of a rank's cell, on any transport.
CELL_BYTES: Final = 1088
#: How many of the latest values are kept, see ``keep_latest``.
_MAX_KEPT: Final = 256

T = TypeVar("T")


class WaitListener(ABC):
    """Is called while a rank waits for others in a call, on the thread that waits.

    It must neither raise nor take long: meanwhile the thread does not notice the arrival of the
    others.
    """

    @abstractmethod
    def still_waits(self, comm: "Communicator", call: Call, waited_s: float) -> None:
        """Note that a call has waited for others for so many seconds; called repeatedly."""

    @abstractmethod
    def wait_over(self, comm: "Communicator", *, succeeded: bool) -> None:
        """Note that the call of ``still_waits`` is over; ``succeeded`` if the others came."""


@final
class Wait:
    """What is under way in a communicator, as its transport sees it.

    Of a communicator that carries out a part of another one's call (``Communicator.within``), it is
    as late, as long under way and as far ended as that call.

    Attributes:
        calls: The calls that are carried out together; the first one's deadline counts for all.
        call: The first.
    """

    def __init__(self, comm: "Communicator", calls: Sequence[Call]) -> None:
        self.calls, self.call = calls, calls[0]
        self._comm = comm
        self._whole = None if comm._whole is None else comm._whole[0]
        self._notifying = threading.Lock()
        self._started = time.monotonic()
        self._deadline = self._started + self.call.timeout_s
        self._has_notified = False

    @property
    def waited_s(self) -> float:
        """Return the seconds since the call began."""
        if self._whole is not None:
            return self._whole.waited_s
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Return the seconds left; none once the communicator has ended."""
        comm = self._comm
        if self._whole is not None:
            return 0.0 if comm.has_ended else self._whole.left_s
        if not (comm._is_orphaned or threading.main_thread().is_alive()):
            comm._is_orphaned = True
            comm.hurry(_ORPHAN_S)  # the interpreter waits for this thread, and no other thread does
        number, deadline = comm._hurried
        if comm.has_ended:
            return 0.0
        latest = min(deadline, self._deadline) if self.call.number <= number else self._deadline
        return latest - time.monotonic()

    @property
    def has_ended(self) -> bool:
        """Return whether another thread has ended the communicator meanwhile."""
        return self._comm.has_ended or (self._whole is not None and self._whole.has_ended)

    @property
    def together(self) -> Sequence[Call]:
        """Return the calls of which ranks may be in any: those carried out together."""
        return self.calls if self._whole is None else self._whole.together

    def announce(self, call: Call, note: bytes = b"") -> list[memoryview]:
        """Check that all ranks are in ``call``; return every rank's note, of one length each."""
        return self._comm._announce(self, call, note)

    def still_waits(self) -> None:
        """Notify the listener, if there is one, that the call waits for others; cheap.

        Raises:
            CollectiveError: A peer is found lost, which the caller would not notice.
        """
        if self._whole is not None:
            self._whole.still_waits()
            return
        waited_s, comm = self.waited_s, self._comm
        with self._notifying:  # threads may carry out parts of the call
            if comm._listener is not None and waited_s >= _WAIT_S:
                self._has_notified = True
                comm._listener.still_waits(comm, self.call, waited_s)
        if comm._transport is not None:
            comm._transport.look_for_losses(self)

    def end(self, *, succeeded: bool) -> None:
        """Notify the listener, if it knows of the wait, that it is over."""
        if self._has_notified and self._comm._listener is not None:
            self._comm._listener.wait_over(self._comm, succeeded=succeeded)


class Sum(NamedTuple):
    """A sum over ranks that a transport is to form, where ``flat`` lies.

    Attributes:
        call: In which it is asked for.
        flat: This rank's tensor, not empty.
        lost: As in ``all_reduce``; only where ``can_round``.
        bits: As in ``all_reduce``.
    """

    call: Call
    flat: Tensor
    lost: Tensor | None = None
    bits: int = 32


class Transport(ABC):
    """Moves bytes between the ranks of one communicator, which alone calls it.

    All that takes a ``Wait`` is collective. It raises a ``CollectiveError`` if it failed, or
    ``Wait.left_s`` has passed. One thread calls these at a time; ``cut`` and ``close_in_child`` may
    come meanwhile.

    Every rank has a *cell* of bytes, which ``swap`` copies to all others: small payloads travel
    there, and what ranks must know of each other before a large exchange.

    Attributes:
        backend: Its name, see ``Communicator``.
        rank: This rank.
        numbers: The number of each rank in the team.
        payload_bytes: How many bytes of payload a cell holds.
    """

    #: Whether ranks are processes, so that a forked child must leave the connections behind.
    joins_processes = True

    def __init__(
        self, backend: str, rank: int, numbers: Sequence[int], cells: Sequence[Sequence[memoryview]]
    ) -> None:
        """Use cells.

        Args:
            backend: See above.
            rank: See above.
            numbers: See above.
            cells: Of each rank; with several sets, swaps use them in turn.
        """
        self.backend = backend
        self.rank = rank
        self.numbers = tuple(numbers)
        self.payload_bytes = len(cells[0][0]) - _HEADER.size
        self._sets = cells
        self._num_swaps = 0
        self._kept: dict[tuple[object, ...], list[Tensor]] = {}

    @property
    def number(self) -> int:
        """Return the number of this rank in the team."""
        return self.numbers[self.rank]

    @property
    def cells(self) -> Sequence[memoryview]:
        """Return every rank's cell of the next swap; this rank writes its own."""
        return self._sets[self._num_swaps % len(self._sets)]

    def payloads(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the payloads of ``cells`` as tensors of one shape, ``(numel,)``."""
        key = (self._num_swaps % len(self._sets), numel, dtype)
        return keep_latest(
            self._kept,
            key,
            lambda: [
                torch.frombuffer(cell, dtype=dtype, count=numel, offset=_HEADER.size)
                for cell in self.cells
            ],
        )

    def swap(self, wait: Wait, call: Call) -> None:
        """Copy each rank's cell to all ranks."""
        self._swap(self.cells, wait, call)
        self._num_swaps += 1

    @abstractmethod
    def _swap(self, cells: Sequence[memoryview], wait: Wait, call: Call) -> None: ...

    @abstractmethod
    def sum_each(self, sums: Sequence[Sum], wait: Wait) -> None:
        """Form sums, each in the call of ``wait`` of the same place."""

    @property
    def can_round(self) -> bool:
        """Return whether this rank sends to other hosts, for which numbers can be rounded."""
        return False

    def bytes_of_sum(self, num_bytes: int, *, bits: int) -> int:
        """Return how many bytes this rank sends at least when a tensor is summed.

        Args:
            num_bytes: Those of the tensor.
            bits: If below 32, the bits to which a number of float32 is rounded.
        """
        rounds = bits < 32 and self.can_round
        size = packed_bytes(num_bytes // 4, bits) if rounds else num_bytes
        return 2 * size * (len(self.numbers) - 1) // len(self.numbers)

    def sum_parts(self, flat: Tensor, wait: Wait) -> bool:
        """Sum ``flat``, at least this rank's part; return whether that left the others."""
        self.sum_each([Sum(wait.call, flat)], wait)
        return False

    @abstractmethod
    def copy(self, flat: Tensor, src: int, wait: Wait) -> None:
        """Copy ``flat`` (uint8, not empty) from rank ``src``."""

    @abstractmethod
    def gather_parts(self, flat: Tensor, wait: Wait) -> None:
        """Gather the parts of ``flat`` (uint8, not empty)."""

    @abstractmethod
    def split(self, members: tuple[int, ...], key: str, wait: Wait) -> "Transport | None":
        """Form a transport between two or more ``members``; ``key`` is unique in this one."""

    def start(self, comm: "Communicator") -> None:
        """Prepare what needs an exchange, over the communicator to which this belongs."""
        return

    def upgrade(self, part: "Communicator") -> None:
        """Let a communicator over what ``split`` has formed exchange in the same way as this."""
        return

    def explain_by(self, board: NoticeBoard) -> None:
        """Explain failures by the notices of another board, where others post theirs, too."""
        raise AssertionError("this transport has a board of its own kind")

    def look_for_losses(self, wait: Wait) -> None:
        """Raise if a peer is lost and what is waited for would not notice."""
        return

    @property
    def group(self) -> "Transport":
        """Return what NCCL can be added to: this, or what it stands on."""
        return self

    def add_nccl(self, timeout_s: float) -> None:
        """Send CUDA tensors over NCCL; raise RuntimeError or ValueError if that fails."""
        raise AssertionError("NCCL connects only processes")

    def drop_nccl(self) -> None:
        """Undo ``add_nccl``."""
        return

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros; see ``Communicator.allocate``."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def expect_call(self) -> None:
        """Note that a call begins, before there is any work for it."""
        return

    @abstractmethod
    def cut(self) -> None:
        """End the connections, so that peers and a thread that waits here notice; idempotent."""

    def close(self) -> None:
        """Release everything; no call is under way. Called once."""
        self.cut()

    def forget(self) -> None:
        """Release what peers may still query after a failure; called once, by ``close``."""
        return

    def close_in_child(self) -> None:
        """Close the connections in a forked child; see ``NotInherited``."""
        return


@final
class Communicator(Closing, NotInherited):
    """A fixed set of ranks that exchange data.

    Every method that takes ``what`` is a *collective*: all ranks call the same methods in the same
    order, with the same ``what``. Each has a deadline, and the same errors on every transport:

    - ``PeerLostError``: a rank died or closed its communicator.
    - ``CollectiveTimeoutError``: the deadline passed; ``missing`` names those that did not come.
    - ``CollectiveMismatchError``: ranks are in different operations. Rows, bytes, barriers, splits
      and small tensors notice at once, large tensors at the deadline at the latest.

    An error ends the communicator: later calls raise at once, and what it held is let go. One
    thread at a time may use it; a second thread needs its own (``split`` with all ranks). Only
    ``hurry`` and ``close`` may be called while another thread is in a call.

    Attributes:
        rank: This rank, ``0 .. world_size - 1``.
        world_size: Number of ranks.
        numbers: The number of each rank in the team. Errors and ``missing`` use these numbers: a
            ``split`` renumbers its members, but users know a rank by its number in the team.
        backend: ``"shared"``, ``"hosts"``, ``"gloo"``, ``"nccl"``, ``"threads"`` or ``"none"`` (one
            rank).
        reason: Why it is that one, as text; set by the code that has chosen.
        timeout_s: Deadline of a call that names none.
        sent_bytes: Bytes of data that this rank has sent to the others so far, headers not
            included. Of a sum or a gathering that is what the exchange moves at least, as a ring
            does: ``(n - 1) / n`` of a tensor to add up its parts among ``n`` ranks, as much again
            to gather them; with ranks on several hosts, among those of the host, and for its first
            rank among the hosts. A broadcast counts ``n - 1`` copies, all for its source.
    """

    def __init__(
        self,
        transport: Transport | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        number: int = 0,
    ) -> None:
        """Exchange over a transport.

        Args:
            transport: Belongs to the communicator from now on. ``None`` for one rank, which has
                nothing to exchange.
            timeout_s: Deadline of a call that names none.
            number: Of the one rank.
        """
        self.numbers = (number,) if transport is None else transport.numbers
        self.rank = 0 if transport is None else transport.rank
        self.world_size = len(self.numbers)
        self.backend = "none" if transport is None else transport.backend
        self.reason = (
            "one rank, nothing to exchange" if transport is None else "given by the caller"
        )
        self.timeout_s = check_timeout(timeout_s)
        self.sent_bytes = 0
        self._transport = transport
        #: Why it ended: without a traceback, which would keep frames alive.
        self._ended: CollectiveError | None = None
        self._closed = False
        self._closing = threading.RLock()
        self._num_calls = 0
        self._num_splits = 0
        self._wait: Wait | None = None  # of the call under way
        #: The latest call that ``hurry`` has found, and the deadline of all up to it.
        self._hurried = (0, math.inf)
        self._is_orphaned = False
        self._listener: WaitListener | None = None
        #: The wait and the call of another communicator of which this one's calls are parts.
        self._whole: tuple[Wait, Call] | None = None
        if transport is not None and transport.joins_processes:
            close_in_children(self)

    def report_waits_to(self, listener: WaitListener) -> None:
        """Report long waits for others from now on, here and in later splits."""
        self._listener = listener

    @property
    def number(self) -> int:
        """Return the number of this rank in the team."""
        return self.numbers[self.rank]

    def replace_transport(self, make: Callable[[Transport], Transport]) -> None:
        """Exchange from now on over what ``make`` forms on top of the transport so far."""
        assert self._transport is not None, "one rank exchanges nothing"
        self._transport = make(self._transport)
        self.backend = self._transport.backend

    def explain_by(self, board: NoticeBoard) -> None:
        """Explain failures by the notices of another board from now on."""
        assert self._transport is not None, "one rank waits for no other"
        self._transport.explain_by(board)

    @contextmanager
    def within(self, wait: Wait, call: Call) -> Iterator[None]:
        """Carry out calls in the block as parts of a call of another communicator.

        Deadline, listener and end are those of that call, and other ranks receive its number.
        """
        self._whole = wait, call
        try:
            yield
        finally:
            self._whole = None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros, shape ``(numel,)``, in memory that this communicator exchanges best.

        Any tensor can be exchanged; one that lies here need not be copied on its way. Not
        collective, but every rank allocates the same sizes in the same order. The memory lives for
        as long as the tensor or a view of it, also after ``close``.

        Args:
            numel: Number of elements.
            dtype: Their type.
            device: Where they lie.
        """
        if self._transport is None or self.has_ended:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._transport.allocate(numel, dtype, device)

    # ── collectives ──────────────────────────────────────────────────────────────────────────────

    @property
    def can_round(self) -> bool:
        """Return whether ``lost`` of ``all_reduce`` has an effect on this rank."""
        return self.backend != "nccl" and self._transport is not None and self._transport.can_round

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        what: str,
        timeout_s: float | None = None,
        lost: Tensor | None = None,
        bits: int = 16,
    ) -> None:
        """Replace ``tensor`` on every rank by the sum over ranks, with the same bits everywhere.

        Args:
            tensor: Contiguous; same shape and dtype on every rank. Sums are formed in its dtype.
            what: What is summed, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.
            lost: Lets numbers travel between hosts in ``bits``, where the tensor is large. A tensor
                like ``tensor``, both float32. What this rank's rounding takes from this sum is
                written there, after what it took from an earlier one was added to this. Finite
                before and after. Given on all ranks that ``can_round``, or on none.
            bits: 16 (bfloat16), 8 or 4 (integers, with a scale for every ``BLOCK`` numbers).
        """
        self.all_reduce_each([(what, tensor)], timeout_s=timeout_s, lost=[lost], bits=bits)

    def all_reduce_each(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        *,
        timeout_s: float | None = None,
        lost: Sequence[Tensor | None] = (),
        bits: int = 16,
    ) -> None:
        """Replace tensors by their sums; they leave in this order, without waiting for each other.

        Args:
            tensors: ``what`` and ``tensor`` of each, as for ``all_reduce``; disjoint in memory.
            timeout_s: Deadline of all together; ``None`` takes the communicator's.
            lost: That of each, as for ``all_reduce``; none by default.
            bits: As for ``all_reduce``.
        """
        sums = []
        for (what, tensor), rest in zip(tensors, lost or [None] * len(tensors), strict=True):
            flat = _real(_flat(tensor, what))
            call = self._begin("all_reduce", what, timeout_s, _size_of(flat))
            if flat.numel():
                is_rounded = rest is not None and self.can_round
                sums.append(Sum(call, flat, rest, bits) if is_rounded else Sum(call, flat))
                self._count_sum(flat, bits=sums[-1].bits)
        if self._transport is None or not sums:
            return
        flats = [one.flat for one in sums]
        with self._under_way(*(one.call for one in sums)) as wait:
            if len(flats) == 1 and flats[0].nbytes <= self._transport.payload_bytes:
                self._sum_by_cells(flats[0], wait)
            else:
                self._mover(flats).sum_each(sums, wait)

    def broadcast(
        self, tensor: Tensor, src: int, *, what: str, timeout_s: float | None = None
    ) -> None:
        """Copy rank ``src``'s ``tensor`` over that of every other rank, bit for bit.

        Args:
            tensor: Contiguous, of any dtype; same shape and dtype on every rank.
            src: The rank to copy from.
            what: What is copied, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.
        """
        if not 0 <= src < self.world_size:
            raise ConfigError(
                f"no rank {src} to broadcast {what!r} from: there are {self.world_size}"
            )
        flat = _flat(tensor, what).view(torch.uint8)
        size = f"{flat.numel()} bytes from rank {self.numbers[src]}"
        call = self._begin("broadcast", what, timeout_s, size)
        if flat.numel():
            if src == self.rank:
                self.sent_bytes += flat.nbytes * (self.world_size - 1)
            self._broadcast(flat, src, call)

    def _broadcast(self, flat: Tensor, src: int, call: Call) -> None:
        if self._transport is None:
            return
        with self._under_way(call) as wait:
            if flat.nbytes <= self._transport.payload_bytes:
                flat.copy_(self._swap_payloads(flat, wait)[src])
            else:
                self._mover([flat]).copy(flat, src, wait)

    def all_gather_parts(
        self, flat: Tensor, *, what: str, timeout_s: float | None = None, have_met: bool = False
    ) -> None:
        """Fill ``flat`` on every rank with part ``r`` as it stands on rank ``r``, bit for bit.

        Args:
            flat: Contiguous, of any dtype; cut into ``world_size`` equal parts.
            what: What is gathered, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.
            have_met: All ranks have met in another call since any of them last used the parts of
                others. They may be overwritten before this rank has made the call.
        """
        self._check_parts(flat, what)
        whole = _flat(flat, what).view(torch.uint8)
        size = f"{whole.numel() // self.world_size} bytes"
        call = self._begin("all_gather_parts", what, timeout_s, size)
        if whole.numel():
            self._count_parts(whole)
            self._gather_parts(whole, call._replace(have_met=have_met))

    def _gather_parts(self, whole: Tensor, call: Call) -> None:
        if self._transport is None:
            return
        with self._under_way(call) as wait:
            own = whole.chunk(self.world_size)[self.rank]
            if own.nbytes <= self._transport.payload_bytes:
                whole.copy_(torch.cat(self._swap_payloads(own, wait)))
            else:
                self._mover([whole]).gather_parts(whole, wait)

    def reduce_scatter_parts(
        self, flat: Tensor, *, what: str, timeout_s: float | None = None, have_met: bool = False
    ) -> bool:
        """Replace part ``r`` of ``flat`` on rank ``r`` by its sum over ranks.

        Other ranks may read the other parts until the next collective: no rank may write to them
        before. ``all_gather_parts`` then gives every rank what each owner has made of its part.

        Args:
            flat: Contiguous; same size and dtype on every rank; cut into ``world_size`` equal
                parts. Sums are formed in its dtype, with the bits that ``all_reduce`` would give
                where the transport adds in rank order.
            what: What is summed, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.
            have_met: All ranks have met in another call since any of them last wrote to ``flat``,
                and make this call next. So a transport need not wait for them again.

        Returns:
            Whether the other parts are as before, on all ranks; their values are undefined else.
        """
        self._check_parts(flat, what)
        whole = _real(_flat(flat, what))
        call = self._begin("reduce_scatter_parts", what, timeout_s, _size_of(whole))
        if self._transport is None or not whole.numel():
            return True
        with self._under_way(call._replace(have_met=have_met)) as wait:
            if whole.nbytes <= self._transport.payload_bytes:
                self._sum_by_cells(whole, wait)
                are_left = False
            else:
                are_left = self._mover([whole]).sum_parts(whole, wait)
        if are_left:
            self._count_parts(whole)
        else:  # this rank got the parts of others, too
            self._count_sum(whole, bits=32)
        return are_left

    def all_gather_rows(
        self, row: Sequence[float], *, what: str, timeout_s: float | None = None
    ) -> list[list[float]]:
        """Give every rank the row of each rank.

        Args:
            row: Python floats, carried as float64 bit for bit; as many on every rank.
            what: What the rows contain, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.

        Returns:
            The rows, indexed by rank.
        """
        call = self._begin("all_gather_rows", what, timeout_s, f"{len(row)} numbers")
        transport = self._transport
        if transport is None:
            return [[float(value) for value in row]]
        form = struct.Struct(f"={len(row)}d")
        self.sent_bytes += form.size * (self.world_size - 1)
        if form.size > transport.payload_bytes:
            whole = torch.empty(self.world_size, len(row), dtype=torch.float64)
            whole[self.rank] = torch.tensor(row, dtype=torch.float64)
            self._gather_parts(whole.view(-1).view(torch.uint8), call)
            rows: list[list[float]] = whole.tolist()
            return rows
        with self._under_way(call) as wait:
            cells = transport.cells
            form.pack_into(cells[self.rank], _HEADER.size, *row)
            self._swap(wait, call, form.size)
            return [list(form.unpack_from(cell, _HEADER.size)) for cell in cells]

    def all_gather_bytes(
        self, payload: bytes, *, what: str, timeout_s: float | None = None
    ) -> list[bytes]:
        """Give every rank the payload of each rank; lengths may differ.

        Where all are short, that is one exchange: a new group of processes takes long for each.

        Args:
            payload: Anything, also nothing.
            what: What the payloads contain, for messages.
            timeout_s: Deadline of each of up to two exchanges; ``None`` takes the communicator's.

        Returns:
            The payloads, indexed by rank.
        """
        head = _LENGTH.pack(len(payload)) + payload[:_SHORT_BYTES].ljust(_SHORT_BYTES, b"\0")
        heads = self._all_gather_cells(head, what, timeout_s)
        sizes = [_LENGTH.unpack_from(each)[0] for each in heads]
        payloads = [each[_LENGTH.size :] for each in heads]
        if max(sizes) > _SHORT_BYTES:
            rest = payload[_SHORT_BYTES:].ljust(max(sizes) - _SHORT_BYTES, b"\0")
            rests = self._all_gather_cells(rest, what, timeout_s)
            payloads = [front + back for front, back in zip(payloads, rests, strict=True)]
        return [each[:size] for each, size in zip(payloads, sizes, strict=True)]

    def _all_gather_cells(self, cell: bytes, what: str, timeout_s: float | None) -> list[bytes]:
        """Give every rank the bytes of each rank, as many on every rank."""
        flat = torch.frombuffer(bytearray(cell * self.world_size), dtype=torch.uint8)
        self.all_gather_parts(flat, what=what, timeout_s=timeout_s)
        whole = flat.numpy().tobytes()
        return [whole[start : start + len(cell)] for start in range(0, len(whole), len(cell))]

    def all_gather_json(
        self, value: Any, *, what: str, timeout_s: float | None = None
    ) -> list[Any]:
        """Give every rank the value of each rank, carried as JSON, indexed by rank."""
        answers = self.all_gather_bytes(json.dumps(value).encode(), what=what, timeout_s=timeout_s)
        return [json.loads(answer) for answer in answers]

    def barrier(self, *, what: str, timeout_s: float | None = None) -> None:
        """Return when every rank has called this.

        Args:
            what: What is waited for, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.
        """
        call = self._begin("barrier", what, timeout_s, "all")
        if self._transport is not None:
            with self._under_way(call) as wait:
                self._swap(wait, call, 0)

    def split(
        self,
        ranks: Sequence[int],
        *,
        name: str,
        timeout_s: float | None = None,
        reports_waits: bool = True,
    ) -> "Communicator | None":
        """Form a communicator of some of the ranks; collective over *all* ranks of this one.

        Args:
            ranks: Members, in the order of their new ranks; equal on all ranks.
            name: Word for messages; it may be used again.
            timeout_s: Deadline for forming it; ``None`` takes the communicator's.
            reports_waits: Whether it reports long waits as this one does.

        Returns:
            The new communicator, or ``None`` on a rank outside of it. Closing or losing either
            leaves the other.
        """
        members = tuple(ranks)
        what = f"split {name!r} of {[self.numbers[rank] for rank in members]}"
        self.barrier(what=what, timeout_s=timeout_s)  # in which all must name the same members
        self._num_splits += 1
        call = self._begin("split", what, timeout_s, f"number {self._num_splits}")
        if self._transport is None or len(members) == 1:
            alone = Communicator(timeout_s=self.timeout_s, number=self.number)
            return alone if self.rank in members else None
        with self._under_way(call) as wait:
            formed = self._transport.split(members, f"{self._num_splits}/{name}", wait)
            if formed is None:
                return None
            part = Communicator(formed, timeout_s=self.timeout_s)
            try:
                formed.start(part)
                self._transport.upgrade(part)
            except BaseException:
                part.close()
                raise
        if self._listener is not None and reports_waits:
            part.report_waits_to(self._listener)
        return part

    def add_nccl(self, *, timeout_s: float | None = None) -> str:
        """Send CUDA tensors over NCCL from now on, on each rank's current device; collective.

        Args:
            timeout_s: Deadline for connecting; that of the communicator by default.

        Returns:
            On which rank that failed, and how: all ranks do without NCCL then. Empty if it worked.

        Raises:
            ConfigError: The ranks are not processes that NCCL could join.
        """
        if self._transport is None:
            return ""
        if not self._transport.joins_processes:
            raise ConfigError(
                f"backend is 'nccl', but ranks exchange over {self.backend!r}: NCCL connects only "
                "processes"
            )
        call = self._begin("add_nccl", what := "forming the NCCL group", timeout_s, "all")
        failure, group = "", self._transport.group
        with self._under_way(call):
            try:
                group.add_nccl(call.timeout_s)
            except (RuntimeError, ValueError) as error:  # torch raises the latter without a GPU
                failure = first_line(error)
        # Those that have failed at once wait for those that first connect and then abort in vain.
        latest_s = 2 * call.timeout_s + ABORT_S
        failures = self.all_gather_json(failure, what=what, timeout_s=latest_s)
        for number, text in zip(self.numbers, failures, strict=True):
            if text:
                group.drop_nccl()
                return f"on rank {number}: {text}"
        self.backend = "nccl"
        return ""

    # ── end of life ──────────────────────────────────────────────────────────────────────────────

    def hurry(self, timeout_s: float) -> None:
        """Shorten the deadlines of later calls, and of one that another thread is in.

        Args:
            timeout_s: Seconds, counted from now for the call under way.
        """
        self.timeout_s = min(self.timeout_s, check_timeout(timeout_s))
        deadline, number = time.monotonic() + timeout_s, self._num_calls
        if self._hurried[0] == number:
            deadline = min(deadline, self._hurried[1])
        # Kept beside the call's own deadline: its thread may be about to set that.
        self._hurried = (number, deadline)

    @property
    def has_ended(self) -> bool:
        """Return whether it was closed, or an error has ended it."""
        return self._ended is not None

    def close(self) -> None:
        """Close the connections; not collective, idempotent.

        Peers that still need this rank get ``PeerLostError``. A call that another thread is in ends
        with a ``CollectiveError``, which does not wait for any peer.
        """
        if not self._closed:
            self._closed = True
            if self._transport is not None:
                self._transport.forget()
        self._end(CollectiveError(f"rank {self.number} has closed this communicator"))

    def close_in_child(self) -> None:
        """Close the connections in a forked child; see ``NotInherited``."""
        if not self._closed and self._transport is not None:
            self._closed = True
            self._closing = threading.RLock()  # a thread of the parent may have held it
            self._ended = CollectiveError(
                f"this process was forked from rank {self.rank}, which keeps the connections; call "
                "collectives in the rank itself"
            )
            self._transport.close_in_child()

    # ── one call ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self, kind: str, what: str, timeout_s: float | None, size: str) -> Call:
        if self._ended is not None:
            text = f"rank {self.number} cannot start {what!r}: {self._ended}"
            raise type(self._ended)(text, **vars(self._ended))
        if self._transport is not None:
            self._transport.expect_call()
        self._num_calls += 1
        seconds = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        number = self._num_calls if self._whole is None else self._whole[1].number
        return Call(number, kind, what, seconds, f"{what!r} ({kind} of {size})")

    @contextmanager
    def _under_way(self, *calls: Call) -> Iterator[Wait]:
        """Carry out calls: the deadline counts from now, and any error ends the communicator."""
        wait, succeeded = Wait(self, calls), False
        with self._closing:
            if self.has_ended:  # another thread has closed it since the call began
                raise CollectiveError(closed_message(self.number, calls[0].what))
            self._wait = wait
        try:
            yield wait
            succeeded = True
        except CollectiveError as error:
            raise self._end(error) from None
        except BaseException as error:  # Ctrl-C, or a signal handler that raises, for example
            what = calls[0].what
            if self._ended is not None and isinstance(error, Exception):  # by another thread
                raise CollectiveError(closed_message(self.number, what)) from None
            how = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._end(CollectiveError(f"rank {self.number} was interrupted in {what!r} ({how})"))
            raise
        finally:
            wait.end(succeeded=succeeded)
            with self._closing:
                self._wait = None
                if self._ended is not None and self._transport is not None:
                    self._transport.close()

    def _end(self, error: CollectiveError) -> CollectiveError:
        """End the connections, make later calls raise the same, and return ``error``."""
        with self._closing:
            if self._ended is None:
                self._ended = copy(error)
                if self._transport is not None and self._wait is None:
                    self._transport.close()
                elif self._transport is not None:  # the call under way closes it, once it is over
                    self._transport.cut()
        return error

    def _mover(self, flats: Sequence[Tensor]) -> Transport:
        """Return what exchanges large tensors that lie there."""
        assert self._transport is not None
        by_nccl = self.backend == "nccl" and all(flat.device.type == "cuda" for flat in flats)
        return self._transport.group if by_nccl else self._transport

    # ── cells ────────────────────────────────────────────────────────────────────────────────────

    def _swap(self, wait: Wait, call: Call, size: int) -> None:
        """Swap cells, and check that all ranks are in the same call.

        Args:
            wait: What is under way.
            call: The call of it.
            size: Bytes of payload, which this rank's cell holds already.
        """
        transport = self._transport
        assert transport is not None
        cells, label = transport.cells, call.label.encode()  # the cell holds only its beginning
        own = _HEADER.pack(call.number, size, zlib.crc32(label), label)
        cells[self.rank][: _HEADER.size] = own
        transport.swap(wait, call)
        others = []
        for number, cell in zip(self.numbers, cells, strict=True):
            packed = bytes(cell[: _HEADER.size])
            if packed != own:
                count, _, _, theirs = _HEADER.unpack(packed)
                others.append((number, name_call(theirs, count - call.number)))
        if others:
            raise CollectiveMismatchError(mismatch_message(self.number, call.label, others))

    def _announce(self, wait: Wait, call: Call, note: bytes) -> list[memoryview]:
        assert self._transport is not None
        cells, stop = self._transport.cells, _HEADER.size + len(note)
        cells[self.rank][_HEADER.size : stop] = note
        self._swap(wait, call, len(note))
        return [cell[_HEADER.size : stop] for cell in cells]

    def _swap_payloads(self, own: Tensor, wait: Wait) -> list[Tensor]:
        """Return every rank's tensor, which must not be written to, until the next swap."""
        assert self._transport is not None
        payloads = self._transport.payloads(own.numel(), own.dtype)
        payloads[self.rank].copy_(own)
        self._swap(wait, wait.call, own.nbytes)
        return payloads

    def _sum_by_cells(self, flat: Tensor, wait: Wait) -> None:
        flat.copy_(reduce(torch.add, self._swap_payloads(flat, wait)))

    def _count_parts(self, flat: Tensor) -> None:
        """Count parts of a tensor, one for each other rank."""
        self.sent_bytes += flat.nbytes * (self.world_size - 1) // self.world_size

    def _count_sum(self, flat: Tensor, *, bits: int) -> None:
        self.sent_bytes += self.bytes_of_sum(flat.nbytes, bits=bits)

    def bytes_of_sum(self, num_bytes: int, *, bits: int) -> int:
        """Return by how much ``sent_bytes`` rises when a tensor of ``num_bytes`` is summed."""
        if self._transport is None:
            return 0
        return self._transport.bytes_of_sum(num_bytes, bits=bits)

    def _check_parts(self, flat: Tensor, what: str) -> None:
        if flat.numel() % self.world_size:
            raise ConfigError(
                f"{what!r} has {flat.numel()} elements, which {self.world_size} ranks cannot share "
                "in equal parts: pad it to a multiple of world_size"
            )


def _flat(tensor: Tensor, what: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ConfigError(
            f"{what!r} has shape {tuple(tensor.shape)} with strides {tensor.stride()}: collectives "
            "work in place on contiguous tensors; pass .contiguous() and copy the result back"
        )
    return tensor.detach().view(-1)


def _real(flat: Tensor) -> Tensor:
    """Return complex numbers as twice as many real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _size_of(flat: Tensor) -> str:
    return f"{flat.numel()} {str(flat.dtype).removeprefix('torch.')}"


def check_timeout(timeout_s: float) -> float:
    """Return the deadline, if it is one.

    Raises:
        ConfigError: It is not a number, not above 0, or not finite.
    """
    given: object = timeout_s
    if isinstance(given, int | float) and 0 < timeout_s < float("inf"):
        return float(timeout_s)
    raise ConfigError(f"timeout_s is {timeout_s!r}: every wait needs a deadline above 0 seconds")


def keep_latest(
    kept: dict[tuple[object, ...], T], key: tuple[object, ...], make: Callable[[], T]
) -> T:
    """Return the value that is kept under a key, or made now; forget the oldest of too many."""
    value = kept.pop(key) if key in kept else make()
    kept[key] = value  # at the end: the one used last
    if len(kept) > _MAX_KEPT:
        del kept[next(iter(kept))]
    return value
