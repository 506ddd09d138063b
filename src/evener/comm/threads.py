"""Ranks as threads of one process, with the same errors as ranks in processes."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evener.comm.base import DEFAULT_TIMEOUT_S, Call, Communicator
from evener.comm.messages import (
    closed_message,
    late_message,
    lost_message,
    mismatch_message,
    timeout_message,
)
from evener.devices import kind_of
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
)


class _Exchange(NamedTuple):
    """One collective call under way.

    Attributes:
        offers: By rank: its call, and what it brings.
        results: What all ranks take home; empty until the last has come.
        errors: Says to a rank why there will be none; empty while there may be one.
    """

    offers: dict[int, tuple[Call, Any]]
    results: list[Any]
    errors: list[Callable[[int], CollectiveError]]


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
        self._hurried: dict[int, tuple[int, float]] = {}
        self._children: list[ThreadTeam] = []

    def communicator(self, rank: int) -> "ThreadCommunicator":
        """Return the communicator of ``rank``, to be used by that rank's thread."""
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

    def _hurry(self, rank: int, hurried: tuple[int, float]) -> None:
        with self._condition:
            self._hurried[rank] = hurried
            self._condition.notify_all()

    def _child(self, members: tuple[int, ...]) -> "ThreadTeam":
        numbers = [self.numbers[rank] for rank in members]
        child = ThreadTeam(len(members), timeout_s=self.timeout_s, numbers=numbers)
        self._children.append(child)
        return child

    def _meet(self, rank: int, call: Call, offer: Any, finish: Callable[[list[Any]], Any]) -> Any:
        """Bring ``offer``, wait for all ranks, and return what ``finish`` makes of their offers."""
        started = time.monotonic()
        with self._condition:
            exchange = self._exchanges.setdefault(call.number, _Exchange({}, [], []))
            exchange.offers[rank] = (call, offer)
            if len(exchange.offers) == self.world_size and not (exchange.errors or self._dead):
                self._complete(exchange, finish)
            while not exchange.results:
                deadline = started + call.timeout_s
                hurried, latest = self._hurried.get(rank, (0, math.inf))
                if call.number <= hurried:
                    deadline = min(deadline, latest)
                if error := self._obstacle(rank, call, exchange, started, deadline):
                    raise error
                self._condition.wait(max(0.0, deadline - time.monotonic()))
            return exchange.results[0]

    def _complete(self, exchange: _Exchange, finish: Callable[[list[Any]], Any]) -> None:
        calls = {rank: call for rank, (call, _) in exchange.offers.items()}
        labels = {rank: call.label for rank, call in calls.items()}
        if len(set(labels.values())) > 1:

            def differs(rank: int) -> CollectiveError:
                own = labels[rank]
                others = [(r, label) for r, label in labels.items() if label != own]
                return CollectiveMismatchError(mismatch_message(rank, own, others))

            exchange.errors.append(differs)
        else:
            exchange.results.append(finish([exchange.offers[r][1] for r in self.numbers]))
        exchange.offers.clear()
        self._exchanges.pop(next(iter(calls.values())).number, None)
        self._condition.notify_all()

    def _obstacle(
        self, rank: int, call: Call, exchange: _Exchange, started: float, deadline: float
    ) -> CollectiveError | None:
        """Return why ``rank`` must stop waiting, if it must."""
        if exchange.errors:
            return exchange.errors[0](rank)
        if rank in self._dead:
            return PeerLostError(f"rank {rank} has died in {call.what!r}")
        if rank in self._closed:
            return CollectiveError(closed_message(rank, call.what))
        closed = self._closed - self._dead - exchange.offers.keys()
        gone = {**dict.fromkeys(self._dead, "has died"), **dict.fromkeys(closed, "has closed")}
        if gone:
            how = ", ".join(f"rank {r} {text}" for r, text in sorted(gone.items()))
            return PeerLostError(lost_message(rank, call.what, how))
        if time.monotonic() < deadline:
            return None
        waited_s = time.monotonic() - started
        missing = tuple(r for r in self.numbers if r not in exchange.offers)

        def too_late(other: int) -> CollectiveError:
            if other in missing:
                return CollectiveTimeoutError(late_message(other, call.what, waited_s))
            return CollectiveTimeoutError(
                timeout_message(other, call.what, waited_s, missing), missing=missing
            )

        exchange.errors.append(too_late)
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
        self._exchange(flat, call, flat, _sum)

    def _broadcast(self, flat: Tensor, src: int, call: Call) -> None:
        self._exchange(flat, call, flat, lambda offers: _settled(offers[src].clone()))

    def _all_gather_parts(self, flat: Tensor, call: Call) -> None:
        part = flat.chunk(self.world_size)[self.rank]
        self._exchange(flat, call, part, lambda offers: torch.cat([o.cpu() for o in offers]))

    def _all_gather_rows(self, row: Sequence[float], call: Call) -> list[list[float]]:
        values = [float(value) for value in row]
        return [list(r) for r in self._meet(call, values, lambda offers: offers)]

    def _split(self, members: tuple[int, ...], key: str, call: Call) -> Communicator | None:
        team = self._meet(call, None, lambda _: self._team._child(members))
        return team.communicator(members.index(self.rank)) if self.rank in members else None

    def _exchange(
        self, flat: Tensor, call: Call, offer: Tensor, finish: Callable[[list[Tensor]], Tensor]
    ) -> None:
        """Write the result of ``finish`` on all ranks' offers into ``flat``."""
        flat.copy_(self._meet(call, _settled(offer), finish))
        _settled(flat)  # before the memory of the result may be given to others

    def _meet(self, call: Call, offer: Any, finish: Callable[[list[Any]], Any]) -> Any:
        try:
            return self._team._meet(self.number, call, offer, finish)
        except CollectiveError as error:
            raise self._end(error) from None

    def _hurry(self, deadline: float) -> None:
        self._team._hurry(self.number, self._hurried)

    def _release(self) -> None:
        self._team._leave(self.number)


def _sum(offers: list[Tensor]) -> Tensor:
    total = offers[0].clone()
    for other in offers[1:]:
        total.add_(other.to(total.device))
    return _settled(total)


def _settled(tensor: Tensor) -> Tensor:
    """Wait until the work that this thread has queued on the tensor's device is done.

    Other threads may be on streams of their own, which do not wait for this one's.
    """
    kind_of(tensor.device).finish(tensor.device)
    return tensor
