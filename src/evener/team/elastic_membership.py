"""An elastic team of processes: the coordinator forms generations, and members connect."""

import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, final

from evener import lease_clock
from evener.comm.addresses import parse_address
from evener.comm.base import Communicator
from evener.comm.groups import form_groups
from evener.comm.host_leaders import connect_hosts
from evener.comm.messages import first_line
from evener.comm.network import MeetingPoint
from evener.errors import (
    CollectiveError,
    ConfigError,
    CoordinatorLostError,
    LaunchError,
    LeftOutError,
    PeerLostError,
    TeamRefusedError,
)
from evener.protocol.formation import (
    NO_NUMBER,
    Formation,
    Standing,
    read_team_limits,
)
from evener.team.backends import ExchangeFacts, prefer_nccl
from evener.team.child import notify_supervisor
from evener.team.elastic import CoordinatorLink
from evener.team.environment import ADDRESS, COORDINATOR, ELASTIC, MEMBER
from evener.team.membership import Formed, Membership, WaitWatch
from evener.team.signals import StopSignals
from evener.team.terminal import say, warn
from evener.team.wire import JOINED, JOINING, read_team_token

_PAUSE_S = 0.05


@final
class ElasticMembership(Membership):
    """A worker's place in a team with a coordinator.

    Every generation has new connections, and new shared memory if members share a host. So a
    process that was stopped and wakes up cannot reach members of a team that has continued.

    On Ctrl-C (SIGINT) a member leaves after its window; a second one ends it at once, as does the
    first one while it is not a member.

    Args:
        link: Link to the coordinator.
        address: ``HOST:PORT`` of the coordinator; the route to it determines members' network.
        most: Most members of the team.
        shares_memory: Whether members on one host exchange through shared memory.
        timeout_s: Deadline of an exchange.
        gpu: The facts of this member if GPUs exchange over NCCL; else ``None``.
    """

    is_elastic = True

    def __init__(
        self,
        link: CoordinatorLink,
        address: str,
        most: int,
        *,
        shares_memory: bool,
        timeout_s: float,
        gpu: ExchangeFacts | None = None,
    ) -> None:
        self._link, self._shares_memory, self._timeout_s = link, shares_memory, timeout_s
        self._host, port = parse_address(address, "EVENER_COORDINATOR")
        self._port, self._gpu = port or 0, gpu
        super().__init__(self._await_number(most), most, link)
        self.member = link.member
        self._joins = link.generation > 0
        #: The store of the generation: torch keeps no reference to a store in Python.
        self._store: Any = None
        #: The port of a generation that did not connect; it stays open while others try it.
        self._meeting: MeetingPoint | None = None
        self._unreached: list[str] = []  # members of a generation that did not connect
        self._tried_s = 0.0  # failed attempts to connect, since a generation connected
        self._has_left = self._closed = False
        self._handlers = ExitStack()
        interrupts = StopSignals([signal.SIGINT], max_interrupts=0)
        self._interrupts = self._handlers.enter_context(interrupts)

    def _await_number(self, most: int) -> int:
        """Return this worker's number, once it is known whether the team has begun.

        The number of a lost member is free shortly after it is lost. A coordinator that was just
        restarted learns the team's generation from its members.
        """
        link, deadlines = self._link, self._link.deadlines
        patience_s = deadlines.lease_s + deadlines.connect_s
        if not link.await_number(patience_s):
            why = (
                f"it has {most} workers, the most that it may have; wait until one has ended, or "
                "start the team with a larger MAX"
                if link.number == NO_NUMBER
                else "the coordinator has not reported whether it began; start this worker again"
            )
            raise LaunchError(
                f"{link.member} cannot join the team at {self._host}:{self._port} within "
                f"{patience_s:g} s (lease_s + connect_s): {why}"
            )
        return link.number

    @property
    def is_joining(self) -> bool:
        """Whether the team has begun, and this worker is not a member yet."""
        return self._joins

    @property
    def wants_change(self) -> bool:
        """Whether a worker waits to join, or members are fewer than the least."""
        return self._link.wants_change

    @property
    def is_leaving(self) -> bool:
        """Whether this worker leaves because of Ctrl-C."""
        return self._interrupts.requested is not None and not self._has_left

    @property
    def is_over(self) -> bool:
        """Whether the coordinator has reported the end of the generation, or is lost."""
        return self._link.is_lost or bool(self._link.why_over(self.generation))

    def next_generation(self, standing: Standing | None) -> Formed:
        """Report to the coordinator, and connect to the members of the generation that it forms.

        Raises:
            CollectiveError: Not all members connected; they form another generation.
            LaunchError: Attempts to connect have taken ``timeout_s`` in all.
        """
        self._interrupts.take_interrupts(0)  # between generations there is no window to finish
        try:
            formation = self._link.next_generation(standing, self._unreached)
        except LeftOutError:
            self._joins = True
            raise
        self._interrupts.take_interrupts(0 if self.is_leaving else 1)
        has_joined, self._joins = self._joins, False
        self.generation = formation.generation
        self._unreached, self._meeting = [], None
        self.number = formation.number_of(self.member)
        notify_supervisor(place=JOINED)
        if has_joined:
            say(
                f"evener: {self.member} has joined the team at {self._host}:{self._port} as rank "
                f"{self.number} of {len(formation.members)}; it receives the state of another rank "
                "and trains until the run ends; on Ctrl-C it leaves after its window"
            )
        began_s = time.monotonic()
        try:
            comm = self._connect(formation)
        except CollectiveError as error:
            self._bear(error, time.monotonic() - began_s)
            raise
        self._tried_s = 0.0
        return Formed(formation, comm)

    def _bear(self, error: CollectiveError, took_s: float) -> None:
        """Warn that a generation did not connect; raise LaunchError if that lasts too long."""
        timeout_s, connect_s = self._link.deadlines.timeout_s, self._link.deadlines.connect_s
        self._tried_s += min(took_s, connect_s)  # longer only if this process was stopped
        if self._tried_s >= timeout_s:
            raise LaunchError(
                f"rank {self.number} could not connect to a generation for {timeout_s:g} s "
                f"(timeout_s); the last error: {error}: check the network between the workers"
            ) from None
        warn(f"{error}; they form another generation")

    def _connect(self, formation: Formation) -> Communicator:
        if len(formation.members) == 1:
            return Communicator(timeout_s=self._timeout_s, number=self.number)
        connect_s = self._link.deadlines.connect_s
        self._store = self._link.store(formation.generation, connect_s)
        meeting = MeetingPoint(self._store, self._link.reached_at)
        comm: Communicator
        try:
            comm = form_groups(
                meeting,
                rank=formation.members.index(self.member),
                numbers=formation.numbers,
                key=f"evener/{formation.generation}",
                timeout_s=self._timeout_s,
                form_timeout_s=connect_s,
            )
        except RuntimeError as error:
            self._meeting = meeting  # the others test whether they reach this one
            others = [number for number in formation.numbers if number != self.number]
            missed = meeting.find_unreached(others)
            self._unreached = [formation.members[formation.numbers.index(n)] for n in missed]
            whom = f"; it does not reach {', '.join(self._unreached)}" if self._unreached else ""
            raise PeerLostError(
                f"{self.member} could not connect to all members of generation "
                f"{formation.generation}, which are {', '.join(formation.members)}, within "
                f"{connect_s:g} s (connect_s; {first_line(error)}){whom}"
            ) from None
        comm.report_waits_to(WaitWatch(self))  # a member may be lost meanwhile
        try:
            comm.reason = "asked for; ranks exchange through sockets of their hosts"
            if self._shares_memory:
                comm, comm.reason = connect_hosts(comm)
            if self._gpu is not None:
                prefer_nccl(comm, self._gpu, connect_s)
        except BaseException:
            comm.close()
            raise
        return comm

    def await_lease(self) -> None:
        """Wait until the coordinator has renewed this worker's lease; usually it has.

        Raises:
            PeerLostError: The generation is over.
            CoordinatorLostError: The coordinator does not answer.
        """
        if lease_clock.now_s() < self._link.lease_end_s():
            return
        if not self._link.await_lease(self._timeout_s):
            none = f"the coordinator has renewed no lease within {self._timeout_s:g} s (timeout_s)"
            why = self._link.why_over(self.generation) or none
            raise PeerLostError(
                f"rank {self.number} may not commit in generation {self.generation}: {why}"
            )

    def take_refused(self) -> list[tuple[str, str]]:
        """Return which workers the coordinator has refused since the last call, and why."""
        return self._link.take_refused()

    def may_write(self) -> bool:
        """Wait for the lease if it has run out; return whether the team has kept this worker.

        Between generations there is no lease.
        """
        if not 0.0 < self._link.lease_end_s() <= lease_clock.now_s():
            return not self._joins
        try:
            self.await_lease()
        except (PeerLostError, CoordinatorLostError, TeamRefusedError):
            return False
        return True

    def described(self, name: str, timeout_s: float) -> Any:
        """Ask the coordinator for a fact of the members."""
        deadline = time.monotonic() + timeout_s
        while True:
            leads, is_late = self._link.leads, time.monotonic() >= deadline
            if (found := self._link.describe({}).get(name)) or leads:
                return found
            if is_late:
                raise LaunchError(
                    f"the team has not sent its {name} within {timeout_s:g} s (timeout_s); check "
                    "that its workers run the same command as this one"
                )
            time.sleep(_PAUSE_S)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Send facts to the coordinator, which compares them."""
        self._link.describe(facts)

    def leave(self, *, finished: bool) -> None:
        """Report to the coordinator that this worker leaves."""
        if not self._has_left:
            self._has_left = True
            notify_supervisor(finished=finished or self._link.run_has_ended)
            self._link.leave(finished=finished)

    def close(self) -> None:
        """Leave the team, and end the connection to its coordinator.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and the team has stopped before this worker could
                leave: all workers were leaving, or this was the last one.
        """
        if self._closed:
            return
        self._closed = True
        interrupted = self.is_leaving
        self.leave(finished=False)
        self._link.close()
        self._meeting = None
        self._handlers.close()
        if interrupted and sys.exception() is None:
            raise KeyboardInterrupt


def check_team_limits(asked: str, environ: Mapping[str, str]) -> None:
    """Refuse a team whose limits differ from those of the script.

    Args:
        asked: Fewest and most workers, as ``MIN:MAX``.
        environ: The environment of the process.

    Raises:
        ConfigError: The process was not started for an elastic team, or for one of another size.
    """
    found = environ.get(ELASTIC)
    if found is None:
        raise ConfigError(
            f"elastic is {asked!r}, but this process was not started for an elastic team; start "
            f"the script by itself or by `evener launch --elastic {asked} SCRIPT`, or add it to a "
            "team by `evener join`"
        )
    if found != asked:
        raise ConfigError(
            f"elastic is {asked!r}, but the team was started for {found} workers; leave elastic "
            f"out of Ddp.setup, or start the team with --elastic {asked}"
        )


def join_team(
    environ: Mapping[str, str],
    facts: Mapping[str, Any],
    *,
    shares_memory: bool,
    timeout_s: float,
    gpu: ExchangeFacts | None,
) -> ElasticMembership:
    """Return this process's place in the elastic team for which it was started.

    Args:
        environ: The environment of the process, in which the launcher has described the place.
        facts: What must be the same on all members, such as the model's fingerprint.
        shares_memory: See ``ElasticMembership``.
        timeout_s: See ``ElasticMembership``.
        gpu: See ``ElasticMembership``.

    Raises:
        ConfigError: The environment describes the place only in part.
        TeamRefusedError: The coordinator refuses this worker.
        CoordinatorLostError: The coordinator does not answer.
    """
    address = environ[COORDINATOR]
    member, limits = environ.get(MEMBER), environ.get(ELASTIC)
    if not (member and limits):
        raise ConfigError(
            f"{COORDINATOR} is {address!r}, but {ELASTIC if member else MEMBER} is not set: "
            "`evener launch --elastic MIN:MAX` sets all of them"
        )
    _, most = read_team_limits(limits, "--elastic")
    notify_supervisor(place=JOINING)
    wish = int(environ.get("RANK", NO_NUMBER))  # so that "rank 2" is the launcher's worker 2
    link = CoordinatorLink(
        address,
        token=read_team_token(environ),
        member=member,
        facts=facts,
        timeout_s=timeout_s,
        wish=wish,
        reached_at=environ.get(ADDRESS, ""),
    )
    try:
        return ElasticMembership(
            link, address, most, shares_memory=shares_memory, timeout_s=timeout_s, gpu=gpu
        )
    except BaseException:
        link.close()
        raise
