"""The interface by which ranks exchange tensors, rows and bytes, and its one-rank class."""

import json
import math
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evener.closing import Closing
from evener.errors import CollectiveError, CollectiveMismatchError, ConfigError

DEFAULT_TIMEOUT_S = 300.0
_ORPHAN_S = 10.0  # how long a call may last after the script ended without closing its team
_WAIT_S = 0.25  # a shorter wait for others is nothing to report
_NCCL = "forming the NCCL group"
_LENGTH = struct.Struct("=q")
#: Payloads of so many bytes travel with their lengths, in a cell of any leaf.
_SHORT_BYTES = 960


class Call(NamedTuple):
    """One collective call, as an implementation sees it.

    Attributes:
        number: How many calls this communicator has had, this one included; equal on all ranks.
        kind: The operation, such as ``"all_reduce"``.
        what: What is exchanged, in words for a message; equal on all ranks.
        timeout_s: Seconds after which the call must have failed.
        label: ``what``, and the operation with its size: what ranks compare.
        have_met: Whether the caller guarantees that all ranks are ready; see
            ``reduce_scatter_parts``.
    """

    number: int
    kind: str
    what: str
    timeout_s: float
    label: str
    have_met: bool = False


class WaitListener(ABC):
    """Hears while a rank waits for others in a call, on the thread that waits.

    It must neither raise nor take long: meanwhile the thread does not notice the arrival of the
    others.
    """

    @abstractmethod
    def still_waits(self, comm: "Communicator", call: Call, waited_s: float) -> None:
        """Hear that a call has waited for others for so many seconds; called repeatedly."""

    @abstractmethod
    def wait_over(self, comm: "Communicator", *, succeeded: bool) -> None:
        """Hear that the call of ``still_waits`` is over; ``succeeded`` if the others came."""


class Communicator(Closing):
    """A fixed set of ranks that exchange data.

    Every method that takes ``what`` is a *collective*: all ranks call the same methods in the same
    order, with the same ``what``. Each has a deadline, and the same errors on every leaf:

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
            ``split`` numbers its members anew, but people know a rank by its number in the team.
        backend: ``"shared"``, ``"gloo"``, ``"nccl"``, ``"threads"`` or ``"none"`` (one rank).
        reason: Why it is that one, for people; set by whoever has chosen.
        timeout_s: Deadline of a call that names none.
        sent_bytes: Bytes of data that this rank has sent to the others so far, headers not
            included. Of a sum or a gathering that is what the exchange moves at least, as a ring
            does: ``(n - 1) / n`` of a tensor to add up its parts among ``n`` ranks, as much again
            to gather them. A broadcast counts ``n - 1`` copies, all for its source.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is not in a team of {world_size}: use 0 to world_size - 1"
            )
        self.rank = rank
        self.world_size = world_size
        self.numbers = tuple(range(world_size) if numbers is None else numbers)
        self.backend = backend
        self.reason = "given by the caller"
        self.timeout_s = check_timeout(timeout_s)
        self.sent_bytes = 0
        #: Why it ended: without a traceback, which would keep frames alive.
        self._ended: CollectiveError | None = None
        self._closed = False
        self._num_calls = 0
        self._num_splits = 0
        #: Number and deadline of the call under way, of a leaf that uses ``_left_s``.
        self._current = (0, math.inf)
        #: The latest call that ``hurry`` has found, and the deadline of all up to it.
        self._hurried = (0, math.inf)
        self._is_orphaned = False
        self._listener: WaitListener | None = None
        self._has_told = False  # of the wait under way

    def report_waits_to(self, listener: WaitListener) -> None:
        """Report long waits for others from now on, here and in later splits."""
        self._listener = listener

    def find_absent(self) -> frozenset[int] | None:
        """Return the numbers of ranks that have not come to the call under way.

        To be called by a ``WaitListener`` alone, once it has been told of the wait.

        Returns:
            ``None`` where this rank cannot find out.
        """
        return None

    @property
    def number(self) -> int:
        """Return the number of this rank in the team."""
        return self.numbers[self.rank]

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
        return torch.zeros(numel, dtype=dtype, device=device)

    # ── collectives ──────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, tensor: Tensor, *, what: str, timeout_s: float | None = None) -> None:
        """Replace ``tensor`` on every rank by the sum over ranks, with the same bits everywhere.

        Args:
            tensor: Contiguous; same shape and dtype on every rank. Sums are formed in its dtype.
            what: What is summed, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.
        """
        self.all_reduce_each([(what, tensor)], timeout_s=timeout_s)

    def all_reduce_each(
        self, tensors: Sequence[tuple[str, Tensor]], *, timeout_s: float | None = None
    ) -> None:
        """Replace tensors by their sums; they leave in this order, without waiting for each other.

        Args:
            tensors: ``what`` and ``tensor`` of each, as for ``all_reduce``; disjoint in memory.
            timeout_s: Deadline of all together; ``None`` takes the communicator's.
        """
        flats, calls = [], []
        for what, tensor in tensors:
            flat = _real(_flat(tensor, what))
            call = self._begin("all_reduce", what, timeout_s, _size_of(flat))
            if flat.numel():
                flats.append(flat)
                calls.append(call)
                self._count_parts(flat, 2)  # added up, then gathered
        if calls:
            self._all_reduce_each(flats, calls)

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
            self._count_parts(whole, 1)
            self._all_gather_parts(whole, call._replace(have_met=have_met))

    def reduce_scatter_parts(
        self, flat: Tensor, *, what: str, timeout_s: float | None = None, have_met: bool = False
    ) -> bool:
        """Replace part ``r`` of ``flat`` on rank ``r`` by its sum over ranks.

        Other ranks may read the other parts until the next collective: nobody may write to them
        before. ``all_gather_parts`` then gives every rank what each owner has made of its part.

        Args:
            flat: Contiguous; same size and dtype on every rank; cut into ``world_size`` equal
                parts. Sums are formed in its dtype, with the bits that ``all_reduce`` would give
                where the leaf adds in rank order.
            what: What is summed, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.
            have_met: All ranks have met in another call since any of them last wrote to ``flat``,
                and make this call next. So a leaf need not wait for them again.

        Returns:
            Whether the other parts are as before, on all ranks; their values are undefined else.
        """
        self._check_parts(flat, what)
        whole = _real(_flat(flat, what))
        call = self._begin("reduce_scatter_parts", what, timeout_s, _size_of(whole))
        if whole.numel():
            self._count_parts(whole, 1)
            return self._reduce_scatter_parts(whole, call._replace(have_met=have_met))
        return True

    def all_gather_rows(
        self, row: Sequence[float], *, what: str, timeout_s: float | None = None
    ) -> list[list[float]]:
        """Give every rank the row of each rank.

        Args:
            row: Python floats, carried as float64 bit for bit; as many on every rank.
            what: What the rows say, for messages.
            timeout_s: Deadline; ``None`` takes the communicator's.

        Returns:
            The rows, indexed by rank.
        """
        call = self._begin("all_gather_rows", what, timeout_s, f"{len(row)} numbers")
        self.sent_bytes += 8 * len(row) * (self.world_size - 1)
        return self._all_gather_rows(row, call)

    def all_gather_bytes(
        self, payload: bytes, *, what: str, timeout_s: float | None = None
    ) -> list[bytes]:
        """Give every rank the payload of each rank; lengths may differ.

        Where all are short, that is one exchange: a new group of processes takes long for each.

        Args:
            payload: Anything, also nothing.
            what: What the payloads say, for messages.
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
        self._all_gather_rows((), self._begin("barrier", what, timeout_s, "all"))

    def split(
        self, ranks: Sequence[int], *, name: str, timeout_s: float | None = None
    ) -> "Communicator | None":
        """Form a communicator of some of the ranks; collective over *all* ranks of this one.

        Args:
            ranks: Members, in the order of their new ranks; equal on all ranks.
            name: Word for messages; it may be used again.
            timeout_s: Deadline for forming it; ``None`` takes the communicator's.

        Returns:
            The new communicator (a ``SingleCommunicator`` where it has one member), or ``None`` on
            a rank outside of it. Its fate is its own: closing or losing either leaves the other.
        """
        members = tuple(ranks)
        if not members or len(set(members)) != len(members):
            raise ConfigError(f"split {name!r} with ranks {list(members)}: name each member once")
        if not all(0 <= r < self.world_size for r in members):
            raise ConfigError(
                f"split {name!r} with ranks {list(members)}: there are ranks 0 to "
                f"{self.world_size - 1}"
            )
        what = f"split {name!r}"
        row = [*members, *[-1] * (self.world_size - len(members))]
        for other, theirs in enumerate(self.all_gather_rows(row, what=what, timeout_s=timeout_s)):
            if theirs != row:
                raise self._end(
                    CollectiveMismatchError(
                        f"rank {self.number} splits {name!r} with {self._numbers_of(members)}, "
                        f"rank {self.numbers[other]} with "
                        f"{self._numbers_of([int(r) for r in theirs if r >= 0])}: all must name "
                        "the same members"
                    )
                )
        self._num_splits += 1
        if len(members) == 1:
            if members[0] != self.rank:
                return None
            return SingleCommunicator(timeout_s=self.timeout_s, number=self.number)
        call = self._begin("split", what, timeout_s, f"number {self._num_splits}")
        part = self._split(members, f"{self._num_splits}/{name}", call)
        if part is not None and self._listener is not None:
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
        if self.world_size == 1:  # one rank exchanges nothing
            return ""
        failure = self._add_nccl(self._begin("add_nccl", _NCCL, timeout_s, "all"))
        if not failure:
            self.backend = "nccl"
        return failure

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
        self._hurry(deadline)

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
            self._forget()
        self._end(CollectiveError(f"rank {self.number} has closed this communicator"))

    # ── for leaves ───────────────────────────────────────────────────────────────────────────────

    def _begin(self, kind: str, what: str, timeout_s: float | None, size: str) -> Call:
        if self._ended is not None:
            text = f"rank {self.number} cannot start {what!r}: {self._ended}"
            raise type(self._ended)(text, **vars(self._ended))
        self._num_calls += 1
        seconds = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        return Call(self._num_calls, kind, what, seconds, f"{what!r} ({kind} of {size})")

    def _start(self, call: Call) -> float:
        """Start the clock of a call; return the present ``time.monotonic``."""
        started = time.monotonic()
        self._current = (call.number, started + call.timeout_s)
        return started

    @property
    def _left_s(self) -> float:
        """Return the seconds left for the call under way."""
        if not (self._is_orphaned or threading.main_thread().is_alive()):
            self._is_orphaned = True
            self.hurry(_ORPHAN_S)  # the interpreter waits for this thread, and no other thread does
        (number, deadline), (hurried, latest) = self._current, self._hurried
        return (min(deadline, latest) if number <= hurried else deadline) - time.monotonic()

    def _still_waits(self, call: Call, started: float) -> None:
        """Tell the listener, if there is one, that a call waits for others; cheap."""
        waited_s = time.monotonic() - started
        if self._listener is not None and waited_s >= _WAIT_S:
            self._has_told = True
            self._listener.still_waits(self, call, waited_s)

    def _wait_over(self, *, succeeded: bool) -> None:
        """Tell the listener, if it was told of a wait, that it is over."""
        if self._has_told and self._listener is not None:
            self._has_told = False
            self._listener.wait_over(self, succeeded=succeeded)

    def _end(self, error: CollectiveError) -> CollectiveError:
        """Release everything, make later calls raise the same, and return ``error``."""
        if self._ended is None:
            self._ended = copy(error)
            self._release()
        return error

    def _count_parts(self, flat: Tensor, times: int) -> None:
        """Count parts of a tensor, one for each other rank, that are sent so many times."""
        self.sent_bytes += times * flat.nbytes * (self.world_size - 1) // self.world_size

    def _check_parts(self, flat: Tensor, what: str) -> None:
        if flat.numel() % self.world_size:
            raise ConfigError(
                f"{what!r} has {flat.numel()} elements, which {self.world_size} ranks cannot share "
                "in equal parts: pad it to a multiple of world_size"
            )

    def _numbers_of(self, ranks: Sequence[int]) -> list[int]:
        return [self.numbers[rank] for rank in ranks]

    @abstractmethod
    def _all_reduce(self, flat: Tensor, call: Call) -> None: ...

    def _all_reduce_each(self, flats: Sequence[Tensor], calls: Sequence[Call]) -> None:
        """Sum one tensor or more, none of them empty, each in a call of its own."""
        for flat, call in zip(flats, calls, strict=True):
            self._all_reduce(flat, call)

    @abstractmethod
    def _broadcast(self, flat: Tensor, src: int, call: Call) -> None:
        """Copy ``flat`` (uint8, not empty) from rank ``src``."""

    @abstractmethod
    def _all_gather_parts(self, flat: Tensor, call: Call) -> None:
        """Gather the parts of ``flat`` (uint8, not empty)."""

    def _reduce_scatter_parts(self, flat: Tensor, call: Call) -> bool:
        """Sum up ``flat`` (not empty), at least this rank's part; whether that left the others."""
        self._count_parts(flat, 1)  # the elements that all ranks get, beyond their own parts
        self._all_reduce_each([flat], [call])
        return False

    @abstractmethod
    def _all_gather_rows(self, row: Sequence[float], call: Call) -> list[list[float]]: ...

    def _gather_long_row(self, row: Sequence[float], call: Call) -> list[list[float]]:
        """Gather rows as the parts of a tensor."""
        whole = torch.empty(self.world_size, len(row), dtype=torch.float64)
        whole[self.rank] = torch.tensor(row, dtype=torch.float64)
        self._all_gather_parts(whole.view(-1).view(torch.uint8), call)
        rows: list[list[float]] = whole.tolist()
        return rows

    @abstractmethod
    def _split(self, members: tuple[int, ...], key: str, call: Call) -> "Communicator | None":
        """Form the communicator of two or more ``members``; ``key`` is unique in this one."""

    def _add_nccl(self, call: Call) -> str:
        raise ConfigError(
            f"backend is 'nccl', but ranks exchange over {self.backend!r}: NCCL joins processes"
        )

    def _hurry(self, deadline: float) -> None:
        """Make the call under way, if any, fail by ``deadline``.

        A leaf that uses ``_left_s`` need not be told.

        Args:
            deadline: On ``time.monotonic``'s clock.
        """
        return

    def _release(self) -> None:
        """Close connections, after a failure or a close; called once."""
        return

    def _forget(self) -> None:
        """Release what peers may still query after a failure; called once, by ``close``."""
        return


@final
class SingleCommunicator(Communicator):
    """The communicator of one rank: the same calls, nothing to exchange."""

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S, number: int = 0) -> None:
        super().__init__(
            rank=0, world_size=1, backend="none", timeout_s=timeout_s, numbers=[number]
        )
        self.reason = "one rank, nothing to exchange"

    def _all_reduce(self, flat: Tensor, call: Call) -> None:
        pass

    def _broadcast(self, flat: Tensor, src: int, call: Call) -> None:
        pass

    def _all_gather_parts(self, flat: Tensor, call: Call) -> None:
        pass

    def _all_gather_rows(self, row: Sequence[float], call: Call) -> list[list[float]]:
        return [[float(value) for value in row]]

    def _split(self, members: tuple[int, ...], key: str, call: Call) -> Communicator | None:
        raise AssertionError("one rank has no split of two or more members")


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
