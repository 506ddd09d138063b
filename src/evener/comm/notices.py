"""A board of notices of ranks that gave up waiting, which show who is missing."""

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, final

from evener.comm.c10d import Store
from evener.comm.calls import Call
from evener.comm.messages import late_message, mismatch_message, timeout_message
from evener.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError

_LOOK_S = 0.5  # how long to look for the notices of other ranks
ANSWER_TIMEOUT_S = 0.5

T = TypeVar("T")


class Notice(NamedTuple):
    """The wait of a rank that gave up.

    Attributes:
        number: Number of the call.
        waited_s: For how long.
        what: What was to be exchanged.
    """

    number: int
    waited_s: float
    what: str


class NoticeBoard(ABC):
    """One short text per rank.

    It is read after a failure, so nothing here may wait for long or raise.
    """

    def __init__(self, ranks: Sequence[int], host_rank: int | None = None) -> None:
        """Make a board.

        Args:
            ranks: Who may post.
            host_rank: The rank whose process keeps it; ``None`` for none of them.
        """
        self._ranks = ranks
        self._host_rank = host_rank

    @abstractmethod
    def post(self, rank: int, notice: Notice) -> None:
        """Post a notice of ``rank``."""

    @abstractmethod
    def read(self) -> dict[int, Notice] | None:
        """Return the notices by rank; ``None`` where nothing answers."""

    def share_loss(self, detail: str, *, is_known: bool) -> str:
        """Return how a peer was lost, in words for the error.

        Args:
            detail: What this rank knows of it.
            is_known: Whether that names the process which died. Otherwise another rank may have
                written something better for this one.
        """
        return detail

    def explain(
        self, rank: int, call: Call, calls: Sequence[Call], waited_s: float
    ) -> CollectiveError:
        """Return the cause for a rank that gave up and has posted a notice.

        Args:
            rank: The rank.
            call: The call that failed.
            calls: All that were under way with it.
            waited_s: Seconds since it was started.
        """
        notes = self._gather(rank)
        if notes is None:
            missing = tuple(r for r in self._ranks if r == self._host_rank != rank)
            return CollectiveTimeoutError(
                f"{timeout_message(rank, call.what, waited_s, missing)} (the coordinator does not "
                "answer, so others may be missing too)",
                missing=missing,
            )
        together = {(each.number, each.what) for each in calls}
        elsewhere = [
            (other, repr(notice.what))
            for other, notice in notes.items()
            if (notice.number, notice.what) not in together
        ]
        # A rank that has waited much less than others came after they had given up.
        longest_s = max([waited_s, *(notice.waited_s for notice in notes.values())])
        late = {r for r, notice in notes.items() if notice.waited_s < longest_s / 2}
        absent = [r for r in self._ranks if r not in notes and r != rank]
        if elsewhere and not absent:
            return CollectiveMismatchError(mismatch_message(rank, repr(call.what), elsewhere))
        missing = tuple(sorted({*absent, *late} - {rank}))
        if waited_s < longest_s / 2:
            text = late_message(rank, call.what, longest_s)
        else:
            text = timeout_message(rank, call.what, waited_s, missing)
        return CollectiveTimeoutError(text, missing=missing)

    def _gather(self, rank: int) -> dict[int, Notice] | None:
        """Wait a moment for the others' notices; ``None`` where the store does not answer."""
        # The rank that hosts the coordinator looks for longer, because others query it until they
        # have finished.
        serves = self._host_rank == rank
        known = seen = self.read()
        deadline = time.monotonic() + (2 * _LOOK_S if serves else _LOOK_S)
        while time.monotonic() < deadline and len(known or ()) < len(self._ranks):
            if known is not None and seen is None:
                break  # its host may have ended, having found out
            time.sleep(0.02)
            seen = self.read()  # on a busy machine it may have been too slow to answer at once
            known = known if seen is None else seen
        return known


@final
class StoreNotices(NoticeBoard):
    """Notices in the store of a group: the rank that hosts it may be the one that has gone."""

    def __init__(self, store: Store, ranks: Sequence[int], host_rank: int | None = None) -> None:
        """Use ``store``, with a prefix of its own; for the others see ``NoticeBoard``."""
        super().__init__(ranks, host_rank)
        self._store = store

    def post(self, rank: int, notice: Notice) -> None:
        """Post a notice of ``rank``, if the store answers."""

        def task() -> None:
            self._store.set(str(rank), json.dumps(notice))
            self._store.set("any", "1")

        self._ask(task)

    def read(self) -> dict[int, Notice] | None:
        """Return the notices by rank; ``None`` where the store does not answer."""

        def task() -> dict[int, Notice]:
            if not self._store.check(["any"]):
                return {}
            present = [rank for rank in self._ranks if self._store.check([str(rank)])]
            return {rank: Notice(*json.loads(self._store.get(str(rank)))) for rank in present}

        return self._ask(task)

    def share_loss(self, detail: str, *, is_known: bool) -> str:
        """Return how a peer was lost: by own knowledge, or in the words of the first to notice."""

        def task() -> str:
            if not is_known and self._store.check(["lost"]):
                return self._store.get("lost").decode()
            self._store.set("lost", detail)
            return detail

        return self._ask(task) or detail

    def _ask(self, task: Callable[[], T]) -> T | None:
        # A request to the store of a stopped process takes long, so it runs in a thread that can be
        # left behind.
        answers: list[T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(task())

        thread = threading.Thread(target=run, name="evener-notices", daemon=True)
        thread.start()
        thread.join(ANSWER_TIMEOUT_S)
        return answers[0] if answers else None
