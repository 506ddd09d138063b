"""Runs operations of a process group, to their end or to their deadline."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, final

from evener.comm.base import Call
from evener.comm.c10d import PrefixStore, ProcessGroupGloo, Work, form_gloo, form_nccl
from evener.comm.causes import Cause, cause_of
from evener.comm.forks import never_destroy
from evener.comm.messages import closed_message, lost_message, mismatch_message, timeout_message
from evener.comm.notices import NoticeBoard
from evener.comm.rendezvous import MeetingPoint, first_line
from evener.comm.wires import Wires, close_server
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

# Gloo closes all connections when an operation of its own times out, which peers cannot tell from a
# death. It gets this much longer than the deadline, in which a rank can say that it gave up.
GRACE_S = 0.25

_SLICE_S = 0.25  # waits are cut so that signal handlers of Python run in between
_SHORTEST_S = 0.001  # a wait of 0 ms would mean for ever
_LOOK_S = 0.5  # how long to look for the notices of other ranks
_ASKS = 4  # how often within the default deadline a longer wait asks whether the store answers
_ORPHAN_S = 10.0  # how long an operation goes on when the script has ended without closing its team


@dataclass(frozen=True, slots=True)
class _Notice:
    """What a rank that gave up had waited for."""

    number: int
    waited_s: float
    what: str

    @classmethod
    def parse(cls, text: str) -> Self:
        number, waited_s, what = text.split(" ", 2)
        return cls(int(number), float(waited_s), what)


@final
class Engine:
    """The process groups of one communicator: Gloo always, NCCL beside it where asked for.

    Attributes:
        meeting: Where the groups were formed.
        key: Their name in its store.
    """

    def __init__(
        self,
        meeting: MeetingPoint,
        *,
        rank: int,
        numbers: tuple[int, ...],
        key: str,
        backend: str,
        timeout_s: float,
        form_timeout_s: float,
    ) -> None:
        """Form the groups; all ranks do so at the same time.

        Args:
            meeting: Where.
            rank: This rank within the groups.
            numbers: The number of each rank in the team, by which errors call it.
            key: Names the groups in the store.
            backend: ``"gloo"`` or ``"nccl"``.
            timeout_s: Default deadline of operations.
            form_timeout_s: Deadline for forming the groups.
        """
        self.meeting = meeting
        self.key = key
        self._rank = rank
        self._numbers = numbers
        self._number = numbers[rank]
        self._timeout_s = timeout_s
        self._store = store = PrefixStore(key, meeting.store)
        self._board = NoticeBoard(PrefixStore("notices", store), numbers, meeting.host)
        with Wires.opened() as self._wires:
            self._gloo: ProcessGroupGloo | None = form_gloo(
                PrefixStore("gloo", store), rank, len(numbers), meeting.devices, form_timeout_s
            )
        self._nccl: Any = None
        if backend == "nccl":
            self.add_nccl(timeout_s)
        self._busy = False
        self._deadline = math.inf
        self._heard_s = 0.0  # when the store answered last, in an operation of long patience
        self._asks_at = math.inf
        self._orphaned = False

    @property
    def has_nccl(self) -> bool:
        """Whether CUDA tensors can stay on the device."""
        return self._nccl is not None

    def add_nccl(self, timeout_s: float) -> None:
        """Form the NCCL group; it connects at its first collective.

        Args:
            timeout_s: Deadline of collectives.
        """
        store = PrefixStore("nccl", self._store)
        self._nccl = form_nccl(store, self._rank, len(self._numbers), timeout_s)

    def run(
        self, calls: Sequence[Call], starts: Sequence[Callable[[Any], Work]], *, nccl: bool = False
    ) -> None:
        """Start operations, each while those before are under way, and wait for all.

        A Work handle keeps connections open, and a survivor that keeps them lets ranks hang which
        are not its neighbours. So handles are deleted in every frame that an exception could carry
        away, and the groups are let go before anybody learns of a failure.

        Args:
            calls: What is done; the deadline is that of the first.
            starts: Start them on the process group that they are given.
            nccl: Whether that is the NCCL group.

        Raises:
            CollectiveError: One of its kinds. The engine has ended then.
        """
        started = time.monotonic()
        self._deadline = started + calls[0].timeout_s
        self._heard_s = started
        is_long = calls[0].timeout_s > self._timeout_s
        self._asks_at = started + self._timeout_s / _ASKS if is_long else math.inf
        self._busy = True
        works: list[Work] = []
        failure, cause = "", Cause.TIMED_OUT  # unless the process group says otherwise
        done = 0
        try:
            works.extend(start(self._nccl if nccl else self._gloo) for start in starts)
            while self._poll(works[done]) if nccl else self._wait(works[done]):
                done += 1
                if done == len(works):
                    self._busy = False
                    return
        except RuntimeError as error:
            self._busy = not all(work.is_completed() for work in works)
            failure, cause = first_line(error), cause_of(error, works)
        except BaseException:  # Ctrl-C, or a signal handler that raises
            works.clear()
            self.release()
            raise
        finally:
            works.clear()
        waited_s = time.monotonic() - started
        raise self._explain(calls[done], calls, failure, cause, waited_s)

    def hurry(self, deadline: float) -> None:
        """Let the operation under way, if any, fail at ``deadline`` at the latest."""
        self._deadline = min(self._deadline, deadline)

    def release(self) -> None:
        """Let the groups go, also under another thread's operation; again it does nothing."""
        groups = [group for group in (self._gloo, self._nccl) if group is not None]
        self._gloo = self._nccl = None
        if self._busy:
            # Ending a group waits for the operation that it is still in: until its connections are
            # cut, its peers have gone, or its own timeout. Not a daemon thread: one that comes out
            # of C++ while the interpreter shuts down aborts the process.
            self._busy = False
            self._wires.cut()
            threading.Thread(target=groups.clear, name="evener-release").start()

    def leave_behind(self) -> None:
        """Let the groups and the store go in a forked child; see ``NotInherited``."""
        never_destroy(vars(self).copy())
        self._gloo = self._nccl = None
        self._busy = False
        self._wires.leave_behind()
        self.meeting.wires.leave_behind()
        if self.meeting.server is not None and self.meeting.host is not None:
            close_server(self.meeting.host[1])

    def forget_store(self) -> None:
        """Let the store go, through which peers learn why this rank gave up; called once.

        Before ``release`` on an orderly end: a peer that sees its connection close then finds no
        server, rather than one that goes while it answers, over which torch prints a stack trace.
        """
        del self._board, self.meeting, self._store

    def _explain(
        self, call: Call, calls: Sequence[Call], failure: str, cause: Cause, waited_s: float
    ) -> CollectiveError:
        """Let go of the group and find out what happened, with the help of the notices.

        Args:
            call: The call that failed.
            calls: All that were under way with it.
            failure: What the process group said.
            cause: What that means.
            waited_s: Seconds since it was started.
        """
        if self._gloo is None:  # another thread has let it go
            return CollectiveError(closed_message(self._number, call.what))
        note = f"{call.number} {waited_s:.3f} {call.what}"
        if cause is Cause.TIMED_OUT:
            self._board.post(self._number, note)
            self.release()
            return self._explain_timeout(call, calls, waited_s)
        self.release()
        if self._board.read():  # somebody gave up waiting, which closed the connections
            self._board.post(self._number, note)
            return self._explain_timeout(call, calls, waited_s)
        if cause is Cause.LOST:
            return PeerLostError(lost_message(self._number, call.what, failure))
        return CollectiveError(f"rank {self._number} failed in {call.what!r}: {failure}")

    def _explain_timeout(
        self, call: Call, calls: Sequence[Call], waited_s: float
    ) -> CollectiveError:
        notes = self._gather_notices()
        if notes is None:
            return self._explain_without_store(call, waited_s)
        together = {(each.number, each.what) for each in calls}
        elsewhere = [
            (other, repr(notice.what))
            for other, notice in notes.items()
            if (notice.number, notice.what) not in together
        ]
        # Who has waited much less than others came when they had already given up.
        longest_s = max([waited_s, *(notice.waited_s for notice in notes.values())])
        late = {r for r, notice in notes.items() if notice.waited_s < longest_s / 2}
        absent = [r for r in self._numbers if r not in notes and r != self._number]
        if elsewhere and not absent:
            return CollectiveMismatchError(
                mismatch_message(self._number, repr(call.what), elsewhere)
            )
        missing = tuple(sorted({*absent, *late} - {self._number}))
        if waited_s < longest_s / 2:
            return CollectiveTimeoutError(
                f"rank {self._number} came to {call.what!r} after the others had given up: their "
                f"deadline was {longest_s:.1f} s; raise the timeout if this rank is merely slow",
                missing=missing,
            )
        return CollectiveTimeoutError(
            timeout_message(self._number, call.what, waited_s, missing), missing=missing
        )

    def _explain_without_store(self, call: Call, waited_s: float) -> CollectiveError:
        host_rank, host = self.meeting.host_rank, self.meeting.host
        missing = tuple(r for r in self._numbers if r == host_rank != self._number)
        where = f" at {host[0]}:{host[1]}" if host else ""
        return CollectiveTimeoutError(
            f"{timeout_message(self._number, call.what, waited_s, missing)} (the store{where} does "
            "not answer, so others may be missing too)",
            missing=missing,
        )

    def _gather_notices(self) -> dict[int, _Notice] | None:
        """Wait a moment for the others' notices; ``None`` where the store does not answer."""
        # Who serves the store looks for longer: others ask it until their own look is over.
        serves = self.meeting.host_rank == self._number
        deadline = time.monotonic() + (2 * _LOOK_S if serves else _LOOK_S)
        known: dict[int, str] | None = None
        while True:
            texts = self._board.read()
            if texts is None:  # its host may have ended since, having found out what there was
                return None if known is None else _parsed(known)
            known = texts
            if len(texts) == len(self._numbers) or time.monotonic() >= deadline:
                return _parsed(texts)
            time.sleep(0.02)

    @property
    def _left_s(self) -> float:
        """Seconds that are left to the operation under way; none once the groups are let go."""
        now = time.monotonic()
        if not (self._orphaned or threading.main_thread().is_alive()):
            self._orphaned = True
            self.hurry(now + _ORPHAN_S)  # the interpreter waits for this thread, nobody for it
        return 0.0 if self._gloo is None else self._deadline - now

    @property
    def _is_cut_off(self) -> bool:
        """Whether the store has been silent for the default deadline; only long waits ask.

        A network that is cut closes no connection, so nothing else would tell.
        """
        if time.monotonic() < self._asks_at:
            return False
        if self._board.read() is not None:
            self._heard_s = time.monotonic()
        self._asks_at = time.monotonic() + self._timeout_s / _ASKS
        return time.monotonic() - self._heard_s >= self._timeout_s

    def _wait(self, work: Work) -> bool:
        """Whether ``work`` succeeded in time; raises ``RuntimeError`` where it failed."""
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
        finally:
            del work

    def _poll(self, work: Work) -> bool:
        """The same for NCCL, whose ``wait`` returns before the device is done."""
        try:
            while not work.is_completed():
                if self._left_s <= 0:
                    return False
                time.sleep(20e-6)
            return bool(work.wait())
        finally:
            del work


def _parsed(texts: dict[int, str]) -> dict[int, _Notice]:
    return {rank: _Notice.parse(text) for rank, text in texts.items()}
