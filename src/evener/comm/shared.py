"""The transport of ranks on one host, which exchange through memory that all of them map."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from evener.comm.base import Communicator, Sum, Transport, Wait, keep_latest
from evener.comm.calls import Call
from evener.comm.notices import NoticeBoard
from evener.comm.shared_barrier import STAGE_BYTES, Barrier
from evener.comm.shared_memory import NOWHERE, SharedMemory
from evener.comm.shared_offers import Joined, MemoryOffer, Spot, find_obstacle
from evener.devices import kind_of

_PLACE = struct.Struct("=q")
#: Bytes that one addition works on, over all ranks: they stay in the cache of a core until the sum
#: is written to all slots.
_CACHED_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64


@final
class SharedTransport(Transport):
    """Ranks in processes of one host, through memory that all of them map.

    Sums are formed in rank order, each element by one rank, in the tensor's dtype, and copied from
    there. A tensor from ``allocate`` is exchanged where it lies; any other is copied into shared
    memory and back, piece by piece.

    An exchange is one to three barriers; see ``Barrier``.

    It stands on another transport: ranks have found one another there, splits are formed there, and
    NCCL moves CUDA tensors there once it was added.
    """

    def __init__(self, beneath: Transport, joined: Joined) -> None:
        """Take over the resources that ``share_memory`` has made.

        Args:
            beneath: Joins the same ranks; it belongs to this one.
            joined: What else joins them.
        """
        self._beneath = beneath
        self._pages, self._links, self._memory, spins = joined
        both = zip(*(page.cells for page in self._pages), strict=True)
        super().__init__("shared", beneath.rank, beneath.numbers, [list(cells) for cells in both])
        self._barrier = Barrier(self.rank, self.numbers, self._pages, self._links, spins=spins)
        self._own = self._pages[self.rank]
        self._memory.use()
        self._pinned_by: torch.device | None = None
        self._kept_slots: dict[tuple[object, ...], Slots] = {}
        #: By call and own place: where tensors lie that need not be announced any more.
        self._kept_places: dict[tuple[object, ...], list[int]] = {}

    @property
    def group(self) -> Transport:
        """Return what it stands on; see the base class."""
        return self._beneath

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in shared memory; see ``Communicator.allocate``.

        Elsewhere for other devices than the CPU, and where no more memory can be shared: then the
        tensor is copied on its way.
        """
        size = numel * dtype.itemsize
        if device.type == "cpu" and size > 0:
            with suppress(OSError):
                return self._memory.allocate(size).view(dtype)
        return super().allocate(numel, dtype, device)

    def expect_call(self) -> None:
        """Wake up the ranks that sleep, if this rank comes last; see the base class."""
        self._barrier.wake_early()

    def _swap(self, cells: Sequence[memoryview], wait: Wait, call: Call) -> None:
        self._barrier.meet(wait, call)

    def sum_each(self, sums: Sequence[Sum], wait: Wait) -> None:
        """Form sums; see the base class."""
        is_open = False
        for one in sums:
            is_open = self._sum(one.flat, wait, one.call)
        if is_open:  # the next call's announcement is a barrier, too
            self._barrier.meet(wait, wait.calls[-1])

    def sum_parts(self, flat: Tensor, wait: Wait) -> bool:
        """Sum this rank's part; see the base class."""
        # If others may still work on it, the next call's barrier ends that.
        return self._sum(flat, wait, wait.call, for_owner=True)

    def copy(self, flat: Tensor, src: int, wait: Wait) -> None:
        """Copy from one rank; see the base class."""
        self._collect(flat, [src], 0, flat.numel(), wait)

    def gather_parts(self, flat: Tensor, wait: Wait) -> None:
        """Gather parts; see the base class."""
        size = flat.numel() // len(self.numbers)
        known = self._known_places(flat, wait.call)
        if known is None:
            self._collect(flat, range(len(self.numbers)), size, size, wait)
            return
        # Written into the others' tensors, where it is not used.
        part = slice(size * self.rank, size * (self.rank + 1))
        for rank, other in enumerate(self._tensors(known, flat)):
            if rank != self.rank:
                other[part].copy_(flat[part])
        self._barrier.meet(wait, wait.call)

    def split(self, members: tuple[int, ...], key: str, wait: Wait) -> Transport | None:
        """Form a transport of some ranks beneath; ``upgrade`` lifts it."""
        return self._beneath.split(members, key, wait)

    def explain_by(self, board: NoticeBoard) -> None:
        """Use another board than the pages; see the base class."""
        self._barrier.board = board

    def upgrade(self, part: Communicator) -> None:
        """Share the same memory; see the base class."""
        share_memory(part, memory=self._memory)

    # ── large tensors ────────────────────────────────────────────────────────────────────────────

    def _sum(self, flat: Tensor, wait: Wait, call: Call, *, for_owner: bool = False) -> bool:
        """Sum a tensor; whether in place, where others may be at it until the next barrier."""
        places = self._known_places(flat, call)
        if places is None:
            place = self._memory.find(flat)
            if place == NOWHERE:
                self._stage(flat, 0)
            places = self._swap_places(place, flat, wait, call)
        if NOWHERE in places:
            self._sum_by_stages(flat, places, wait, call)
            return False
        slots = keep_latest(
            self._kept_slots,
            (for_owner, flat.numel(), flat.dtype, *places),
            lambda: Slots(self._tensors(places, flat), self.rank, equal_parts=for_owner),
        )
        if for_owner:
            slots.sum_for_owner()
        else:
            slots.sum_for_all()
        return True

    def _sum_by_stages(self, flat: Tensor, places: Sequence[int], wait: Wait, call: Call) -> None:
        """Sum a tensor that lies outside of shared memory on some rank, on this one or another.

        While a stage is summed, the next is copied into the other half.
        """
        whole = self._tensors(places, flat)
        step = STAGE_BYTES // flat.element_size()
        is_staged = places[self.rank] == NOWHERE
        for number, (start, stop) in enumerate(_steps(flat.numel(), step)):
            slots = [
                each[number % 2][: stop - start] if place == NOWHERE else each[start:stop]
                for each, place in zip(whole, places, strict=True)
            ]
            Slots(slots, self.rank, equal_parts=False).sum_for_all()
            if is_staged and stop < flat.numel():
                self._stage(flat[stop:], number + 1)
            self._barrier.meet(wait, call)
            if is_staged:
                flat[start:stop].copy_(slots[self.rank])

    def _collect(
        self, flat: Tensor, sources: Sequence[int], stride: int, size: int, wait: Wait
    ) -> None:
        """Copy from each source what starts at ``stride`` times its rank in its own tensor.

        Args:
            flat: Where to, at the same place; uint8.
            sources: Ranks to copy from.
            stride: See above, in bytes.
            size: Bytes of each.
            wait: What is under way.
        """
        own = flat[self.rank * stride :][:size]
        is_source = self.rank in sources
        place = self._memory.find(flat)
        if is_source and place == NOWHERE:
            self._stage(own, 0)
        places = self._swap_places(place, flat, wait, wait.call)
        whole = self._tensors(places, flat)
        is_staged = any(places[source] == NOWHERE for source in sources)
        for number, (start, stop) in enumerate(_steps(size, STAGE_BYTES if is_staged else size)):
            for source in sources:
                if source == self.rank:
                    continue
                target = flat[source * stride + start : source * stride + stop]
                if places[source] == NOWHERE:
                    target.copy_(whole[source][number % 2][: stop - start])
                else:
                    target.copy_(whole[source][source * stride + start :][: stop - start])
            if is_source and place == NOWHERE and stop < size:
                self._stage(own[stop:], number + 1)
            self._barrier.meet(wait, wait.call)

    def _known_places(self, flat: Tensor, call: Call) -> list[int] | None:
        """Return where a tensor lies on each rank, if all ranks know, and no meeting is needed."""
        key = (call.kind, self._memory.find(flat), flat.nbytes)
        return self._kept_places.get(key) if call.have_met else None

    def _swap_places(self, place: int, flat: Tensor, wait: Wait, call: Call) -> list[int]:
        """Meet, and learn where a tensor lies on each rank.

        A place is never used again. So all ranks know the places from the same call on, the first
        one on this tensor; those of a rank outside of shared memory are never known.
        """
        notes = wait.announce(call, _PLACE.pack(place))
        places = [_PLACE.unpack(note)[0] for note in notes]
        if call.have_met and NOWHERE not in places:
            key = (call.kind, place, flat.nbytes)
            keep_latest(self._kept_places, key, lambda: places)
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

    def _tensors(self, places: Sequence[int], like: Tensor) -> list[Tensor]:
        """Return each rank's tensor, shape ``(len(like),)``, or the halves of its stage."""
        return [
            page.stage.view(like.dtype)
            if place == NOWHERE
            else self._memory.view(number, place, like.nbytes).view(like.dtype)
            for number, page, place in zip(self.numbers, self._pages, places, strict=True)
        ]

    # ── end of life ──────────────────────────────────────────────────────────────────────────────

    def cut(self) -> None:
        """Let the others know; see the base class."""
        self._barrier.end()
        self._beneath.cut()

    def close(self) -> None:
        """Release everything; see the base class."""
        self.cut()
        self._links.close()
        if self._pinned_by is not None:
            kind_of(self._pinned_by).unpin(self._own.stage)
        for kept in (self._kept, self._kept_slots, self._kept_places):
            kept.clear()
        self._memory.release()
        self._beneath.close()

    def forget(self) -> None:
        """Release the store; see the base class."""
        self._beneath.forget()

    def close_in_child(self) -> None:
        """Close connections and memory in a forked child; see ``NotInherited``."""
        self._links.close()
        self._memory.close_in_child()
        self._beneath.close_in_child()


def share_memory(
    comm: Communicator, *, memory: SharedMemory | None = None
) -> tuple[Communicator, str]:
    """Make ranks of one host exchange through shared memory; all ranks call it together.

    Args:
        comm: Joins them. It stays as it is where memory cannot be shared.
        memory: Where tensors lie already, of a communicator from which ``comm`` was split off.

    Returns:
        The communicator, and why it exchanges as before; empty where it does not.
    """
    offer = MemoryOffer(comm, memory)
    try:
        gathered = comm.all_gather_json(asdict(offer.spot), what="where ranks run")
        spots = [Spot(**{**each, "cores": tuple(each["cores"])}) for each in gathered]
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
        comm.replace_transport(lambda beneath: SharedTransport(beneath, joined))
        return comm, ""
    finally:
        offer.close()


@final
class Slots:
    """One tensor of each rank, of one size and dtype, cut into what this rank has to add up.

    An element is summed by one rank, in rank order, and copied from there: so all ranks get the
    same bits, in whatever order they run.
    """

    def __init__(self, slots: Sequence[Tensor], rank: int, *, equal_parts: bool) -> None:
        """Cut the tensors.

        Args:
            slots: 1-D, by rank.
            rank: This rank.
            equal_parts: Whether parts must be equal; else they are cut at cache lines.
        """
        self._rank = rank
        size = slots[0].numel()
        unit = 1 if equal_parts else _ALIGNMENT_BYTES // slots[0].element_size()
        units = -(-size // unit)
        first, last = (units * r // len(slots) * unit for r in (rank, rank + 1))
        step = max(unit, _CACHED_BYTES // len(slots) // slots[0].element_size())
        bounds = [*range(first, min(last, size), step), min(last, size)]
        self._pieces = [[slot[a:b] for slot in slots] for a, b in pairwise(bounds)]
        # The first two can be added in place; a later rank's own numbers are still needed then.
        self._scratch = slots[0].new_empty(step if equal_parts and rank > 1 else 0)

    def sum_for_all(self) -> None:
        """Sum this rank's part, and write it to all slots."""
        for first, *others in self._pieces:
            for other in others:
                first.add_(other)
            for other in others:
                other.copy_(first)

    def sum_for_owner(self) -> None:
        """Sum this rank's part, and write it to this rank's slot alone."""
        for piece in self._pieces:
            own = piece[self._rank]
            total = self._scratch[: own.numel()] if self._rank > 1 else own
            torch.add(piece[0], piece[1], out=total)
            for other in piece[2:]:
                total.add_(other)
            if total is not own:
                own.copy_(total)


def _steps(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Return the first and last-plus-one element of each step through ``size`` elements."""
    for start in range(0, size, step):
        yield start, min(start + step, size)
