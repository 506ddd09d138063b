"""The communicator over ``torch.distributed`` process groups: Gloo between hosts, NCCL on CUDA."""

import math
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, reduce
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from evener.comm.base import Call, Communicator
from evener.comm.c10d import (
    ABORT_S,
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceScatterOptions,
    Work,
    end_nccl,
    form_gloo,
    form_nccl,
    options,
)
from evener.comm.causes import Cause, cause_of
from evener.comm.forks import NotInherited, leave_behind_in_children, never_destroy
from evener.comm.messages import (
    closed_message,
    first_line,
    lost_message,
    mismatch_message,
    name_call,
)
from evener.comm.network import MeetingPoint
from evener.comm.notices import Notice, StoreNotices
from evener.comm.wires import Wires
from evener.devices import kind_of
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
)

# Gloo aborts a process that receives more bytes than it expected. So small payloads travel in cells
# of one size that name their content. Larger exchanges are announced by such a cell the first time
# that their size occurs.
_CELL_BYTES = 1088
_HEADER = struct.Struct("=qqq88s")  # number of the call, bytes of payload, checksum of label, label
_PAYLOAD_BYTES = _CELL_BYTES - _HEADER.size
#: So many of the latest sizes are remembered; one that has been forgotten is announced again.
_MAX_ANNOUNCED = 256
#: At which tensors of any dtype may begin in a buffer of bytes.
_ALIGNMENT = 64

# Gloo closes all connections when an operation of its own times out, which peers cannot tell from a
# death. It gets this much longer than the deadline, in which a rank can say that it gave up.
_GRACE_S = 0.25
_SLICE_S = 0.25  # waits are cut so that signal handlers of Python run in between
# An operation may continue so long after a peer has closed: the peer may have had all of its data,
# while the others still exchange.
_CLOSED_S = 5.0
_SHORTEST_S = 0.001  # a wait of 0 ms would mean for ever
_ASKS = 4  # how often within the default deadline a longer wait asks whether the store answers


@final
class GroupCommunicator(Communicator, NotInherited):
    """Ranks in processes, over process groups built for them alone.

    Each rank forms a sum of up to 976 bytes by itself, in rank order. Gloo or NCCL forms longer
    sums, and sums that travel with others: each element on one rank, which is then copied. Either
    way all ranks get the same bits. Both add in the tensor's dtype: float16 and bfloat16 are
    rounded after each addition. They are not sent in a wider dtype: users choose them for half the
    bytes.

    Mismatches are noticed at once if a rank is in an exchange of at most 976 bytes per rank, or in
    one whose kind and size are not among its latest 256. Others are noticed at the deadline. There
    is one exception: ranks are in larger exchanges of one kind at the same time, with different
    sizes that each has seen lately. Then Gloo aborts the process that receives too much.

    CUDA and other device tensors on a Gloo communicator go through a host copy, pinned where that
    is faster. With NCCL, calls still block the host until the result is there, so that every wait
    has a deadline.
    """

    def __init__(
        self,
        meeting: MeetingPoint,
        *,
        rank: int,
        numbers: Sequence[int],
        key: str,
        backend: str,
        timeout_s: float,
        form_timeout_s: float,
    ) -> None:
        """Form process groups; all their ranks do so at the same time.

        The groups are Gloo's always, and NCCL's beside it where asked for.

        Args:
            meeting: Where.
            rank: This rank within the groups.
            numbers: The number of each rank in the team, by which errors call it; 2 or more.
            key: Names the groups in the store; no others may ever have used it there.
            backend: ``"gloo"`` or ``"nccl"``.
            timeout_s: Default deadline of operations.
            form_timeout_s: Deadline for forming the groups.
        """
        super().__init__(
            rank=rank,
            world_size=len(numbers),
            backend=backend,
            timeout_s=timeout_s,
            numbers=numbers,
        )
        self._meeting = meeting
        self._key = key
        self._store = store = PrefixStore(key, meeting.store)
        notices = PrefixStore("notices", store)
        self._board = StoreNotices(notices, self.numbers, meeting.host_rank)
        waits = PrefixStore("waits", store)
        self._waits = StoreNotices(waits, self.numbers, meeting.host_rank)
        with Wires.opened(timeout_s) as self._wires:
            self._gloo: ProcessGroupGloo | None = form_gloo(
                PrefixStore("gloo", store), rank, len(numbers), meeting.devices, form_timeout_s
            )
        self._nccl_store: Any = None
        self._nccl: Any = self._form_nccl(form_timeout_s) if backend == "nccl" else None
        self._busy = False
        self._heard_s = 0.0  # when the store answered last, in an operation of long patience
        self._asks_at = math.inf
        self._broken_s = math.inf  # when the operation under way was first seen without a peer
        #: The kinds and sizes of the latest exchanges, in order; the same on every rank.
        self._announced: dict[tuple[str, int], None] = {}
        self._cell = bytearray(_CELL_BYTES)
        self._cells = bytearray(_CELL_BYTES * self.world_size)
        #: Where the ranks' payloads begin.
        self._starts = range(_HEADER.size, len(self._cells), _CELL_BYTES)
        self._cell_tensor = torch.frombuffer(self._cell, dtype=torch.uint8)
        self._cells_tensor = torch.frombuffer(self._cells, dtype=torch.uint8)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        meeting.hold()
        leave_behind_in_children(self)

    def find_absent(self) -> frozenset[int] | None:
        """Return who has not said that it waits in this call, as this rank now does.

        Gloo does not tell for whom it waits, so ranks that wait for long say so in the store.
        """
        number = self._current[0]
        own = Notice(number, 0.0, "")
        told = self._waits.read() if self._waits.post(self.number, own) else None
        if told is None:
            return None
        return frozenset(n for n in self.numbers if n not in told or told[n].number < number)

    def leave_behind(self) -> None:
        """Close the connections in a forked child; see ``NotInherited``."""
        if not self._closed:
            self._closed = True
            never_destroy(vars(self).copy())
            self._gloo = self._nccl = None
            self._busy = False
            self._wires.leave_behind()
            self._meeting.leave_behind()
            self._end(
                CollectiveError(
                    f"this process was forked from rank {self.rank}, which keeps the connections; "
                    "call collectives in the rank itself"
                )
            )

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def _all_reduce(self, flat: Tensor, call: Call) -> None:
        """Sum a tensor that fits into a cell."""
        self._swap_cells(call, _bytes_of(flat))
        flat.copy_(reduce(torch.add, self._payloads(flat)))

    def _all_reduce_each(self, flats: Sequence[Tensor], calls: Sequence[Call]) -> None:
        if len(flats) == 1 and flats[0].nbytes <= _PAYLOAD_BYTES:
            self._all_reduce(flats[0], calls[0])
            return
        how = options(AllreduceOptions, calls[0].timeout_s + _GRACE_S)
        self._run_on(calls, flats, lambda tensor, group: group.allreduce([tensor], how))

    def _reduce_scatter_parts(self, flat: Tensor, call: Call) -> bool:
        if self._nccl is None or flat.device.type != "cuda" or flat.nbytes <= _PAYLOAD_BYTES:
            return super()._reduce_scatter_parts(flat, call)  # Gloo's own one is not faster
        part = flat.chunk(self.world_size)[self.rank]
        how = options(ReduceScatterOptions, call.timeout_s + _GRACE_S)
        self._run_on(
            [call], [flat], lambda whole, group: group._reduce_scatter_base(part, whole, how)
        )
        return True

    def _broadcast(self, flat: Tensor, src: int, call: Call) -> None:
        if flat.nbytes <= _PAYLOAD_BYTES:
            self._swap_cells(call, _bytes_of(flat))
            flat.copy_(self._payloads(flat)[src])
            return
        how = options(BroadcastOptions, call.timeout_s + _GRACE_S, src)
        self._run_on([call], [flat], lambda tensor, group: group.broadcast([tensor], how))

    def _all_gather_parts(self, flat: Tensor, call: Call) -> None:
        def own(whole: Tensor) -> Tensor:
            return whole.chunk(self.world_size)[self.rank]

        if own(flat).nbytes <= _PAYLOAD_BYTES:
            self._swap_cells(call, _bytes_of(own(flat)))
            flat.copy_(torch.cat(self._payloads(own(flat))))
            return
        how = options(AllgatherOptions, call.timeout_s + _GRACE_S)
        self._run_on(
            [call], [flat], lambda part, group: group._allgather_base(part, own(part), how)
        )

    def _all_gather_rows(self, row: Sequence[float], call: Call) -> list[list[float]]:
        form = struct.Struct(f"={len(row)}d")
        if form.size <= _PAYLOAD_BYTES:
            self._swap_cells(call, form.pack(*row))
            return [list(form.unpack_from(self._cells, start)) for start in self._starts]
        self._swap_cells(call, b"")
        return self._gather_long_row(row, call)

    def _split(self, members: tuple[int, ...], key: str, call: Call) -> Communicator | None:
        if self.rank not in members:
            return None
        try:
            return GroupCommunicator(
                self._meeting,
                rank=members.index(self.rank),
                numbers=self._numbers_of(members),
                key=f"{self._key}/{key}",
                backend=self.backend,
                timeout_s=self.timeout_s,
                form_timeout_s=call.timeout_s,
            )
        except RuntimeError as error:
            raise PeerLostError(lost_message(self.number, call.what, first_line(error))) from None

    def _add_nccl(self, call: Call) -> str:
        failure = ""
        try:
            self._nccl = self._form_nccl(call.timeout_s)
        except (RuntimeError, ValueError) as error:  # torch raises the latter where it finds no GPU
            failure = first_line(error)
        # Those that have failed at once wait for those that first connect and then abort in vain.
        latest_s = 2 * call.timeout_s + ABORT_S
        told = self.all_gather_bytes(failure.encode(), what=call.what, timeout_s=latest_s)
        failures = dict(zip(self.numbers, told, strict=True))
        for number in [number for number, text in failures.items() if text]:
            self._end_nccl()
            return f"on rank {number}: {failures[number].decode()}"
        return ""

    def _form_nccl(self, form_timeout_s: float) -> Any:
        self._nccl_store = self._meeting.store
        place = (PrefixStore("nccl", self._store), self.rank, self.world_size)
        return form_nccl(*place, self.timeout_s, form_timeout_s)

    def _end_nccl(self) -> None:
        group, store = self._nccl, self._nccl_store
        self._nccl = self._nccl_store = None
        if group is not None:
            end_nccl(group, store)

    # ── cells ────────────────────────────────────────────────────────────────────────────────────

    def _swap_cells(self, call: Call, payload: bytes) -> None:
        """Give all ranks this rank's cell, and check that all are in the same call.

        Args:
            call: The call.
            payload: What to carry, of one length on all ranks; it must fit into a cell.
        """
        label = call.label.encode()  # the cell holds only its beginning
        _HEADER.pack_into(self._cell, 0, call.number, len(payload), zlib.crc32(label), label)
        self._cell[_HEADER.size : _HEADER.size + len(payload)] = payload
        how = options(AllgatherOptions, call.timeout_s + _GRACE_S)
        cell, cells = self._cell_tensor, self._cells_tensor
        self._run([call], [lambda group: group._allgather_base(cells, cell, how)])
        own = self._cell[: _HEADER.size]
        others = []
        for number, start in zip(self.numbers, self._starts, strict=True):
            header = self._cells[start - _HEADER.size : start]
            if header != own:
                count, _, _, theirs = _HEADER.unpack(header)
                others.append((number, name_call(theirs, count - call.number)))
        if others:
            text = mismatch_message(self.number, call.label, others)
            raise self._end(CollectiveMismatchError(text))

    def _payloads(self, like: Tensor) -> list[Tensor]:
        """Return what ranks' cells carry, as tensors of one kind; valid until the next swap."""
        return [
            torch.frombuffer(self._cells, dtype=like.dtype, count=like.numel(), offset=start)
            for start in self._starts
        ]

    def _announce(self, call: Call, num_bytes: int) -> None:
        """Check with all ranks before the first exchange of this kind and size."""
        known = (call.kind, num_bytes)
        if known not in self._announced:
            self._swap_cells(call, b"")
        self._announced.pop(known, None)
        self._announced[known] = None  # at the end: the one used last
        if len(self._announced) > _MAX_ANNOUNCED:
            del self._announced[next(iter(self._announced))]

    # ── running one operation ────────────────────────────────────────────────────────────────────

    def _run(
        self, calls: Sequence[Call], starts: Sequence[Callable[[Any], Work]], *, nccl: bool = False
    ) -> None:
        """Start operations, each while those before are under way, and wait for all.

        Args:
            calls: What is done; the deadline is that of the first.
            starts: Start them on the process group that they are given.
            nccl: Whether that is the NCCL group.

        Raises:
            CollectiveError: One of its kinds. The communicator has ended then.
        """
        try:
            self._carry_out(calls, starts, nccl=nccl)
        except CollectiveError as error:
            raise self._end(error) from None
        except BaseException:  # Ctrl-C, or a signal handler that raises
            self._end(CollectiveError(f"rank {self.number} was interrupted in {calls[0].what!r}"))
            raise

    def _run_on(
        self, calls: Sequence[Call], flats: Sequence[Tensor], start: Callable[[Tensor, Any], Work]
    ) -> None:
        """Run an operation on each tensor where it lies, or on a copy in host memory.

        What goes over Gloo, and in which order, does not depend on where tensors lie: on another
        rank they may lie elsewhere.
        """
        for flat, call in zip(flats, calls, strict=True):
            self._announce(call, flat.nbytes)
        if self._nccl is not None and all(flat.device.type == "cuda" for flat in flats):
            there = flats
            self._run(calls, [partial(start, flat) for flat in flats], nccl=True)
        else:
            there = self._on_host(flats)
            self._run(calls, [partial(start, part) for part in there])
        for flat, part in zip(flats, there, strict=True):
            if part is not flat:
                flat.copy_(part, non_blocking=True)
        _wait_for(flats)  # the next exchange writes to the scratch memory

    def _on_host(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, those of other devices as copies in one buffer."""
        sizes = [0 if flat.device.type == "cpu" else flat.nbytes for flat in flats]
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        if self._scratch.numel() < ends[-1]:
            pinned = any(kind_of(flat.device).pins_memory for flat in flats)
            self._scratch = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
        parts = []
        for flat, size, start in zip(flats, sizes, [0, *ends], strict=False):
            part = self._scratch[start : start + size].view(flat.dtype) if size else flat
            parts.append(part if part is flat else part.copy_(flat, non_blocking=True))
        _wait_for(flats)
        return parts

    def _carry_out(
        self, calls: Sequence[Call], starts: Sequence[Callable[[Any], Work]], *, nccl: bool
    ) -> None:
        """Run operations to their end or to their deadline; see ``_run``.

        A Work handle keeps connections open, and a survivor that keeps them lets ranks hang which
        are not its neighbours. So handles are deleted in every frame that an exception could carry
        away, and the groups are let go before anybody learns of a failure.
        """
        self._heard_s = started = self._start(calls[0])
        self._broken_s = math.inf
        is_long = calls[0].timeout_s > self.timeout_s
        self._asks_at = started + self.timeout_s / _ASKS if is_long else math.inf
        self._busy = True
        works: list[Work] = []
        failure, cause = "", Cause.TIMED_OUT  # unless the process group says otherwise
        done = 0
        try:
            works.extend(start(self._nccl if nccl else self._gloo) for start in starts)
            wait = self._poll if nccl else self._wait
            while wait(works[done], calls[0], started):
                done += 1
                if done == len(works):
                    self._busy = False
                    return
        except RuntimeError as error:
            self._busy = not all(work.is_completed() for work in works)
            failure, cause = first_line(error), cause_of(error, works)
        finally:
            works.clear()
            self._wait_over(succeeded=not self._busy and done == len(calls))
        waited_s = time.monotonic() - started
        raise self._explain(calls[done], calls, failure, cause, waited_s)

    def _release(self) -> None:
        """End the groups, also during another thread's operation; idempotent."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        groups = [self._gloo]
        self._gloo = None
        if self._busy:
            # Ending a group waits for the operation that it is still in: until its connections are
            # cut, its peers have gone, or its own timeout. Not a daemon thread: one that comes out
            # of C++ while the interpreter shuts down aborts the process.
            self._busy = False
            self._wires.cut()
            threading.Thread(target=groups.clear, name="evener-release").start()
        # Last: an abort may take ABORT_S, and peers learn by the cut connections that we gave up.
        self._end_nccl()

    def _forget(self) -> None:
        """Release the store, in which peers read why this rank gave up.

        Before the groups on an orderly end: a peer that sees its connection close then finds no
        server, rather than one that goes while it answers, over which torch prints a stack trace.
        """
        meeting = self._meeting
        del self._board, self._waits, self._meeting, self._store
        meeting.release()

    def _explain(
        self, call: Call, calls: Sequence[Call], failure: str, cause: Cause, waited_s: float
    ) -> CollectiveError:
        """End the groups and find the cause, with the help of the notices.

        ``call`` of ``calls`` has failed; ``failure`` is what the process group said of it.
        """
        number = self.number
        if self._gloo is None:  # another thread has let it go
            return CollectiveError(closed_message(number, call.what))
        if cause is not Cause.TIMED_OUT:
            self._release()
            if not self._board.read():  # otherwise a rank gave up waiting, and so closed them
                if cause is Cause.LOST:
                    return PeerLostError(lost_message(number, call.what, failure))
                return CollectiveError(f"rank {number} failed in {call.what!r}: {failure}")
        self._board.post(number, Notice(call.number, waited_s, call.what))
        self._release()
        return self._board.explain(number, call, calls, waited_s)

    @property
    def _left_s(self) -> float:
        """Return the seconds left for the operation; none once the groups are let go."""
        return 0.0 if self._gloo is None else super()._left_s

    @property
    def _is_cut_off(self) -> bool:
        """Return whether the store was silent for the default deadline; long waits ask it.

        A network that is cut closes no connection, so nothing else would tell.
        """
        if time.monotonic() < self._asks_at:
            return False
        if self._board.read() is not None:
            self._heard_s = time.monotonic()
        self._asks_at = time.monotonic() + self.timeout_s / _ASKS
        return time.monotonic() - self._heard_s >= self.timeout_s

    def _check_wires(self) -> None:
        """Raise ``RuntimeError`` where an operation goes on long after a connection was closed.

        Gloo notices the end of a neighbour alone, and rarely not even that.
        """
        now = time.monotonic()
        self._broken_s = min(self._broken_s, now) if self._wires.is_broken else math.inf
        if now - self._broken_s >= _CLOSED_S:
            raise RuntimeError("Connection closed by peer")

    def _wait(self, work: Work, call: Call, started: float) -> bool:
        """Return whether ``work`` succeeded in time; raises ``RuntimeError`` where it failed.

        Args:
            work: Waited for.
            call: The call that it belongs to.
            started: When that began, on the monotonic clock.
        """
        try:
            while True:
                left_s = self._left_s
                if left_s < _SHORTEST_S or self._is_cut_off:
                    return work.is_completed() and bool(work.wait())
                try:
                    return bool(work.wait(timedelta(seconds=min(left_s, _SLICE_S))))
                except RuntimeError:
                    if work.is_completed():
                        return bool(work.wait())  # raises why it failed
                    self._check_wires()
                    self._still_waits(call, started)
        finally:
            del work

    def _poll(self, work: Work, call: Call, started: float) -> bool:
        """Wait for NCCL, whose ``wait`` returns before the device is done.

        NCCL does not notice that a peer has died, but Gloo's connection to it closes.
        """
        looks_at = started + _SLICE_S
        try:
            while not work.is_completed():
                if self._left_s <= 0:
                    return False
                if time.monotonic() >= looks_at:
                    looks_at = time.monotonic() + _SLICE_S
                    self._check_wires()
                    self._still_waits(call, started)
                time.sleep(20e-6)
            return bool(work.wait())
        finally:
            del work


def _wait_for(flats: Sequence[Tensor]) -> None:
    """Wait once for all copies between devices and the host."""
    for device in {flat.device for flat in flats if flat.device.type != "cpu"}:
        kind_of(device).finish(device)


def _bytes_of(flat: Tensor) -> bytes:
    return flat.cpu().view(torch.uint8).numpy().tobytes()
