"""The barrier of shared memory: where ranks write how far they are, spin, sleep and wake up.

Each rank has a control page, which it alone writes and all others read.
"""

import json
import mmap
import os
import platform
import threading
import time
from collections.abc import Sequence
from typing import Final, final

import torch

from evener.comm.base import CELL_BYTES, Wait
from evener.comm.calls import Call
from evener.comm.messages import closed_message, lost_message, name_ranks
from evener.comm.notices import Notice, NoticeBoard
from evener.comm.shared_links import Links
from evener.comm.shared_memory import create_file, map_file, reserve
from evener.errors import CollectiveError, PeerLostError

#: Whether other cores see one core's writes in order, so that a flag may follow data. Python has no
#: fences with which to enforce it elsewhere.
KEEPS_ORDER: Final = platform.machine() in ("x86_64", "AMD64")
#: How long a rank spins before it sleeps. Waking up takes about half as long, so spinning costs at
#: most twice what it can save.
_SPIN_S = 100e-6
_SLICE_S = 0.25  # sleep is cut so that deadlines can be shortened by another thread
# A rank may have left because another one died, whose end shows a moment later.
_CAUSE_S = 0.1

# Each word has two cache lines of its own: processors fetch lines in pairs.
_ARRIVED = 0
_ASLEEP = 16
_ENDED = 32
_NOTICE = 1024
_CELLS = 4096
_NOTICE_BYTES = _CELLS - _NOTICE
#: What fits into a cell needs one barrier only.
_CELL_BYTES = CELL_BYTES + 7232
_STAGE = -(-(_CELLS + 2 * _CELL_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
#: Bytes of a tensor outside of shared memory that are copied into it at a time; a multiple of
#: every element size.
STAGE_BYTES: Final = 2 << 20
PAGE_BYTES: Final = _STAGE + 2 * STAGE_BYTES


@final
class ControlPage:
    """The progress of one rank, its cells, and copies of tensors that lie elsewhere.

    There are two cells, used in turn: when a rank fills one again, all have read its content,
    because each has arrived with the other cell since. So it is with the two halves of the stage.

    Attributes:
        arrived: The last barrier at which the rank has arrived.
        asleep: The barrier in which it sleeps and must be woken up; 0 for none.
        ended: The barrier that it will not pass any more; 0 for none.
        cells: The two.
        stage: ``(2, STAGE_BYTES)``, uint8; where tensors outside of shared memory are copied to.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the page of a rank; its memory is reserved."""
        self._content = map_file(descriptor, PAGE_BYTES)
        self.words = self._content.cast("q")
        whole = torch.frombuffer(self._content, dtype=torch.uint8)
        self.stage = whole[_STAGE:].view(2, STAGE_BYTES)
        starts = (_CELLS, _CELLS + _CELL_BYTES)
        self.cells = [self._content[start : start + _CELL_BYTES] for start in starts]

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new page, all zero.

        Raises:
            OSError: Memory is exhausted, or the kernel refuses such files.
        """
        descriptor = create_file("evener-control")
        try:
            reserve(descriptor, 0, PAGE_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @property
    def notice(self) -> Notice | None:
        """Return why the rank gave up waiting, if it did."""
        text = bytes(self._content[_NOTICE:_CELLS]).partition(b"\0")[0]
        return Notice(*json.loads(text)) if text else None

    def post(self, notice: Notice) -> None:
        """Write why this rank gives up waiting."""
        text = json.dumps(notice._replace(what=notice.what[: (_NOTICE_BYTES - 128) // 12])).encode()
        # The first byte last: a rank that reads it before finds no notice yet.
        self._content[_NOTICE + 1 : _NOTICE + len(text)] = text[1:]
        self._content[_NOTICE] = text[0]


@final
class _PageNotices(NoticeBoard):
    """Notices on the ranks' own pages."""

    def __init__(self, numbers: Sequence[int], pages: Sequence[ControlPage]) -> None:
        super().__init__(numbers)
        self._pages = dict(zip(numbers, pages, strict=True))

    def post(self, rank: int, notice: Notice) -> None:
        """Write a notice on the rank's page."""
        self._pages[rank].post(notice)

    def read(self) -> dict[int, Notice] | None:
        """Return the notices by number of the rank."""
        notices = {number: page.notice for number, page in self._pages.items()}
        return {number: notice for number, notice in notices.items() if notice is not None}


@final
class Barrier:
    """Where the ranks of one host wait for one another.

    A rank that arrives writes that on its own page, spins for a short time, and then sleeps until
    the last rank to arrive wakes it up.

    Attributes:
        board: Where ranks post that they give up waiting.
    """

    def __init__(
        self,
        rank: int,
        numbers: Sequence[int],
        pages: Sequence[ControlPage],
        links: Links,
        *,
        spins: bool,
    ) -> None:
        """Use pages and connections.

        Args:
            rank: This rank.
            numbers: The number of each in the team.
            pages: Of each.
            links: To the others.
            spins: Whether there is a core for each rank.
        """
        self._rank, self._numbers, self._links = rank, numbers, links
        self._spins = spins and KEEPS_ORDER
        self._own = pages[rank].words
        self._others = [(r, page.words) for r, page in enumerate(pages) if r != rank]
        self.board: NoticeBoard = _PageNotices(numbers, pages)
        self._num_arrived = 0  # at so many barriers
        self._num_passed = 0
        self._fence_lock = threading.Lock()

    def wake_early(self) -> None:
        """Wake up the ranks that sleep, if this rank is the last to arrive at the next barrier.

        Waking up takes longer than this rank's work until it arrives, so it starts now.
        """
        number = self._num_arrived + 1
        if self._spins and self._are_here(number):
            self._wake_all(number)

    def meet(self, wait: Wait, call: Call) -> None:
        """Arrive at the next barrier of a call, and wait for all."""
        self._num_arrived = number = self._num_arrived + 1
        self._own[_ARRIVED] = number
        if KEEPS_ORDER:
            self._fence()
        else:
            for rank, _ in self._others:
                self._links.wake(rank)
        if self._are_here(number):
            self._wake_all(number)  # this may be the last: see ``_sleep``
        elif not (self._spins and self._spin(number)):
            self._sleep(number, wait, call)
        for _, page in self._others:
            if 0 < page[_ENDED] <= number:  # it gave up here, just before the last has come
                raise self._explain(wait, call, timed_out=False)
        self._num_passed = number

    def end(self) -> None:
        """Pass no barrier any more, and let all know; idempotent."""
        self._own[_ENDED] = self._own[_ENDED] or self._num_passed + 1
        self._links.cut()

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    def _are_here(self, number: int) -> bool:
        """Return whether all others have arrived at a barrier."""
        for rank, page in self._others:
            if (page[_ARRIVED] if KEEPS_ORDER else self._links.count(rank)) < number:
                return False
        return True

    def _fence(self) -> None:
        """Make this thread's writes visible to others before it reads anything.

        Taking a lock is an instruction that x86 processors do not reorder with reads or writes.
        """
        with self._fence_lock:
            pass

    def _wake_all(self, number: int) -> None:
        """Wake up the ranks that sleep in a barrier."""
        for rank, page in self._others:
            if KEEPS_ORDER and page[_ASLEEP] == number:  # else each byte counts
                self._links.wake(rank)

    def _spin(self, number: int) -> bool:
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

    def _sleep(self, number: int, wait: Wait, call: Call) -> None:
        """Sleep until all have arrived at a barrier."""
        try:
            while not (self._sleep_once(number, wait) or (self._spins and self._spin(number))):
                # One that has passed the barrier may close while bytes of others are still on
                # their way to this one.
                is_lost = any(p[_ENDED] <= number for r, p in self._others if r in self._links.gone)
                if wait.has_ended or is_lost:
                    raise self._explain(wait, call, timed_out=False)
                if wait.left_s <= 0:
                    raise self._explain(wait, call, timed_out=True)
                wait.still_waits()
        finally:
            self._own[_ASLEEP] = 0

    def _sleep_once(self, number: int, wait: Wait) -> bool:
        """Sleep until woken up, or for a slice; whether all have arrived at the barrier."""
        self._own[_ASLEEP] = number
        # Either the last to arrive sees that this rank sleeps, or this rank sees that it has come.
        self._fence()
        if not self._are_here(number):
            self._links.wait(max(0.0, min(wait.left_s, _SLICE_S)))
            self._own[_ASLEEP] = 0
        return self._are_here(number)

    # ── failures ─────────────────────────────────────────────────────────────────────────────────

    def _explain(self, wait: Wait, call: Call, *, timed_out: bool) -> CollectiveError:
        """End the barrier, and find the cause."""
        own, waited_s = self._numbers[self._rank], wait.waited_s
        if wait.has_ended:
            return CollectiveError(closed_message(own, call.what))
        if not (timed_out or self.board.read()):
            detail, is_known = self._how_lost()
            detail = self.board.share_loss(detail, is_known=is_known)
            return PeerLostError(lost_message(own, call.what, detail))
        self.board.post(own, Notice(call.number, waited_s, call.what))
        self.end()
        return self.board.explain(own, call, wait.together, waited_s)

    def _how_lost(self) -> tuple[str, bool]:
        """Return which ranks have died or left, perhaps because of another; whether any died."""
        until = time.monotonic() + _CAUSE_S
        left: set[int] = set()
        died: set[int] = set()
        while not died and time.monotonic() < until:
            self._links.wait(_CAUSE_S / 10)
            left = {rank for rank, page in self._others if page[_ENDED]}
            died = self._links.gone - left
        causes = []
        for ranks, how in ((died, "died"), (left, "closed this communicator")):
            if ranks:
                verb = "has" if len(ranks) == 1 else "have"
                causes.append(f"{name_ranks([self._numbers[r] for r in ranks])} {verb} {how}")
        return ", ".join(causes), bool(died)
