"""The transport over ``torch.distributed`` process groups: Gloo between hosts, NCCL on CUDA."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from evener.comm.base import (
    CELL_BYTES,
    Communicator,
    Sum,
    Transport,
    Wait,
    keep_latest,
)
from evener.comm.c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
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
from evener.comm.calls import Call
from evener.comm.causes import Cause, cause_of
from evener.comm.forks import never_destroy
from evener.comm.messages import closed_message, first_line, lost_message
from evener.comm.network import MeetingPoint
from evener.comm.notices import Notice, NoticeBoard, StoreNotices
from evener.comm.rounding import BLOCK, pack_sum, packed_bytes, unpack
from evener.comm.wires import Wires, list_sockets
from evener.devices import kind_of
from evener.errors import CollectiveError, PeerLostError

# Gloo aborts a process that receives more bytes than it expected. So small payloads travel in cells
# of one size that name their content. Larger exchanges are announced by such a cell the first time
# that their size occurs.
#: At which tensors of any dtype may begin in a buffer of bytes.
_ALIGNMENT = 64

# Gloo closes all connections when an operation of its own times out, which peers cannot tell from a
# death. It gets this much longer than the deadline, in which a rank can post that it gave up.
_GRACE_S = 0.25
_SLICE_S = 0.25  # waits are cut so that signal handlers of Python run in between
# An operation may continue so long after a peer has closed: the peer may have had all of its data,
# while the others still exchange.
_CLOSED_S = 5.0
_SHORTEST_S = 0.001  # a wait of 0 ms would mean for ever


def form_groups(
    meeting: MeetingPoint,
    *,
    rank: int,
    numbers: Sequence[int],
    key: str,
    timeout_s: float,
    form_timeout_s: float,
) -> Communicator:
    """Form a process group, and a communicator over it; all its ranks do so at the same time.

    Args:
        meeting: Where.
        rank: This rank within the groups.
        numbers: The number of each rank in the team, by which errors call it; 2 or more.
        key: Names the groups in the store; no others may ever have used it there.
        timeout_s: Default deadline of operations.
        form_timeout_s: Deadline for forming the groups.

    Raises:
        RuntimeError: A rank did not come.
    """
    meeting.meet(numbers[rank], numbers)
    transport = GroupTransport(meeting, rank, numbers, key, timeout_s, form_timeout_s)
    comm = Communicator(transport, timeout_s=timeout_s)
    transport.start(comm)
    return comm


@final
class GroupTransport(Transport):
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

    CUDA and other device tensors on Gloo go through a host copy, pinned where that is faster. With
    NCCL, calls still block the host until the result is there, so that every wait has a deadline.
    """

    def __init__(
        self,
        meeting: MeetingPoint,
        rank: int,
        numbers: Sequence[int],
        key: str,
        timeout_s: float,
        form_timeout_s: float,
    ) -> None:
        """Form Gloo's group; see ``form_groups``."""
        whole = bytearray(CELL_BYTES * len(numbers))
        starts = range(0, len(whole), CELL_BYTES)
        cells = [memoryview(whole)[start : start + CELL_BYTES] for start in starts]
        super().__init__("gloo", rank, numbers, [cells])
        self._whole = torch.frombuffer(whole, dtype=torch.uint8)
        self._meeting, self._key, self._timeout_s = meeting, key, timeout_s
        self._store = store = PrefixStore(key, meeting.store)
        place = (self.numbers, meeting.host_rank)
        self.board: NoticeBoard = StoreNotices(PrefixStore("notices", store), *place)
        self._before, self._wires = list_sockets(), Wires()
        self._gloo: ProcessGroupGloo | None = form_gloo(
            PrefixStore("gloo", store), rank, len(numbers), meeting.devices, form_timeout_s
        )
        self._nccl_store: Any = None
        self._nccl: Any = None
        self._busy = False
        self._broken_s = math.inf  # when the operation under way was first seen without a peer
        #: The kinds and sizes of the latest exchanges, in order; the same on every rank. One that
        #: has been forgotten is announced again.
        self._announced: dict[tuple[object, ...], object] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._packed = torch.empty(0, dtype=torch.uint8)
        meeting.hold()

    def start(self, comm: Communicator) -> None:
        """Find out which connections are Gloo's; see the base class."""
        exchange = partial(comm.all_gather_bytes, what="connections of the group")
        self._wires = Wires.between(exchange, before=self._before, silence_s=self._timeout_s)

    def close_in_child(self) -> None:
        """Close the connections in a forked child; see ``NotInherited``."""
        never_destroy(vars(self).copy())
        self._gloo = self._nccl = None
        self._wires.close_in_child()
        self._meeting.close_in_child()

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def _swap(self, cells: Sequence[memoryview], wait: Wait, call: Call) -> None:
        how = options(AllgatherOptions, call.timeout_s + _GRACE_S)
        whole = self._whole
        own = whole.chunk(len(self.numbers))[self.rank]
        self._run(wait, [call], [lambda group: [group._allgather_base(whole, own, how)]])

    def sum_each(self, sums: Sequence[Sum], wait: Wait) -> None:
        """Form sums; see the base class."""
        how = options(AllreduceOptions, wait.call.timeout_s + _GRACE_S)
        exact = []
        for one in sums:
            if one.lost is None:
                exact.append(one)
            else:
                self._sum_rounded(one.flat, one.lost, one.bits, wait, one.call)
        if exact:
            calls, flats = [one.call for one in exact], [one.flat for one in exact]
            self._run_on(wait, calls, flats, lambda flat, group: [group.allreduce([flat], how)])

    @property
    def can_round(self) -> bool:
        """Return true, on any host; see the base class."""
        return True

    def _sum_rounded(self, flat: Tensor, lost: Tensor, bits: int, wait: Wait, call: Call) -> None:
        """Sum a tensor that travels in few bits; see ``Communicator.all_reduce``.

        Each rank adds up one part in float32, of which all others send it theirs, and gives the
        rounded sum to all. So no sum is formed in few bits, and each number is rounded twice.
        """
        num_ranks = len(self.numbers)
        size = -(-flat.numel() // (num_ranks * BLOCK)) * BLOCK
        both = self._memory_for(2 * num_ranks * packed_bytes(size, bits), flat.device)
        both = both.view(2, num_ranks, -1)
        # Fewer than ranks, if there is little.
        parts, losses = torch.split(flat, size), torch.split(lost, size)
        for rank, (part, loss) in enumerate(zip(parts, losses, strict=True)):
            if rank != self.rank:
                pack_sum(part, loss, [], bits, both[0][rank])
        self._swap_parts(both, wait, call)
        if self.rank < len(parts):
            others = [row for rank, row in enumerate(both[1]) if rank != self.rank]
            pack_sum(parts[self.rank], losses[self.rank], others, bits, both[0][self.rank])
        self._gather(both[0].view(-1), wait, call)
        for part, row in zip(parts, both[0], strict=False):
            unpack(row, bits, part)

    def _memory_for(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory for packed parts, sent and received.

        It is kept: new memory takes longer than a sum.
        """
        if self._packed.numel() < num_bytes or self._packed.device != device:
            self._packed = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._packed[:num_bytes]

    def _swap_parts(self, both: Tensor, wait: Wait, call: Call) -> None:
        """Send row ``r`` of the first half to rank ``r``; get its own from it in the second."""
        how = options(AllToAllOptions, call.timeout_s + _GRACE_S)

        def start(tensor: Tensor, group: Any) -> list[Work]:
            sent, received = tensor.chunk(2)
            if self._crosses(group):
                peer = 1 - self.rank
                return self._cross(group, sent.chunk(2)[peer], received.chunk(2)[peer], call)
            return [group.alltoall_base(received, sent, [], [], how)]

        self._run_on(wait, [call], [both.view(-1)], start)

    def _crosses(self, group: Any) -> bool:
        """Whether parts of two ranks travel at the same time.

        Gloo may send a rank's part only once its peer is ready for it. In an all-to-all, and in an
        all-gather of two, the word that it is ready may stand behind a part of its own, on the same
        connection: then one part travels after the other, and the link is half as fast.
        """
        return len(self.numbers) == 2 and group is not self._nccl

    def _cross(self, group: Any, own: Tensor, others: Tensor, call: Call) -> list[Work]:
        """Give one tensor to the peer, and get one from it, over connections of their own."""
        works = []
        for src in range(2):
            how = options(BroadcastOptions, call.timeout_s + _GRACE_S, src)
            works.append(group.broadcast([own if src == self.rank else others], how))
        return works

    def sum_parts(self, flat: Tensor, wait: Wait) -> bool:
        """Sum this rank's part; see the base class."""
        if self._nccl is None or flat.device.type != "cuda":
            return super().sum_parts(flat, wait)  # Gloo's own one is not faster
        part = flat.chunk(len(self.numbers))[self.rank]
        how = options(ReduceScatterOptions, wait.call.timeout_s + _GRACE_S)
        self._run_on(
            wait,
            wait.calls,
            [flat],
            lambda whole, group: [group._reduce_scatter_base(part, whole, how)],
        )
        return True

    def copy(self, flat: Tensor, src: int, wait: Wait) -> None:
        """Copy from one rank; see the base class."""
        how = options(BroadcastOptions, wait.call.timeout_s + _GRACE_S, src)
        self._run_on(
            wait, wait.calls, [flat], lambda tensor, group: [group.broadcast([tensor], how)]
        )

    def gather_parts(self, flat: Tensor, wait: Wait) -> None:
        """Gather parts; see the base class."""
        self._gather(flat, wait, wait.call)

    def _gather(self, flat: Tensor, wait: Wait, call: Call) -> None:
        how = options(AllgatherOptions, call.timeout_s + _GRACE_S)

        def start(whole: Tensor, group: Any) -> list[Work]:
            parts = whole.chunk(len(self.numbers))
            if self._crosses(group):
                return self._cross(group, parts[self.rank], parts[1 - self.rank], call)
            return [group._allgather_base(whole, parts[self.rank], how)]

        self._run_on(wait, [call], [flat], start)

    def split(self, members: tuple[int, ...], key: str, wait: Wait) -> Transport | None:
        """Form groups of some ranks; see the base class."""
        if self.rank not in members:
            return None
        try:
            return GroupTransport(
                self._meeting,
                members.index(self.rank),
                [self.numbers[member] for member in members],
                f"{self._key}/{key}",
                self._timeout_s,
                wait.call.timeout_s,
            )
        except RuntimeError as error:
            text = lost_message(self.number, wait.call.what, first_line(error))
            raise PeerLostError(text) from None

    def add_nccl(self, timeout_s: float) -> None:
        """Form NCCL's group; see the base class."""
        self._nccl_store = self._meeting.store
        place = (PrefixStore("nccl", self._store), self.rank, len(self.numbers))
        self._nccl = form_nccl(*place, self._timeout_s, timeout_s)

    def drop_nccl(self) -> None:
        """End NCCL's group; see the base class."""
        group, store = self._nccl, self._nccl_store
        self._nccl = self._nccl_store = None
        if group is not None:
            end_nccl(group, store)

    def _announce(self, wait: Wait, call: Call, num_bytes: int) -> None:
        """Check with all ranks before the first exchange of this kind and size."""
        key = (call.kind, num_bytes)
        keep_latest(self._announced, key, lambda: wait.announce(call))

    # ── running one operation ────────────────────────────────────────────────────────────────────

    def _run_on(
        self,
        wait: Wait,
        calls: Sequence[Call],
        flats: Sequence[Tensor],
        start: Callable[[Tensor, Any], list[Work]],
    ) -> None:
        """Run an operation on each tensor where it lies, or on a copy in host memory.

        What goes over Gloo, and in which order, does not depend on where tensors lie: on another
        rank they may lie elsewhere.
        """
        for flat, call in zip(flats, calls, strict=True):
            self._announce(wait, call, flat.nbytes)
        if self._nccl is not None and all(flat.device.type == "cuda" for flat in flats):
            there = flats
            self._run(wait, calls, [partial(start, flat) for flat in flats], nccl=True)
        else:
            there = self._on_host(flats)
            self._run(wait, calls, [partial(start, part) for part in there])
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

    def _run(
        self,
        wait: Wait,
        calls: Sequence[Call],
        starts: Sequence[Callable[[Any], list[Work]]],
        *,
        nccl: bool = False,
    ) -> None:
        """Start operations, each while those before are under way, and wait for all.

        A Work handle keeps connections open, and a survivor that keeps them lets ranks hang which
        are not its neighbours. So handles are deleted in every frame that an exception could carry
        away, and the groups are released before a failure is raised.

        Args:
            wait: What is under way.
            calls: The call of each.
            starts: Start each on the process group that it is given; it may have several parts.
            nccl: Whether that is the NCCL group.
        """
        self._broken_s = math.inf
        self._busy = True
        works: list[Work] = []
        of: list[Call] = []  # the call of each work
        failure, cause = "", Cause.TIMED_OUT  # unless the process group reports otherwise
        done = 0
        try:
            for call, start in zip(calls, starts, strict=True):
                of.append(call)
                works.extend(start(self._nccl if nccl else self._gloo))
                of.extend([call] * (len(works) - len(of)))
            succeeds = self._poll if nccl else self._wait
            while succeeds(works[done], wait):
                done += 1
                if done == len(works):
                    self._busy = False
                    return
        except RuntimeError as error:
            self._busy = not all(work.is_completed() for work in works)
            failure, cause = first_line(error), cause_of(error)
        finally:
            works.clear()
        raise self._explain(wait, of[done], failure, cause)

    def cut(self) -> None:
        """End the groups, also during another thread's operation; see the base class."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._packed = torch.empty(0, dtype=torch.uint8)
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
        self.drop_nccl()

    def forget(self) -> None:
        """Release the store, in which peers read why this rank gave up.

        Before the groups on an orderly end: a peer that sees its connection close then finds no
        server, rather than one that goes while it answers, over which torch prints a stack trace.
        """
        meeting = self._meeting
        del self.board, self._meeting, self._store
        meeting.release()

    def _explain(self, wait: Wait, call: Call, failure: str, cause: Cause) -> CollectiveError:
        """End the groups and find the cause, with the help of the notices.

        ``call`` has failed; ``failure`` is the process group's message.
        """
        number, waited_s = self.number, wait.waited_s
        if wait.has_ended:  # by another thread
            return CollectiveError(closed_message(number, call.what))
        if cause is not Cause.TIMED_OUT:
            self.cut()
            notices = self.board.read()
            if not notices:  # otherwise a rank gave up waiting, and so closed them
                if cause is Cause.LOST:
                    if notices is not None:
                        failure = self.board.share_loss(failure, is_known=False)
                    return PeerLostError(lost_message(number, call.what, failure))
                return CollectiveError(f"rank {number} failed in {call.what!r}: {failure}")
        self.board.post(number, Notice(call.number, waited_s, call.what))
        self.cut()
        return self.board.explain(number, call, wait.together, waited_s)

    def explain_by(self, board: NoticeBoard) -> None:
        """Use another board; see the base class."""
        self.board = board

    def begin_watch(self) -> None:
        """Let ``watch`` count from now."""
        self._broken_s = math.inf

    def watch(self, wait: Wait) -> None:
        """Watch the peers while another transport carries out the call.

        Raises:
            CollectiveError: One has been gone for long.
        """
        try:
            self._check_wires()
        except RuntimeError as error:
            raise self._explain(wait, wait.call, first_line(error), Cause.LOST) from None

    def _check_wires(self) -> None:
        """Raise ``RuntimeError`` where an operation continues long after a connection was closed.

        Gloo notices the end of a neighbour alone, and rarely not even that.
        """
        now = time.monotonic()
        self._broken_s = min(self._broken_s, now) if self._wires.is_broken else math.inf
        if now - self._broken_s >= _CLOSED_S:
            raise RuntimeError("Connection closed by peer")

    def _wait(self, work: Work, wait: Wait) -> bool:
        """Return whether ``work`` succeeded in time; raises ``RuntimeError`` where it failed."""
        try:
            while True:
                left_s = wait.left_s
                if left_s < _SHORTEST_S:
                    return work.is_completed() and bool(work.wait())
                try:
                    return bool(work.wait(timedelta(seconds=min(left_s, _SLICE_S))))
                except RuntimeError:
                    if work.is_completed():
                        return bool(work.wait())  # raises why it failed
                    self._check_wires()
                    wait.still_waits()
        finally:
            del work

    def _poll(self, work: Work, wait: Wait) -> bool:
        """Wait for NCCL, whose ``wait`` returns before the device is done.

        NCCL does not notice that a peer has died, but Gloo's connection to it closes.
        """
        looks_at = time.monotonic() + _SLICE_S
        try:
            while not work.is_completed():
                if wait.left_s <= 0:
                    return False
                if time.monotonic() >= looks_at:
                    looks_at = time.monotonic() + _SLICE_S
                    self._check_wires()
                    wait.still_waits()
                time.sleep(20e-6)
            return bool(work.wait())
        finally:
            del work


def _wait_for(flats: Sequence[Tensor]) -> None:
    """Wait once for all copies between devices and the host."""
    for device in {flat.device for flat in flats if flat.device.type != "cpu"}:
        kind_of(device).finish(device)
