"""Processes to which harm is done, one for each rank.

A *part* is what one rank plays: ``part(comm, rank, *arguments)``, where ``rank.send`` and
``rank.receive`` talk to the test. What it returns reaches the test by ``end()``.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evener.comm.base import Communicator
from evener.errors import CollectiveError, CollectiveTimeoutError
from helpers.ranks import Rank, RankTeam

TIMEOUT_S = 100.0

Part = Callable[..., Any]


@dataclass(frozen=True)
class Seen:
    """How a call failed on one rank, and what the communicator said to the next call."""

    kind: str
    message: str
    missing: tuple[int, ...]
    took_s: float
    kind_after: str
    took_after_s: float


def watch(comm: Communicator, rank: Rank, call: Callable[[], object]) -> Seen:
    """Calls until that raises, then once more; stays alive, error in hand, until told to go.

    The error and its frames must not keep connections open that other ranks wait to see closed.
    """
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            call()
    except CollectiveError as error:
        took_s = time.monotonic() - started
        missing = error.missing if isinstance(error, CollectiveTimeoutError) else ()
        started = time.monotonic()
        try:
            comm.barrier(what="after the failure")
        except CollectiveError as second:
            seen = Seen(
                type(error).__name__,
                str(error),
                missing,
                took_s,
                type(second).__name__,
                time.monotonic() - started,
            )
            rank.send("seen")
            rank.receive()
            return seen
        raise AssertionError("a communicator worked after it had failed") from error


class Stage(RankTeam):
    """A team of one kind of transport; those that the test stops need not end by themselves.

    With "hosts", the first two ranks are on one host, and others on another.
    """

    def __init__(self, leaf: str, part: Part, world_size: int, *arguments: Any) -> None:
        if leaf == "hosts":
            leaf = "hosts 2" if world_size == 2 else f"hosts 2+{world_size - 2}"
        super().__init__(_play, world_size, leaf, part, arguments)
        self.stopped: set[int] = set()

    def kill(self, rank: int) -> None:
        self.send_signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        self.send_signal(rank, signal.SIGSTOP)
        self.stopped.add(rank)

    def end(self, ranks: list[int]) -> list[Any]:
        """What these ranks returned."""
        outcomes = self.wait(TIMEOUT_S, ranks)
        assert all(outcome.returned for outcome in outcomes), [o.story() for o in outcomes]
        for outcome in outcomes:
            assert "frame #" not in outcome.output, f"a C++ stack trace:\n{outcome.output}"
        return [outcome.value for outcome in outcomes]

    def all_seen(self, ranks: list[int]) -> list[Seen]:
        """Waits until all of them have failed while all still live, then lets them go."""
        for rank in ranks:
            assert self.receive(rank) == "seen"
        for rank in ranks:
            self.send(rank, "go")
        return self.end(ranks)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self.wait(TIMEOUT_S, sorted(set(range(self.world_size)) - self.stopped))
        finally:
            super().__exit__(kind, error, trace)


def _play(rank: Rank, leaf: str, part: Part, arguments: tuple[Any, ...]) -> Any:
    with rank.connect(backend=leaf, timeout_s=TIMEOUT_S) as comm:
        return part(comm, rank, *arguments)
