"""Ranks as threads of one process, with the same errors as ranks in processes."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from evener.comm.base import (
    DEFAULT_TIMEOUT_S,
    Call,
    Communicator,
)
from evener.comm.messages import closed_message, lost_message, mismatch_message, timeout_message
from evener.devices import kind_of
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
)


@dataclass(slots=True)
class _Exchange:
    """One collective call under way.

    Attributes:
        number: Its number, from 1.
        offers: By rank: words for what it takes part in, and what it brings.
        result: What all ranks take home, once the last has come.
        done: Whether there is a result.
        error: Says to a rank why there will be none.
    """

    number: int
    offers: dict[int, tuple[str, Any]] = field(default_factory=dict)
    result: Any = None
    done: bool = False
    error: Callable[[int], CollectiveError] | None = None

    def complete(self, result: Any) -> None:
        self.result, self.done = result, True

    def fail(self, why: Callable[[int], CollectiveError]) -> None:
        self.error = why


@final
class ThreadTeam:
    """A team whose ranks are threads of this process, one communicator for each.

    The last rank to arrive forms the result, in rank order; so it is the same on every run.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Make a team.

        Args:
            world_size: Number of ranks, 1 or more.
            timeout_s: Deadline of a call that names none.
            numbers: The number of each rank for people; see ``Communicator.numbers``.
        """
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}: a team has 1 rank or more")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.numbers = tuple(range(world_size) if numbers is None else numbers)
        # All that follows is kept by these numbers.
        self._condition = threading.Condition()
        self._exchanges: dict[int, _Exchange] = {}
        self._dead: set[int] = set()
        self._closed: set[int] = set()
        self._latest: dict[int, float] = {}
        self._children: list[ThreadTeam] = []

    def communicator(self, rank: int) -> "ThreadCommunicator":
        """The communicator of ``rank``, to be used by that rank's thread."""
        return ThreadCommunicator(self, rank)

    def fail(self, number: int) -> None:
        """Act as if the process of a rank had died: who needs it gets ``PeerLostError``."""
        with self._condition:
            self._dead.add(number)
            self._condition.notify_all()
            children = list(self._children)
        for child in children:
            if number in child.numbers:
                child.fail(number)

    # ── for ThreadCommunicator ───────────────────────────────────────────────────────────────────

    def _leave(self, rank: int) -> None:
        with self._condition:
            self._closed.add(rank)
            self._condition.notify_all()

    def _hurry(self, rank: int, deadline: float) -> None:
        with self._condition:
            self._latest[rank] = deadline
            self._condition.notify_all()

    def _child(self, members: tuple[int, ...]) -> "ThreadTeam":
        numbers = [self.numbers[rank] for rank in members]
        child = ThreadTeam(len(members), timeout_s=self.timeout_s, numbers=numbers)
        self._children.append(child)
        return child

    def _meet(
        self, rank: int, call: Call, words: str, offer: Any, finish: Callable[[list[Any]], Any]
    ) -> Any:
        """Bring ``offer``, wait for all ranks, and return what ``finish`` makes of their offers."""
        started = time.monotonic()
        with self._condition:
            exchange = self._exchanges.setdefault(call.number, _Exchange(call.number))
            exchange.offers[rank] = (words, offer)
            if len(exchange.offers) == self.world_size and not (exchange.error or self._dead):
                self._complete(exchange, finish)
            while not exchange.done:
                error = self._obstacle(rank, call, exchange, started)
                if error is not None:
                    raise error
                left_s = self._deadline(rank, call, started) - time.monotonic()
                self._condition.wait(max(0.0, left_s))
            return exchange.result

    def _deadline(self, rank: int, call: Call, started: float) -> float:
        return min(started + call.timeout_s, self._latest.get(rank, math.inf))

    def _complete(self, exchange: _Exchange, finish: Callable[[list[Any]], Any]) -> None:
        texts = {r: words for r, (words, _) in exchange.offers.items()}
        if len(set(texts.values())) > 1:
            exchange.fail(
                lambda rank: CollectiveMismatchError(
                    mismatch_message(
                        rank, texts[rank], [(r, t) for r, t in texts.items() if t != texts[rank]]
                    )
                )
            )
        else:
            exchange.complete(finish([exchange.offers[r][1] for r in self.numbers]))
        exchange.offers.clear()
        self._exchanges.pop(exchange.number, None)
        self._condition.notify_all()

    def _obstacle(
        self, rank: int, call: Call, exchange: _Exchange, started: float
    ) -> CollectiveError | None:
        """Why ``rank`` must stop waiting, if it must."""
        if exchange.error is not None:
            return exchange.error(rank)
        if rank in self._dead:
            return PeerLostError(f"rank {rank} has died in {call.what!r}")
        if rank in self._closed:
            return CollectiveError(closed_message(rank, call.what))
        closed = self._closed - self._dead - exchange.offers.keys()
        gone = {**dict.fromkeys(self._dead, "has died"), **dict.fromkeys(closed, "has closed")}
        if gone:
            how = ", ".join(f"rank {r} {text}" for r, text in sorted(gone.items()))
            return PeerLostError(lost_message(rank, call.what, how))
        if time.monotonic() < self._deadline(rank, call, started):
            return None
        waited_s = time.monotonic() - started
        missing = tuple(r for r in self.numbers if r not in exchange.offers)

        def too_late(other: int) -> CollectiveError:
            if other in missing:
                return CollectiveTimeoutError(
                    f"rank {other} came to {call.what!r} after the others had given up: their "
                    f"deadline was {waited_s:.1f} s; raise the timeout if this rank is merely slow"
                )
            return CollectiveTimeoutError(
                timeout_message(other, call.what, waited_s, missing), missing=missing
            )

        exchange.fail(too_late)
        self._condition.notify_all()
        return too_late(rank)


@final
class ThreadCommunicator(Communicator):
    """One rank of a ``ThreadTeam``."""

    def __init__(self, team: ThreadTeam, rank: int) -> None:
        super().__init__(
            rank=rank,
            world_size=team.world_size,
            backend="threads",
            timeout_s=team.timeout_s,
            numbers=team.numbers,
        )
        self._team = team

    def _all_reduce(self, flat: Tensor, call: Call) -> None:
        words = f"all_reduce of {flat.numel()} {flat.dtype}"
        self._take(flat, self._meet(call, words, _settled(flat), _sum))

    def _broadcast(self, flat: Tensor, src: int, call: Call) -> None:
        words = f"broadcast of {flat.numel()} bytes from rank {self.numbers[src]}"
        offer = _settled(flat)
        self._take(flat, self._meet(call, words, offer, lambda offers: _copy(offers[src])))

    def _all_gather_parts(self, flat: Tensor, call: Call) -> None:
        size = flat.numel() // self.world_size
        part = flat[self.rank * size : (self.rank + 1) * size]
        words = f"all_gather_parts of {size} bytes"
        offer = _settled(part)
        self._take(
            flat,
            self._meet(call, words, offer, lambda offers: torch.cat([o.cpu() for o in offers])),
        )

    def _all_gather_rows(self, row: Sequence[float], call: Call) -> list[list[float]]:
        values = [float(value) for value in row]
        words = f"{call.kind} of {len(values)} numbers"
        return [list(r) for r in self._meet(call, words, values, lambda offers: offers)]

    def _split(self, members: tuple[int, ...], key: str, call: Call) -> Communicator | None:
        team = self._meet(call, key, None, lambda _: self._team._child(members))
        return team.communicator(members.index(self.rank)) if self.rank in members else None

    def _take(self, flat: Tensor, result: Tensor) -> None:
        flat.copy_(result)
        _settled(flat)  # before the memory of the result may be given to others

    def _meet(self, call: Call, words: str, offer: Any, finish: Callable[[list[Any]], Any]) -> Any:
        try:
            return self._team._meet(self.number, call, f"{call.what!r} ({words})", offer, finish)
        except CollectiveError as error:
            raise self._end(error) from None

    def _hurry(self, deadline: float) -> None:
        self._team._hurry(self.number, deadline)

    def _release(self) -> None:
        self._team._leave(self.number)

    def _forget(self) -> None:
        pass


def _sum(offers: list[Tensor]) -> Tensor:
    total = offers[0].clone()
    for other in offers[1:]:
        total.add_(other.to(total.device))
    return _settled(total)


def _copy(offer: Tensor) -> Tensor:
    return _settled(offer.clone())


def _settled(tensor: Tensor) -> Tensor:
    """Lets what this thread has queued on the tensor's device come to its end.

    Other threads may be on streams of their own, which do not wait for this one's.
    """
    kind_of(tensor.device).finish(tensor.device)
    return tensor
