"""A board on which ranks that gave up waiting say so, so that the others can tell who did not."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from evener.comm.c10d import Store

PROBE_TIMEOUT_S = 0.2
ANSWER_TIMEOUT_S = 0.5
DYING_S = 0.03

T = TypeVar("T")


@final
class NoticeBoard:
    """One short text per rank, kept in the store of a group.

    It is read when something has already gone wrong, so nothing here may wait for long or raise:
    the store may be hosted by the very rank that has died or was stopped.
    """

    def __init__(self, store: Store, ranks: Sequence[int], host: tuple[str, int] | None) -> None:
        """Use ``store``, with a prefix of its own.

        Args:
            store: Where notices are kept.
            ranks: Who may post.
            host: Address and port of the store's server; ``None`` where it cannot be probed.
        """
        self._store = store
        self._keys = [str(rank) for rank in ranks]
        self._host = host

    def post(self, rank: int, text: str) -> bool:
        """Pin up ``text`` for ``rank``; whether the store answered."""

        def task() -> bool:
            self._store.set(str(rank), text)
            self._store.set("any", "1")
            # A TCPStore does not wait for a reply to set(): only a read shows that it is there.
            return self._store.check(["any"])

        return bool(self._ask(task))

    def read(self) -> dict[int, str] | None:
        """The notices by rank; ``None`` where the store does not answer."""

        def task() -> dict[int, str]:
            if not self._store.check(["any"]):
                return {}
            present = [key for key in self._keys if self._store.check([key])]
            return {int(key): self._store.get(key).decode() for key in present}

        return self._ask(task)

    def _ask(self, task: Callable[[], T]) -> T | None:
        # A request to the store of a stopped process blocks for ever, also with a timeout set, so
        # it runs in a thread that can be left behind. The probe keeps torch from printing a C++
        # stack trace when the store's host is simply gone.
        if not self._reachable():
            return None
        answers: list[T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(task())

        thread = threading.Thread(target=run, name="evener-notices", daemon=True)
        thread.start()
        thread.join(ANSWER_TIMEOUT_S)
        return answers[0] if answers else None

    def _reachable(self) -> bool:
        if self._host is None:
            return True
        try:
            with socket.create_connection(self._host, PROBE_TIMEOUT_S) as probe:
                # A process that is being killed takes connections for a moment, and drops them.
                probe.settimeout(DYING_S)
                return probe.recv(1) != b""
        except TimeoutError:  # silence: a store answers only what it is asked
            return True
        except OSError:
            return False
