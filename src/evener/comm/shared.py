"""The communicator of ranks on one host that exchange through memory which all of them map."""

import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import reduce
from typing import TypeVar, final

import torch
from torch import Tensor

from evener.comm.base import Call, Communicator, WaitListener
from evener.comm.forks import NotInherited, leave_behind_in_children
from evener.comm.messages import (
    closed_message,
    lost_message,
    mismatch_message,
    name_call,
    name_ranks,
)
from evener.comm.notices import Notice
from evener.comm.shared_memory import ELSEWHERE, NOWHERE, MemoryPlace, SharedMemory
from evener.comm.shared_offers import Joined, MemoryOffer, Spot, find_obstacle
from evener.comm.shared_pages import (
    KEEPS_ORDER,
    PAYLOAD_BYTES,
    STAGE_BYTES,
    Header,
    PageNotices,
    pack_header,
    payload_start,
    unpack_header,
)
from evener.comm.shared_slots import Slots, steps
from evener.devices import kind_of
from evener.errors import CollectiveError, CollectiveMismatchError, PeerLostError

#: How long a rank spins before it sleeps. Waking up takes about half as long, so spinning costs at
#: most twice what it can save.
_SPIN_S = 100e-6
_SLICE_S = 0.25  # sleep is cut so that deadlines can be shortened by another thread
# A rank may have left because another one died, whose end shows a moment later.
_CAUSE_S = 0.1
#: So many of the latest sets of views are kept.
_MAX_KEPT = 256


T = TypeVar("T")


@final
class SharedCommunicator(Communicator, NotInherited):
    """Ranks in processes of one host, through memory that all of them map.

    Sums are formed in rank order, each element by one rank, in the tensor's dtype, and copied from
    there. A tensor from ``allocate`` is exchanged where it lies; any other is copied into shared
    memory and back, piece by piece; up to 8 KiB travel with the announcement of the call.

    A call is one to three barriers. A rank that arrives at a barrier writes that on its own page,
    spins for a short time, and then sleeps until the last rank to arrive wakes it up. Every call
    tells all ranks what it is, so a mismatch is noticed at once.

    It stands on another communicator: ranks have found one another there, splits are formed there,
    and NCCL moves CUDA tensors there once it was added.
    """

    def __init__(self, base: Communicator, joined: Joined) -> None:
        """Adopt the resources that ``share_memory`` has formed.

        Args:
            base: Joins the same ranks; it is closed with this one.
            joined: What joins them beside it.
        """
        super().__init__(
            rank=base.rank,
            world_size=base.world_size,
            backend="nccl" if base.backend == "nccl" else "shared",
            timeout_s=base.timeout_s,
            numbers=base.numbers,
        )
        self._base = base
        self._pages, self._links, self._memory, spins = joined
        self._own = self._pages[base.rank]
        self._others = [(rank, page) for rank, page in enumerate(self._pages) if rank != base.rank]
        self._memory.use()
        self._spins = spins and KEEPS_ORDER
        self._board = PageNotices(self.numbers, self._pages)
        self._num_barriers = 0  # arrived at
        self._num_passed = 0
        self._num_swaps = 0
        self._started = 0.0
        self._busy = False
        self._is_released = False
        self._closing = threading.RLock()
        self._pinned_by: torch.device | None = None
        #: Views of tensors and cells by where they lie, the latest last.
        self._kept: dict[tuple[object, ...], Slots] = {}
        self._kept_cells: dict[tuple[object, ...], list[Tensor]] = {}
        #: By call and own place: where tensors lie that need not be announced any more.
        self._kept_places: dict[tuple[object, ...], list[MemoryPlace]] = {}
        leave_behind_in_children(self)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in shared memory; see ``Communicator.allocate``.

        Elsewhere for other devices than the CPU, and where no more memory can be shared: then the
        tensor is copied on its way.
        """
        size = numel * dtype.itemsize
        if device.type == "cpu" and size > 0 and not self.has_ended:
            with suppress(OSError):
                return self._memory.allocate(size).view(dtype)
        return super().allocate(numel, dtype, device)

    def report_waits_to(self, listener: WaitListener) -> None:
        """Report long waits; see ``Communicator.report_waits_to``."""
        super().report_waits_to(listener)
        self._base.report_waits_to(listener)

    def find_absent(self) -> frozenset[int] | None:
        """Return who has not arrived at the barrier under way; see the base class."""
        arrived = {
            rank: page.arrived if KEEPS_ORDER else self._links.count(rank)
            for rank, page in self._others
        }
        return frozenset(self.numbers[r] for r, n in arrived.items() if n < self._num_barriers)

    def leave_behind(self) -> None:
        """Close connections and memory in a forked child; see ``NotInherited``."""
        self._closing = threading.RLock()  # a thread of the parent may have held it
        if not self._is_released:
            self._is_released = self._closed = True
            self._links.close()
            self._memory.leave_behind()
            text = f"this process was forked from rank {self.rank}, which keeps the connections; "
            self._end(CollectiveError(f"{text}call collectives in the rank itself"))

    def _begin(self, kind: str, what: str, timeout_s: float | None, size: str) -> Call:
        # Waking up takes longer than this rank's work until it arrives, so it starts now.
        number = self._num_barriers + 1
        if self._spins and self._are_here(number):
            self._wake_all(number)
        return super()._begin(kind, what, timeout_s, size)

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def _all_reduce(self, flat: Tensor, call: Call) -> None:
        self._all_reduce_each([flat], [call])

    def _all_reduce_each(self, flats: Sequence[Tensor], calls: Sequence[Call]) -> None:
        if self.backend == "nccl" and all(flat.device.type == "cuda" for flat in flats):
            with self._under_way(calls[0]):
                pairs = [(call.what, flat) for call, flat in zip(calls, flats, strict=True)]
                self._base.all_reduce_each(pairs, timeout_s=calls[0].timeout_s)
            return
        with self._under_way(calls[0]):
            for flat, call in zip(flats, calls, strict=True):
                is_open = self._sum(flat, call)
            if is_open:  # the next call's announcement is a barrier, too
                self._meet(calls[-1])

    def _reduce_scatter_parts(self, flat: Tensor, call: Call) -> bool:
        with self._under_way(call):
            if self.backend == "nccl" and flat.device.type == "cuda":
                return self._base.reduce_scatter_parts(
                    flat, what=call.what, timeout_s=call.timeout_s
                )
            # If others may still work on it, the next call's barrier ends that.
            return self._sum(flat, call, for_owner=True)

    def _broadcast(self, flat: Tensor, src: int, call: Call) -> None:
        with self._under_way(call):
            if self.backend == "nccl" and flat.device.type == "cuda":
                self._base.broadcast(flat, src, what=call.what, timeout_s=call.timeout_s)
            elif flat.nbytes <= PAYLOAD_BYTES:
                cells = self._cells(flat)
                if self.rank == src:
                    cells[src].copy_(flat)
                self._swap(call, ELSEWHERE, flat.nbytes)
                flat.copy_(cells[src])
            else:
                self._collect(flat, [src], 0, flat.numel(), call)

    def _all_gather_parts(self, flat: Tensor, call: Call) -> None:
        with self._under_way(call):
            if self.backend == "nccl" and flat.device.type == "cuda":
                self._base.all_gather_parts(flat, what=call.what, timeout_s=call.timeout_s)
                return
            parts = flat.chunk(self.world_size)
            if parts[0].nbytes <= PAYLOAD_BYTES:
                cells = self._cells(parts[0])
                cells[self.rank].copy_(parts[self.rank])
                self._swap(call, ELSEWHERE, parts[0].nbytes)
                for part, cell in zip(parts, cells, strict=True):
                    part.copy_(cell)
                return
            size = parts[0].numel()
            known = self._known_places(flat, call)
            if known is None:
                self._collect(flat, range(self.world_size), size, size, call)
            else:
                self._hand_out(flat, known, call)

    def _all_gather_rows(self, row: Sequence[float], call: Call) -> list[list[float]]:
        form = struct.Struct(f"={len(row)}d")
        if form.size > PAYLOAD_BYTES:
            return self._gather_long_row(row, call)
        with self._under_way(call):
            start = payload_start(self._parity)
            form.pack_into(self._own.content, start, *row)
            self._swap(call, ELSEWHERE, form.size)
            return [list(form.unpack_from(page.content, start)) for page in self._pages]

    def _split(self, members: tuple[int, ...], key: str, call: Call) -> Communicator | None:
        with self._under_way(call):
            part = self._base.split(members, name=key, timeout_s=call.timeout_s)
            if part is None:
                return None
            try:
                return share_memory(part, memory=self._memory)[0]
            except BaseException:
                part.close()
                raise

    def _add_nccl(self, call: Call) -> str:
        with self._under_way(call):
            return self._base.add_nccl(timeout_s=call.timeout_s)

    # ── large tensors ────────────────────────────────────────────────────────────────────────────

    def _sum(self, flat: Tensor, call: Call, *, for_owner: bool = False) -> bool:
        """Sum a tensor; whether in place, where others may be at it until the next barrier."""
        if flat.nbytes <= PAYLOAD_BYTES:
            cells = self._cells(flat)
            cells[self.rank].copy_(flat)
            self._swap(call, ELSEWHERE, flat.nbytes)
            flat.copy_(reduce(torch.add, cells))
            return False
        places = self._known_places(flat, call)
        if places is None:
            place = self._memory.find(flat)
            if place.offset == NOWHERE:
                self._stage(flat, 0)
            places = self._swap_places(place, flat, call)
        if any(each.offset == NOWHERE for each in places):
            self._sum_by_stages(flat, places, call)
            return False
        key = (for_owner, flat.numel(), flat.dtype, *(each.offset for each in places))
        slots = self._kept.pop(key, None)
        if slots is None:
            whole = self._tensors(places, flat)
            slots = Slots(whole, self.rank, equal_parts=for_owner)
        _keep(self._kept, key, slots)
        if for_owner:
            slots.sum_for_owner()
        else:
            slots.sum_for_all()
        return True

    def _sum_by_stages(self, flat: Tensor, places: Sequence[MemoryPlace], call: Call) -> None:
        """Sum a tensor that lies outside of shared memory on some rank, on this one or another.

        While a stage is summed, the next is copied into the other half.
        """
        whole = self._tensors(places, flat)
        step = STAGE_BYTES // flat.element_size()
        is_staged = places[self.rank].offset == NOWHERE
        for number, (start, stop) in enumerate(steps(flat.numel(), step)):
            slots = [
                each[number % 2][: stop - start] if place.offset == NOWHERE else each[start:stop]
                for each, place in zip(whole, places, strict=True)
            ]
            Slots(slots, self.rank, equal_parts=False).sum_for_all()
            if is_staged and stop < flat.numel():
                self._stage(flat[stop:], number + 1)
            self._meet(call)
            if is_staged:
                flat[start:stop].copy_(slots[self.rank])

    def _collect(
        self, flat: Tensor, sources: Sequence[int], stride: int, size: int, call: Call
    ) -> None:
        """Copy from each source what starts at ``stride`` times its rank in its own tensor.

        Args:
            flat: Where to, at the same place; uint8.
            sources: Ranks to copy from.
            stride: See above, in bytes.
            size: Bytes of each.
            call: The call.
        """
        own = flat[self.rank * stride :][:size]
        is_source = self.rank in sources
        place = self._memory.find(flat)
        if is_source and place.offset == NOWHERE:
            self._stage(own, 0)
        places = self._swap_places(place, flat, call)
        whole = self._tensors(places, flat)
        is_staged = any(places[source].offset == NOWHERE for source in sources)
        for number, (start, stop) in enumerate(steps(size, STAGE_BYTES if is_staged else size)):
            for source in sources:
                if source == self.rank:
                    continue
                target = flat[source * stride + start : source * stride + stop]
                if places[source].offset == NOWHERE:
                    target.copy_(whole[source][number % 2][: stop - start])
                else:
                    target.copy_(whole[source][source * stride + start :][: stop - start])
            if is_source and place.offset == NOWHERE and stop < size:
                self._stage(own[stop:], number + 1)
            self._meet(call)

    def _hand_out(self, flat: Tensor, places: Sequence[MemoryPlace], call: Call) -> None:
        """Write this rank's part into the others' tensors, where nobody uses it; then meet."""
        size = flat.numel() // self.world_size
        own = flat[size * self.rank :][:size]
        for rank, other in enumerate(self._tensors(places, flat)):
            if rank != self.rank:
                other[size * self.rank :][:size].copy_(own)
        self._meet(call)

    def _known_places(self, flat: Tensor, call: Call) -> list[MemoryPlace] | None:
        """Return where a tensor lies on each rank, if all ranks know, and no meeting is needed."""
        key = (call.kind, self._memory.find(flat).offset, flat.nbytes)
        return self._kept_places.get(key) if call.have_met else None

    def _swap_places(self, place: MemoryPlace, flat: Tensor, call: Call) -> list[MemoryPlace]:
        """Meet, and learn where a tensor lies on each rank.

        A place is never used again. So all ranks know the places from the same call on, the first
        one on this tensor; those of a rank outside of shared memory are never known.
        """
        places = self._swap(call, place)
        if call.have_met and all(each.offset != NOWHERE for each in places):
            _keep(self._kept_places, (call.kind, place.offset, flat.nbytes), places)
        return places

    def _stage(self, rest: Tensor, number: int) -> None:
        """Copy the front of what is left of a tensor into half ``number % 2`` of the stage."""
        kind = kind_of(rest.device)
        if self._pinned_by is None and kind.pins_memory:
            kind.pin(self._own.stage)
            self._pinned_by = rest.device
        half = self._own.stage[number % 2].view(rest.dtype)
        front = rest[: half.numel()]
        half[: front.numel()].copy_(front)

    def _tensors(self, places: Sequence[MemoryPlace], like: Tensor) -> list[Tensor]:
        """Return each rank's tensor, shape ``(len(like),)``, or the halves of its stage."""
        return [
            page.stage.view(like.dtype)
            if place.offset == NOWHERE
            else self._memory.view(number, place)[: like.nbytes].view(like.dtype)
            for number, page, place in zip(self.numbers, self._pages, places, strict=True)
        ]

    # ── cells ────────────────────────────────────────────────────────────────────────────────────

    @property
    def _parity(self) -> int:
        """Return which cell the next swap uses."""
        return self._num_swaps & 1

    def _cells(self, like: Tensor) -> list[Tensor]:
        """Return what ranks' cells carry in the next swap."""
        key = (self._parity, like.numel(), like.dtype)
        cells = self._kept_cells.pop(key, None)
        if cells is None:
            cells = [page.payload(*key) for page in self._pages]
        _keep(self._kept_cells, key, cells)
        return cells

    def _swap(self, call: Call, place: MemoryPlace, size: int = 0) -> list[MemoryPlace]:
        """Wait for all, check that they are in the same call, and return where tensors lie.

        Args:
            call: The call.
            place: Where this rank's tensor lies.
            size: Bytes of payload, which is in this rank's cell already.
        """
        label = call.label.encode()
        own = pack_header(Header(call.number, size, zlib.crc32(label), label))
        parity = self._parity
        self._num_swaps += 1
        self._own.write(parity, own, place)
        self._meet(call)
        others = []
        for rank, page in self._others:
            packed = page.header(parity)
            if packed != own:
                theirs = unpack_header(packed)
                text = name_call(theirs.label, theirs.number - call.number)
                others.append((self.numbers[rank], text))
        if others:
            raise CollectiveMismatchError(mismatch_message(self.number, call.label, others))
        return [page.place(parity) for page in self._pages]

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _under_way(self, call: Call) -> Iterator[None]:
        """Run a call: its deadline counts from now, and any error ends the communicator."""
        self._started = self._start(call)
        self._busy = True
        succeeded = False
        try:
            yield
            succeeded = True
        except CollectiveError as error:
            raise self._end(error) from None
        except BaseException as error:
            if self._ended is not None and isinstance(error, Exception):  # by another thread
                raise CollectiveError(closed_message(self.number, call.what)) from None
            how = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._end(
                CollectiveError(f"rank {self.number} was interrupted in {call.what!r} ({how})")
            )
            raise
        finally:
            self._wait_over(succeeded=succeeded)
            with self._closing:
                self._busy = False
                if self._is_released:
                    self._links.close()

    def _meet(self, call: Call) -> None:
        """Arrive at the next barrier, and wait for all."""
        self._num_barriers = number = self._num_barriers + 1
        self._own.arrive(number)
        if KEEPS_ORDER:
            self._own.fence()
        else:
            for rank, _ in self._others:
                self._links.wake(rank)
        if self._are_here(number):
            self._wake_all(number)  # this may be the last: see ``_sleep``
        elif not (self._spins and self._look_for_all(number)):
            self._sleep(number, call)
        for _, page in self._others:
            if 0 < page.ended <= number:  # it gave up here, just before the last has come
                raise self._explain(call, timed_out=False)
        self._num_passed = number

    def _wake_all(self, number: int) -> None:
        """Wake up who sleeps in a barrier."""
        for rank, page in self._others:
            if KEEPS_ORDER and page.asleep == number:  # else each byte counts
                self._links.wake(rank)

    def _are_here(self, number: int) -> bool:
        """Return whether all others have arrived at a barrier."""
        for rank, page in self._others:
            if (page.arrived if KEEPS_ORDER else self._links.count(rank)) < number:
                return False
        return True

    def _look_for_all(self, number: int) -> bool:
        """Spin until the others come; return whether they came.

        Not in a thread beside the one that trains, whose core it would take.
        """
        if threading.get_ident() != threading.main_thread().ident:
            return False
        until = time.perf_counter() + _SPIN_S
        while time.perf_counter() < until:
            if self._are_here(number):
                return True
            os.sched_yield()
        return False

    def _sleep(self, number: int, call: Call) -> None:
        """Sleep until all have arrived at a barrier."""
        try:
            while not (self._lie_down(number) or (self._spins and self._look_for_all(number))):
                if self._ended is not None or self._is_lost(number):
                    raise self._explain(call, timed_out=False)
                if self._left_s <= 0:
                    raise self._explain(call, timed_out=True)
                self._still_waits(call, self._started)
        finally:
            self._own.sleep(0)

    def _lie_down(self, number: int) -> bool:
        """Sleep until woken up, or for a slice; whether all have arrived at the barrier."""
        self._own.sleep(number)
        # Either the last to arrive sees that this rank sleeps, or this rank sees that it has come.
        self._own.fence()
        if not self._are_here(number):
            self._links.wait(max(0.0, min(self._left_s, _SLICE_S)))
            self._own.sleep(0)
        return self._are_here(number)

    def _is_lost(self, number: int) -> bool:
        """Return whether a rank has ended before it could pass a barrier.

        One that has passed it may close while bytes of others are still on their way to this one.
        """
        return any(self._pages[rank].ended <= number for rank in self._links.gone)

    def _explain(self, call: Call, *, timed_out: bool) -> CollectiveError:
        """Release everything and find the cause."""
        waited_s = time.monotonic() - self._started
        if self._ended is not None:
            return CollectiveError(closed_message(self.number, call.what))
        if not (timed_out or self._board.read()):
            return PeerLostError(lost_message(self.number, call.what, self._how_lost()))
        self._board.post(self.number, Notice(call.number, waited_s, call.what))
        self._release()
        return self._board.explain(self.number, call, [call], waited_s)

    def _how_lost(self) -> str:
        """Return which ranks have died and which have left, perhaps because of another."""
        until = time.monotonic() + _CAUSE_S
        left: set[int] = set()
        died: set[int] = set()
        while not died and time.monotonic() < until:
            self._links.wait(_CAUSE_S / 10)
            left = {rank for rank, page in self._others if page.ended}
            died = self._links.gone - left
        said = []
        for ranks, how in ((died, "died"), (left, "closed this communicator")):
            if ranks:
                verb = "has" if len(ranks) == 1 else "have"
                said.append(f"{name_ranks(self._numbers_of(sorted(ranks)))} {verb} {how}")
        return ", ".join(said)

    # ── end of life ──────────────────────────────────────────────────────────────────────────────

    def _hurry(self, deadline: float) -> None:
        if not self._base.has_ended:
            self._base.hurry(max(1e-3, deadline - time.monotonic()))

    def _release(self) -> None:
        """Release everything, also during another thread's call; idempotent."""
        with self._closing:
            if self._is_released:
                return
            self._is_released = True
            self._own.end(self._num_passed + 1)
            self._links.cut()
            if not self._busy:
                self._links.close()
            if self._pinned_by is not None:
                kind_of(self._pinned_by).unpin(self._own.stage)
            self._kept.clear()
            self._kept_cells.clear()
            self._kept_places.clear()
            self._memory.release()
        self._base.close()


def _keep(kept: dict[tuple[object, ...], T], key: tuple[object, ...], value: T) -> None:
    """Remember a value as the latest, and forget the oldest of too many."""
    kept[key] = value
    if len(kept) > _MAX_KEPT:
        del kept[next(iter(kept))]


def share_memory(
    comm: Communicator, *, memory: SharedMemory | None = None
) -> tuple[Communicator, str]:
    """Make ranks of one host exchange through shared memory; all ranks call it together.

    Args:
        comm: Joins them. It belongs to what is formed, and stays as it is where nothing is.
        memory: Where tensors lie already, of a communicator from which ``comm`` was split off.

    Returns:
        The communicator to use, and why it is still ``comm``; empty where it is not.
    """
    offer = MemoryOffer(comm, memory)
    try:
        told = comm.all_gather_json(asdict(offer.spot), what="where ranks run")
        spots = [Spot(**{**each, "cores": tuple(each["cores"])}) for each in told]
        if obstacle := find_obstacle(spots):
            return comm, obstacle
        failure = ""
        try:
            joined = offer.form(comm, spots)
        except OSError as error:
            failure = f"rank {comm.number} could not connect its memory ({error})"
        failures = comm.all_gather_json(failure, what="whether memory is shared")
        if others := next(filter(None, failures), ""):
            if not failure:
                joined.links.close()
            return comm, others
        return SharedCommunicator(comm, joined), ""
    finally:
        offer.close()
