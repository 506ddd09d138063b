"""Ranks to which harm is done, as processes or as threads, with one interface for both.

A *part* is what one rank plays: ``part(comm, line, *arguments)``, where ``line.send`` and
``line.receive`` talk to the test. What it returns reaches the test by ``end()``.
"""

import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.errors import CollectiveError, CollectiveTimeoutError
from helpers.ranks import Rank, RankTeam

TIMEOUT_S = 100.0


class Line(Protocol):
    def send(self, value: object) -> None: ...

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any: ...


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


def watch(comm: Communicator, line: Line, call: Callable[[], object]) -> Seen:
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
            line.send("seen")
            line.receive()
            return seen
        raise AssertionError("a communicator worked after it had failed") from error


class Stage(ABC):
    """A team under test; a context manager."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @abstractmethod
    def receive(self, rank: int) -> Any:
        """What the rank sends next."""

    @abstractmethod
    def send(self, rank: int, value: object) -> None: ...

    @abstractmethod
    def kill(self, rank: int) -> None:
        """The rank is dead from now on, wherever it was."""

    @abstractmethod
    def stop(self, rank: int) -> None:
        """The rank, which waits for the test, does nothing any more."""

    @abstractmethod
    def end(self, ranks: list[int]) -> list[Any]:
        """What these ranks returned."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    def all_seen(self, ranks: list[int]) -> list[Seen]:
        """Waits until all of them have failed while all still live, then lets them go."""
        for rank in ranks:
            assert self.receive(rank) == "seen"
        for rank in ranks:
            self.send(rank, "go")
        return self.end(ranks)


class Processes(Stage):
    leaf = "gloo"

    def __init__(self, part: Part, world_size: int, *arguments: Any) -> None:
        super().__init__(world_size)
        self.team = RankTeam(_play, world_size, self.leaf, part, arguments)
        self.stopped: set[int] = set()

    def receive(self, rank: int) -> Any:
        return self.team.receive(rank, TIMEOUT_S)

    def send(self, rank: int, value: object) -> None:
        self.team.send(rank, value)

    def kill(self, rank: int) -> None:
        self.team.send_signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        self.team.send_signal(rank, signal.SIGSTOP)
        self.stopped.add(rank)

    def end(self, ranks: list[int]) -> list[Any]:
        outcomes = self.team.wait(TIMEOUT_S, ranks)
        assert all(outcome.returned for outcome in outcomes), [o.story() for o in outcomes]
        for outcome in outcomes:
            assert "frame #" not in outcome.output, f"a C++ stack trace:\n{outcome.output}"
        return [outcome.value for outcome in outcomes]

    def __exit__(self, *error: object) -> None:
        try:
            if error == (None, None, None):
                self.team.wait(TIMEOUT_S, sorted(set(range(self.world_size)) - self.stopped))
        finally:
            self.team.close()


@final
class SharedProcesses(Processes):
    leaf = "shared"


@final
class HostsProcesses(Processes):
    """The first two ranks are on one host, others on another."""

    def __init__(self, part: Part, world_size: int, *arguments: Any) -> None:
        self.leaf = "hosts 2" if world_size == 2 else f"hosts 2+{world_size - 2}"
        super().__init__(part, world_size, *arguments)


def _play(rank: Rank, leaf: str, part: Part, arguments: tuple[Any, ...]) -> Any:
    with rank.connect(backend=leaf, timeout_s=TIMEOUT_S) as comm:
        return part(comm, rank, *arguments)


@final
class Threads(Stage):
    def __init__(self, part: Part, world_size: int, *arguments: Any) -> None:
        super().__init__(world_size)
        self.team = ThreadTeam(world_size, timeout_s=TIMEOUT_S)
        self.lines = [_ThreadLine() for _ in range(world_size)]
        self.values: list[Any] = [None] * world_size

        def body(rank: int) -> None:
            with self.team.communicator(rank) as comm:
                try:
                    self.values[rank] = part(comm, self.lines[rank], *arguments)
                except BaseException as error:
                    self.values[rank] = error

        self.threads = [
            threading.Thread(target=body, args=(r,), name=f"rank-{r}") for r in range(world_size)
        ]
        for thread in self.threads:
            thread.start()

    def receive(self, rank: int) -> Any:
        return self.lines[rank].up.get(timeout=TIMEOUT_S)

    def send(self, rank: int, value: object) -> None:
        self.lines[rank].down.put(value)

    def kill(self, rank: int) -> None:
        self.team.fail(rank)

    def stop(self, rank: int) -> None:
        pass  # it waits for the test already

    def end(self, ranks: list[int]) -> list[Any]:
        for rank in ranks:
            self.threads[rank].join(TIMEOUT_S)
            assert not self.threads[rank].is_alive()
        return [self.values[rank] for rank in ranks]

    def __exit__(self, *_: object) -> None:
        for rank, thread in enumerate(self.threads):
            self.team.fail(rank)
            self.send(rank, "go")
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


class _ThreadLine:
    def __init__(self) -> None:
        self.up: queue.Queue[Any] = queue.Queue()
        self.down: queue.Queue[Any] = queue.Queue()

    def send(self, value: object) -> None:
        self.up.put(value)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        return self.down.get(timeout=timeout_s)
