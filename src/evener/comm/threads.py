"""Ranks as threads of one process, with the same errors as ranks in processes."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evener.comm.base import CELL_BYTES, DEFAULT_TIMEOUT_S, Communicator, Sum, Transport, Wait
from evener.comm.calls import Call
from evener.comm.messages import closed_message, late_message, lost_message, timeout_message
from evener.devices import kind_of
from evener.errors import CollectiveError, CollectiveTimeoutError, PeerLostError

_SLICE_S = 0.25  # waits are cut so that deadlines can be shortened by another thread


class _Exchange(NamedTuple):
    """One exchange under way.

    Attributes:
        offers: The value of each rank.
        results: What all ranks return; empty until the last has come.
        errors: By rank, why there will be none; empty while there may be one.
    """

    offers: dict[int, Any]
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
            numbers: The number of each rank in messages; see ``Communicator.numbers``.
        """
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.numbers = tuple(range(world_size) if numbers is None else numbers)
        # All that follows is kept by these numbers.
        self._condition = threading.Condition()
        self._exchanges: dict[int, _Exchange] = {}
        self._dead: set[int] = set()
        self._closed: set[int] = set()
        self._children: list[ThreadTeam] = []

    def communicator(self, rank: int) -> Communicator:
        """Return the communicator of ``rank``, to be used by that rank's thread."""
        return Communicator(ThreadTransport(self, rank), timeout_s=self.timeout_s)

    def fail(self, number: int) -> None:
        """Act as if the process of a rank had died: ranks that need it get ``PeerLostError``."""
        with self._condition:
            self._dead.add(number)
            self._condition.notify_all()
            children = list(self._children)
        for child in children:
            if number in child.numbers:
                child.fail(number)

    # ── for ThreadTransport ──────────────────────────────────────────────────────────────────────

    def _leave(self, rank: int) -> None:
        with self._condition:
            self._closed.add(rank)
            self._condition.notify_all()

    def _child(self, members: tuple[int, ...]) -> "ThreadTeam":
        numbers = [self.numbers[rank] for rank in members]
        child = ThreadTeam(len(members), timeout_s=self.timeout_s, numbers=numbers)
        self._children.append(child)
        return child

    def _meet(
        self, number: int, rank: int, wait: Wait, offer: Any, finish: Callable[[list[Any]], Any]
    ) -> Any:
        """Bring ``offer``, wait for all ranks, and return what ``finish`` makes of their offers."""
        with self._condition:
            exchange = self._exchanges.setdefault(number, _Exchange({}, [], []))
            exchange.offers[rank] = offer
            if len(exchange.offers) == self.world_size and not (exchange.errors or self._dead):
                exchange.results.append(finish([exchange.offers[r] for r in self.numbers]))
                exchange.offers.clear()
                del self._exchanges[number]
                self._condition.notify_all()
            while not exchange.results:
                if error := self._obstacle(rank, exchange, wait):
                    raise error
                self._condition.wait(max(0.0, min(wait.left_s, _SLICE_S)))
            return exchange.results[0]

    def _obstacle(self, rank: int, exchange: _Exchange, wait: Wait) -> CollectiveError | None:
        """Return why ``rank`` must stop waiting, if it must."""
        what, waited_s = wait.call.what, wait.waited_s
        if exchange.errors:
            return exchange.errors[0](rank)
        if rank in self._dead:
            return PeerLostError(f"rank {rank} has died in {what!r}")
        if wait.has_ended:
            return CollectiveError(closed_message(rank, what))
        closed = self._closed - self._dead - exchange.offers.keys()
        gone = {**dict.fromkeys(self._dead, "has died"), **dict.fromkeys(closed, "has closed")}
        if gone:
            how = ", ".join(f"rank {r} {text}" for r, text in sorted(gone.items()))
            return PeerLostError(lost_message(rank, what, how))
        if wait.left_s > 0:
            return None
        missing = tuple(r for r in self.numbers if r not in exchange.offers)

        def too_late(other: int) -> CollectiveError:
            if other in missing:
                return CollectiveTimeoutError(late_message(other, what, waited_s))
            return CollectiveTimeoutError(
                timeout_message(other, what, waited_s, missing), missing=missing
            )

        exchange.errors.append(too_late)
        self._condition.notify_all()
        return too_late(rank)


class ThreadTransport(Transport):
    """One rank of a ``ThreadTeam``."""

    joins_processes = False

    def __init__(self, team: ThreadTeam, rank: int) -> None:
        cells = [memoryview(bytearray(CELL_BYTES)) for _ in range(team.world_size)]
        super().__init__("threads", rank, team.numbers, [cells])
        self._team = team
        self._num_meetings = 0

    def _swap(self, cells: Sequence[memoryview], wait: Wait, call: Call) -> None:
        gathered = self._meet(wait, bytes(cells[self.rank]), lambda offers: offers)
        for cell, content in zip(cells, gathered, strict=True):
            cell[:] = content

    def sum_each(self, sums: Sequence[Sum], wait: Wait) -> None:
        """Form sums; see the base class."""
        for one in sums:
            wait.announce(one.call)
            self._exchange(one.flat, wait, one.flat, _sum)

    def copy(self, flat: Tensor, src: int, wait: Wait) -> None:
        """Copy from one rank; see the base class."""
        wait.announce(wait.call)
        self._exchange(flat, wait, flat, lambda offers: _settled(offers[src].clone()))

    def gather_parts(self, flat: Tensor, wait: Wait) -> None:
        """Gather parts; see the base class."""
        wait.announce(wait.call)
        part = flat.chunk(len(self.numbers))[self.rank]
        self._exchange(flat, wait, part, lambda offers: torch.cat([o.cpu() for o in offers]))

    def split(self, members: tuple[int, ...], key: str, wait: Wait) -> Transport | None:
        """Form a team of some of the threads; see the base class."""
        team = self._meet(wait, None, lambda _: self._team._child(members))
        return ThreadTransport(team, members.index(self.rank)) if self.rank in members else None

    def cut(self) -> None:
        """Leave the team; see the base class."""
        self._team._leave(self.number)

    def _exchange(
        self, flat: Tensor, wait: Wait, offer: Tensor, finish: Callable[[list[Tensor]], Tensor]
    ) -> None:
        """Write the result of ``finish`` on all ranks' offers into ``flat``."""
        flat.copy_(self._meet(wait, _settled(offer), finish))
        _settled(flat)  # before the memory of the result may be given to others

    def _meet(self, wait: Wait, offer: Any, finish: Callable[[list[Any]], Any]) -> Any:
        self._num_meetings += 1
        return self._team._meet(self._num_meetings, self.number, wait, offer, finish)


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
