"""The transport of ranks on several hosts, some of which have two ranks or more."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import final

import torch
from torch import Tensor

from evener.comm.background import BackgroundJob
from evener.comm.base import Communicator, Sum, Transport, Wait
from evener.comm.calls import Call
from evener.comm.groups import GroupTransport
from evener.comm.messages import name_ranks
from evener.comm.shared import share_memory
from evener.comm.shared_memory import SharedMemory
from evener.comm.shared_offers import place_of_this_process

#: Bytes that are added up inside a host while those before travel between hosts.
_CHUNK_BYTES = 2 << 20


@final
class HostsTransport(Transport):
    """Ranks on several hosts, of which at least one has several.

    A large tensor is summed in three steps: ranks of one host add up, the first one of each host
    (its *leader*) exchanges with the other leaders, and the others copy its result. So as many
    bytes travel between hosts as with one rank on each. It is cut into chunks: while leaders
    exchange one, the next is added up inside the hosts. A broadcast reaches each host once.

    It stands on a group of all ranks, which exchanges cells, and the parts of tensors: these are
    small, or seldom of use here. By its notices ranks learn who is missing, in whichever step they
    wait; see ``Communicator.within``.
    """

    def __init__(
        self,
        beneath: GroupTransport,
        places: Mapping[int, str],
        inside: Communicator | None,
        between: Communicator | None,
        memory: SharedMemory | None,
    ) -> None:
        """Take over what ``connect_hosts`` has made.

        Args:
            beneath: Joins the same ranks; it belongs to this one, as all that follows does.
            places: By number of each rank, a text that is the same for ranks of one host.
            inside: Joins the ranks of this host; ``None`` for one.
            between: Joins the leaders, in the order of their hosts; ``None`` on another rank.
            memory: Where this rank's tensors lie; ``None`` where it shares none.
        """
        super().__init__("hosts", beneath.rank, beneath.numbers, [beneath.cells])
        self._beneath, self._places, self._memory = beneath, places, memory
        self._inside, self._between = inside, between
        self._hosts = _hosts_of(self.numbers, places)
        self._job: BackgroundJob[None] = BackgroundJob("evener-hosts")
        for part in self._parts:
            part.explain_by(beneath.board)

    @property
    def can_round(self) -> bool:
        """Return whether this rank is a leader."""
        return self._between is not None

    @property
    def _parts(self) -> list[Communicator]:
        return [part for part in (self._inside, self._between) if part is not None]

    @property
    def group(self) -> Transport:
        """Return what it stands on; see the base class."""
        return self._beneath

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in memory that this host shares, where it does; see the base class."""
        if self._inside is None:
            return super().allocate(numel, dtype, device)
        return self._inside.allocate(numel, dtype, device)

    def look_for_losses(self, wait: Wait) -> None:
        """Watch ranks of other hosts; see the base class."""
        self._beneath.watch(wait)

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def _swap(self, cells: Sequence[memoryview], wait: Wait, call: Call) -> None:
        self._beneath.swap(wait, call)

    def bytes_of_sum(self, num_bytes: int, *, bits: int) -> int:
        """Return what travels inside the host, and between hosts if this rank is a leader."""
        return sum(part.bytes_of_sum(num_bytes, bits=bits) for part in self._parts)

    def sum_each(self, sums: Sequence[Sum], wait: Wait) -> None:
        """Form sums; see the base class."""
        self._beneath.begin_watch()
        under_way = None
        for chunk in [*chain.from_iterable(map(_chunks_of, sums)), None]:
            if chunk is not None:
                self._sum_inside(wait, chunk)
            if under_way is not None and self._between is not None:
                self._job.wait()
            if chunk is not None and self._between is not None:
                self._start(self._between, wait, chunk)
            if under_way is not None:
                self._spread(wait, under_way.call, under_way.flat)
            under_way = chunk

    def _sum_inside(self, wait: Wait, chunk: Sum) -> None:
        call = chunk.call
        if self._inside is not None:
            with self._inside.within(wait, call):
                self._inside.all_reduce(chunk.flat, what=call.what, timeout_s=call.timeout_s)

    def _start(self, between: Communicator, wait: Wait, chunk: Sum) -> None:
        call, flat, lost, bits = chunk

        def exchange() -> None:
            with between.within(wait, call):
                between.all_reduce(
                    flat, what=call.what, timeout_s=call.timeout_s, lost=lost, bits=bits
                )

        self._job.start(exchange)

    def _spread(self, wait: Wait, call: Call, flat: Tensor, src: int = 0) -> None:
        """Copy from one rank of this host to the others."""
        if self._inside is not None:
            with self._inside.within(wait, call):
                self._inside.broadcast(flat, src, what=call.what, timeout_s=call.timeout_s)

    def copy(self, flat: Tensor, src: int, wait: Wait) -> None:
        """Copy from one rank; see the base class."""
        self._beneath.begin_watch()
        call = wait.call
        (host,) = (number for number, ranks in enumerate(self._hosts) if src in ranks)
        is_there = self.rank in self._hosts[host]
        if is_there:
            self._spread(wait, call, flat, self._hosts[host].index(src))
        if self._between is not None:
            with self._between.within(wait, call):
                self._between.broadcast(flat, host, what=call.what, timeout_s=call.timeout_s)
        if not is_there:
            self._spread(wait, call, flat)

    def gather_parts(self, flat: Tensor, wait: Wait) -> None:
        """Gather parts; see the base class."""
        self._beneath.gather_parts(flat, wait)

    def split(self, members: tuple[int, ...], key: str, wait: Wait) -> Transport | None:
        """Form a transport of some ranks beneath; ``upgrade`` lifts it."""
        return self._beneath.split(members, key, wait)

    def upgrade(self, part: Communicator) -> None:
        """Exchange by hosts there, too; see the base class."""
        _connect(part, self._places, self._memory)

    # ── end of life ──────────────────────────────────────────────────────────────────────────────

    def cut(self) -> None:
        """End the connections; see the base class."""
        for part in self._parts:
            part.close()
        self._beneath.cut()

    def close(self) -> None:
        """Release everything; see the base class."""
        self.cut()
        self._job.close()
        if self._memory is not None:
            self._memory.release()
        self._beneath.close()

    def forget(self) -> None:
        """Release the store; see the base class."""
        self._beneath.forget()

    def close_in_child(self) -> None:
        """Close connections in a forked child, where the parts close their own."""
        self._beneath.close_in_child()


def connect_hosts(comm: Communicator, place: str | None = None) -> tuple[Communicator, str]:
    """Make ranks of one host exchange through its memory; all ranks call it together.

    Args:
        comm: Joins them, on one host or on several. It exchanges as before where no two ranks can
            share memory, or one of them cannot.
        place: What identifies this rank's host; that of this process by default.

    Returns:
        The communicator, and how ranks exchange, as text.
    """
    gathered = comm.all_gather_json(place or place_of_this_process(), what="where ranks run")
    return _connect(comm, dict(zip(comm.numbers, gathered, strict=True)), None)


def _connect(
    comm: Communicator, places: Mapping[int, str], memory: SharedMemory | None
) -> tuple[Communicator, str]:
    """Do as ``connect_hosts`` for ranks whose places are known; ``memory`` may have tensors."""
    hosts = _hosts_of(comm.numbers, places)
    if len(hosts) == comm.world_size:
        return comm, "no two ranks are on one host (and in one container), so they use sockets"
    if len(hosts) == 1:
        comm, obstacle = share_memory(comm, memory=memory)
        whole = "all ranks are on one host and exchange through its memory"
        return comm, f"{obstacle}, so ranks exchange through sockets" if obstacle else whole
    inside, obstacle, leaders = None, "", [ranks[0] for ranks in hosts]
    with ExitStack() as formed:
        for ranks in hosts:
            if len(ranks) == 1:
                continue
            part = comm.split(ranks, name="ranks of a host", reports_waits=False)
            if part is not None:
                formed.callback(part.close)
                if memory is None:
                    # Without such files, ``share_memory`` reports that.
                    with suppress(OSError, AttributeError):
                        memory = SharedMemory(comm.number)
                else:
                    memory.use()
                if memory is not None:
                    formed.callback(memory.release)
                inside, obstacle = share_memory(part, memory=memory)
        between = comm.split(leaders, name="hosts", reports_waits=False)
        if between is not None:
            formed.callback(between.close)
        obstacles = comm.all_gather_json(obstacle, what="whether memory is shared")
        if obstacle := next(filter(None, obstacles), ""):
            return comm, f"{obstacle}, so ranks exchange through sockets"

        def stand_on(beneath: Transport) -> Transport:
            assert isinstance(beneath, GroupTransport), "hosts are joined by sockets"
            return HostsTransport(beneath, places, inside, between, memory)

        if inside is None:
            memory = None
        comm.replace_transport(stand_on)
        formed.pop_all()
    which = name_ranks([comm.numbers[rank] for rank in leaders])
    return comm, (
        "ranks of one host exchange through its memory, and "
        f"{which} through sockets, each for its host"
    )


def _chunks_of(whole: Sum) -> Iterator[Sum]:
    """Return the sums of the chunks of a tensor."""
    step = _CHUNK_BYTES // whole.flat.element_size()
    for start in range(0, whole.flat.numel(), step):
        part = slice(start, start + step)
        lost = None if whole.lost is None else whole.lost[part]
        yield whole._replace(flat=whole.flat[part], lost=lost)


def _hosts_of(numbers: Sequence[int], places: Mapping[int, str]) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ones."""
    hosts: dict[str, list[int]] = {}
    for rank, number in enumerate(numbers):
        hosts.setdefault(places[number], []).append(rank)
    return list(hosts.values())
