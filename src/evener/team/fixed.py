"""How the ranks of a fixed team meet through a coordinator, and form their groups."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from evener.closing import Closing
from evener.comm.base import DEFAULT_TIMEOUT_S, Communicator, check_timeout
from evener.comm.existing import close_in_children, find_place
from evener.comm.groups import form_groups
from evener.comm.messages import first_line
from evener.comm.network import MeetingPoint
from evener.errors import ConfigError, CoordinatorLostError, LaunchError, TeamRefusedError
from evener.protocol.formation import FixedPlace
from evener.team.address import parse_address
from evener.team.channel import JOINED, JOINING
from evener.team.child import tell
from evener.team.elastic import CoordinatorLink
from evener.team.environment import ADDRESS, COORDINATOR, ELASTIC, MEMBER, DistributedTrainConfig
from evener.team.hosting import (
    AgentStore,
    HostedCoordinator,
    Whereabouts,
    host,
    meeting_key,
    read_team_token,
    team_token,
)

#: For how long a host tries to reach itself: it answers at once, or the address is another's.
_OWN_HOST_S: Final = 10.0
#: How long a coordinator is tried of which torchrun's store tells, before that is read again.
_ATTEMPT_S: Final = 1.0
#: Ranks that have met connect within so long, or the network does not let them.
_CONNECT_S: Final = 60.0
#: A coordinator of ranks that are being ended refuses others, and has gone after so long.
_STALE_S: Final = 5.0

_lock = threading.Lock()
_num_teams: dict[str, int] = {}


def place_in(group: Any) -> DistributedTrainConfig:
    """Return this rank's place in a group of ``torch.distributed``; all its ranks call it together.

    Raises:
        ConfigError: This process is not in it.
        LaunchError: Its ranks cannot meet.
    """
    found = find_place(group)
    close_in_children(group)
    return DistributedTrainConfig.of_rank(**found._asdict(), launched_by="torch.distributed")


def join(
    environment: DistributedTrainConfig,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    backend: str = "gloo",
) -> Communicator:
    """Meet the other ranks of a fixed team, and form its communicator; all of them call it.

    It works beside a default process group and touches none. With ``"nccl"``, CUDA tensors use the
    current CUDA device; rows, small tensors and CPU tensors still go over Gloo.

    Args:
        environment: This rank's place; with one rank nothing is opened.
        timeout_s: Deadline for this call, and the communicator's default deadline.
        backend: ``"gloo"`` or ``"nccl"``.

    Raises:
        ConfigError: There is no port.
        LaunchError: The port is taken, a rank cannot be reached or did not come, or ranks differ.
    """
    deadline = time.monotonic() + check_timeout(timeout_s)
    if environment.world_size == 1:
        return Communicator(timeout_s=timeout_s)
    if not environment.coordinator_port:
        raise ConfigError(
            "the port is 0: rank 0 needs one of 1 to 65535 where the other ranks find the team's "
            "coordinator (coordinator_port, or MASTER_PORT in the environment)"
        )
    # Another team than the launcher's does not need all of its ranks.
    is_launchers = environment.launched_by == "evener"
    if is_launchers:
        tell(place=JOINING)
    with _numbered(environment) as number:
        meeting = _Meeting(environment, number, deadline)
        try:
            meeting.meet()
            comm = meeting.form(backend, timeout_s)
        except BaseException:
            meeting.close()
            raise
    if is_launchers:
        tell(place=JOINED)
    return comm


@contextmanager
def _numbered(environment: DistributedTrainConfig) -> Iterator[str]:
    """Give a team its name: how many teams this rank joined before at the same place."""
    key = meeting_key(environment)
    with _lock:
        number = _num_teams.get(key, 0)
        _num_teams[key] = number + 1
    try:
        yield str(number)
    except BaseException:  # the other ranks have not met either
        with _lock:
            _num_teams[key] -= 1
        raise


@final
class _Meeting(Closing):
    """A rank's way to the others: its link to the coordinator, which it may host itself.

    Args:
        environment: The rank's place.
        team: Name of the team.
        deadline: When the team must have formed, on the monotonic clock.
    """

    def __init__(self, environment: DistributedTrainConfig, team: str, deadline: float) -> None:
        self._environment = environment
        self._place = FixedPlace(team, environment.rank, environment.world_size)
        self._deadline = deadline
        self._timeout_s = deadline - time.monotonic()
        self._hosted: HostedCoordinator | None = None
        self._link: CoordinatorLink | None = None
        self._where: Whereabouts | None = None

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        """Leave the team; idempotent."""
        link, hosted = self._link, self._hosted
        self._link = self._hosted = None
        if link is not None:
            link.leave()
            link.close()
        if hosted is not None:
            hosted.close()

    def meet(self) -> None:
        """Find the coordinator, and wait there for the other ranks.

        Raises:
            LaunchError: See ``join``.
        """
        environment, given = self._environment, os.environ.get(COORDINATOR)
        own = (environment.coordinator_addr, environment.coordinator_port)
        if given and ELASTIC not in os.environ and environment.launched_by == "evener":
            address, port = parse_address(given, COORDINATOR)
            self.meet_at(Whereabouts(address, port or 0, read_team_token(os.environ), None))
        elif environment.rank == 0:
            self._meet_own()
        elif environment.agent_store:
            self._meet_as_told(AgentStore(environment, self._place.team, self._left_s))
        else:
            self.meet_at(Whereabouts(*own, team_token(environment), 0))

    def _meet_own(self) -> None:
        environment, team = self._environment, self._place.team
        self._hosted = hosted = host(environment, self._timeout_s)
        where = Whereabouts(hosted.reached_at, hosted.port, hosted.token, 0)
        try:
            self._connect(where, min(_OWN_HOST_S, self._left_s))
        except TeamRefusedError as error:
            raise LaunchError(str(error)) from None
        except LaunchError:
            raise LaunchError(
                f"rank 0 hosts the team's coordinator, and does not reach itself at "
                f"{where.address}: give the address of the host that rank 0 runs on (MASTER_ADDR)"
            ) from None
        if environment.agent_store:
            AgentStore(environment, team, self._left_s).publish(where)
        try:
            self._wait_for_all()
        except (CoordinatorLostError, TeamRefusedError) as error:
            raise LaunchError(str(error)) from None

    def meet_at(self, where: Whereabouts) -> None:
        """Meet through a coordinator that is somewhere else.

        One that ends meanwhile may have been rank 0's for a team before this one.
        """
        is_lost = False
        while True:
            try:
                self._connect(where, self._left_s)
                self._wait_for_all()
                return
            except CoordinatorLostError:
                is_lost = True
            except LaunchError:
                if not is_lost:
                    raise
                raise LaunchError(
                    f"rank {self._place.rank} lost the coordinator at {where.address} while the "
                    f"team of {self._place.world_size} was forming: rank 0 or its launcher has "
                    "ended, and its output says why"
                ) from None
            except TeamRefusedError as error:
                raise LaunchError(str(error)) from None

    def _meet_as_told(self, store: AgentStore) -> None:
        where: Whereabouts | None = None
        while True:
            where = store.read(self._left_s)
            try:
                self._connect(where, min(_ATTEMPT_S, self._left_s))
            except LaunchError:  # it was that of ranks that have ended
                if self._left_s > 0:
                    continue
                raise
            except TeamRefusedError as error:
                try:
                    store.read(min(_STALE_S, self._left_s), before=where)
                except LaunchError:
                    raise LaunchError(str(error)) from None
                continue
            try:
                self._wait_for_all()
                return
            except CoordinatorLostError:
                continue
            except TeamRefusedError as error:
                raise LaunchError(str(error)) from None

    def _connect(self, where: Whereabouts, timeout_s: float) -> None:
        if self._link is not None:  # to a coordinator that has gone
            self._link.close()
        self._where = where
        self._link = CoordinatorLink(
            where.address,
            token=where.token,
            member=os.environ.get(MEMBER) or f"{socket.gethostname()}/{os.getpid()}",
            facts={},
            timeout_s=timeout_s,
            reached_at=os.environ.get(ADDRESS, ""),
            place=self._place,
        )

    def _wait_for_all(self) -> None:
        assert self._link is not None
        self._formation = self._link.meet_all(self._left_s)

    def form(self, backend: str, timeout_s: float) -> Communicator:
        """Connect to the other ranks; the communicator closes this with its last group.

        Args:
            backend: ``"gloo"`` or ``"nccl"``.
            timeout_s: Default deadline of the communicator.

        Raises:
            LaunchError: A rank cannot be reached.
        """
        assert self._link is not None
        assert self._where is not None
        environment, form_s = self._environment, max(1.0, self._left_s)
        store = self._link.store(self._formation.generation, form_s)
        meeting = MeetingPoint(
            store,
            self._link.reached_at,
            host_rank=self._where.host_rank,
            connection=self,
        )
        try:
            if store.add("ready", 1) == environment.world_size:
                store.set("all are ready", b"")
            store.wait(["all are ready"])
            return form_groups(
                meeting,
                rank=environment.rank,
                numbers=self._formation.numbers,
                key="evener",
                backend=backend,
                timeout_s=timeout_s,
                form_timeout_s=min(form_s, _CONNECT_S),
            )
        except RuntimeError as error:
            raise LaunchError(
                f"rank {environment.rank} could not form a team of {environment.world_size} at "
                f"{self._where.address} ({first_line(error)}): look at the output of the other "
                "ranks; firewalls must let ranks connect to each other, on any port; where hosts "
                "have several networks, name the one to use in GLOO_SOCKET_IFNAME"
            ) from None
