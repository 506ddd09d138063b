"""How the ranks of a fixed team connect through a coordinator, and form their groups.

The coordinator is their launcher's. If evener's launcher has not started one, rank 0 hosts it on a
thread. The others find it at ``MASTER_ADDR``, in the store of torchrun's agent, or by a process
group.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from math import inf
from typing import Any, Final, final

from evener.closing import Closing
from evener.comm.addresses import (
    LOOPBACK,
    is_loopback,
    is_number,
    join_address,
    listens_everywhere,
    open_port,
)
from evener.comm.base import Communicator, check_timeout
from evener.comm.c10d import TCPStore
from evener.comm.existing import find_place
from evener.comm.forks import NotInherited, close_in_children
from evener.comm.groups import form_groups
from evener.comm.messages import first_line
from evener.comm.network import MeetingPoint, own_address
from evener.comm.wires import close_server
from evener.errors import ConfigError, CoordinatorLostError, LaunchError, TeamRefusedError
from evener.protocol.formation import Deadlines, FixedPlace
from evener.team.child import notify_supervisor
from evener.team.coordinator_options import CoordinatorOptions
from evener.team.coordinator_thread import CoordinatorThread
from evener.team.elastic import CoordinatorLink
from evener.team.environment import ADDRESS, COORDINATOR, ELASTIC, MEMBER, DistributedTrainConfig
from evener.team.membership import Membership
from evener.team.terminal import warn
from evener.team.wire import JOINED, JOINING, read_team_token

#: Longest attempt of a host to reach itself: it answers at once unless the address is another's.
_OWN_HOST_S: Final = 10.0
#: Longest attempt to reach a coordinator from torchrun's store, before that is read again.
_ATTEMPT_S: Final = 1.0
#: Longest wait after a refusal for another coordinator in torchrun's store.
_STALE_S: Final = 5.0
#: Longest time for ranks to connect after all have registered.
_CONNECT_S: Final = 60.0
#: Fixed teams form by events, so the rank's interpreter is rarely interrupted.
_TICK_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.05

_lock = threading.RLock()
_num_teams: dict[str, int] = {}
_hosted: dict[str, "HostedCoordinator"] = {}


def place_in(group: Any) -> DistributedTrainConfig:
    """Return this rank's place in a group of ``torch.distributed``; its ranks call it together.

    Raises:
        ConfigError: This process is not in it.
        LaunchError: Its ranks cannot connect.
    """
    return DistributedTrainConfig(**find_place(group), launched_by="torch.distributed")


def meet(environment: DistributedTrainConfig, timeout_s: float) -> tuple[Communicator, Membership]:
    """Connect to the other ranks of a fixed team, and form its communicator; all call it together.

    It does not use or change a default process group. The communicator uses Gloo.

    Args:
        environment: This rank's place; with one rank no connection is opened.
        timeout_s: Deadline for this call, and the communicator's default deadline.

    Returns:
        The communicator, and the place in the team.

    Raises:
        ConfigError: There is no port.
        LaunchError: The port is in use, a rank cannot be reached or did not come, or ranks differ.
    """
    deadline = time.monotonic() + check_timeout(timeout_s)
    rank, world_size = environment.rank, environment.world_size
    if world_size == 1:
        return Communicator(timeout_s=timeout_s), Membership(rank, world_size)
    if not environment.coordinator_port:
        raise ConfigError(
            "the port is 0: rank 0 needs one of 1 to 65535 where the other ranks find the team's "
            "coordinator (coordinator_port, or MASTER_PORT in the environment)"
        )
    # A team that is not the launcher's does not need all of the launcher's ranks.
    is_launchers = environment.launched_by == "evener"
    if is_launchers:
        notify_supervisor(place=JOINING)
    with _numbered(environment) as number:
        meeting = _Meeting(environment, number, deadline)
        try:
            meeting.meet()
            comm = meeting.form(timeout_s)
        except BaseException:
            meeting.close()
            raise
    if is_launchers:
        notify_supervisor(place=JOINED)
    return comm, Membership(rank, world_size, meeting.link)


def meeting_key(environment: DistributedTrainConfig) -> str:
    """Return a text for the address at which ranks connect, by which they count their teams."""
    if given := _launchers_coordinator(environment):
        return given
    return f"{environment.coordinator_addr} {environment.coordinator_port}"


def _launchers_coordinator(environment: DistributedTrainConfig) -> str:
    """Return ``HOST:PORT`` of the coordinator of evener's launcher; empty without one."""
    is_launchers = environment.launched_by == "evener" and ELASTIC not in os.environ
    return os.environ.get(COORDINATOR, "") if is_launchers else ""


@contextmanager
def _numbered(environment: DistributedTrainConfig) -> Iterator[str]:
    """Yield the name of a team: the number of teams that this rank joined before at the address."""
    key = meeting_key(environment)
    with _lock:
        number = _num_teams.get(key, 0)
        _num_teams[key] = number + 1
    try:
        yield str(number)
    except BaseException:  # the other ranks have not connected either
        with _lock:
            _num_teams[key] -= 1
        raise


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The address of a coordinator.

    Attributes:
        address: ``HOST:PORT``.
        token: The token that its clients must know; ``None`` for none.
        host_rank: The rank whose process hosts it; ``None`` for none of them.
        attempt_s: Longest wait for its answer.
    """

    address: str
    token: bytes | None
    host_rank: int | None = 0
    attempt_s: float = inf


@final
class _Meeting(Closing):
    """A rank's link to the coordinator, which it may host itself.

    Args:
        environment: The rank's place.
        team: Name of the team.
        deadline: When the team must have formed, on the monotonic clock.
    """

    def __init__(self, environment: DistributedTrainConfig, team: str, deadline: float) -> None:
        self._environment = environment
        self._place = FixedPlace(team, environment.rank, environment.world_size)
        self._deadline = deadline
        self._hosted: HostedCoordinator | None = None
        self._store: _AgentStore | None = None
        self.link: CoordinatorLink | None = None

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        """Leave the team; idempotent."""
        link, hosted = self.link, self._hosted
        self.link = self._hosted = None
        if link is not None:
            link.leave()
            link.close()
        if hosted is not None:
            hosted.close()

    def meet(self) -> None:
        """Connect to the coordinator, and wait there for the other ranks.

        A coordinator that ends meanwhile may have been rank 0's for an earlier team, or, in the
        store of torchrun's agent, that of ranks that have ended.

        Raises:
            LaunchError: See ``meet``.
        """
        is_lost = False
        while True:
            self._where = where = self._find()
            if self.link is not None:  # to a coordinator that has ended
                self.link.close()
                self.link = None
            try:
                self.link = CoordinatorLink(
                    where.address,
                    token=where.token,
                    member=os.environ.get(MEMBER) or f"{socket.gethostname()}/{os.getpid()}",
                    facts={},
                    timeout_s=min(where.attempt_s, self._left_s),
                    reached_at=os.environ.get(ADDRESS, ""),
                    place=self._place,
                )
                self._formation = self.link.meet_all(self._left_s)
                return
            except CoordinatorLostError:
                is_lost = True
                time.sleep(_LONGEST_PAUSE_S)
            except TeamRefusedError as error:
                # The address may be from ranks that have ended, or another program's by now.
                if not self._finds_another(where):
                    raise LaunchError(str(error)) from None
            except LaunchError as error:
                if self._store is not None and self.link is None and self._left_s > 0:
                    continue
                if not is_lost:
                    raise
                raise LaunchError(
                    f"rank {self._place.rank} lost the coordinator at {where.address} while the "
                    f"team of {self._place.world_size} was forming ({error}): rank 0 or its "
                    "launcher has ended, and its output shows why"
                ) from None

    def _finds_another(self, refusing: Whereabouts) -> bool:
        """Return whether torchrun's store has another coordinator than the one that refuses."""
        if self._store is None or self._hosted is not None:
            return False
        try:
            self._store.read(min(_STALE_S, self._left_s), but=refusing)
        except LaunchError:
            return False
        return True

    def _find(self) -> Whereabouts:
        """Return the coordinator's address; this rank may have to host it."""
        environment = self._environment
        if given := _launchers_coordinator(environment):
            return Whereabouts(given, read_team_token(os.environ), None)
        if environment.agent_store:
            self._store = self._store or _AgentStore(environment, self._place.team, self._left_s)
        if environment.rank == 0:
            if self._hosted is None:
                self._hosted = host(environment, self._left_s)
                if self._store is not None:
                    self._store.publish(self._hosted.where)
            return self._hosted.where
        if self._store is not None:
            return self._store.read(self._left_s)
        address = join_address(environment.coordinator_addr, environment.coordinator_port)
        return Whereabouts(address, _team_token(environment))

    def form(self, timeout_s: float) -> Communicator:
        """Connect to the other ranks; the communicator closes this with its last group.

        Args:
            timeout_s: Default deadline of the communicator.

        Raises:
            LaunchError: A rank cannot be reached.
        """
        assert self.link is not None
        form_s = max(1.0, self._left_s)
        store = self.link.store(self._formation.generation, form_s)
        meeting = MeetingPoint(
            store,
            self.link.reached_at,
            host_rank=self._where.host_rank,
            connection=self,
        )
        try:
            return form_groups(
                meeting,
                rank=self._place.rank,
                numbers=self._formation.numbers,
                key="evener",
                timeout_s=timeout_s,
                form_timeout_s=min(form_s, _CONNECT_S),
            )
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self._place.rank} could not form a team of {self._place.world_size} at "
                f"{self._where.address} ({first_line(error)}): look at the output of the other "
                "ranks; firewalls must let ranks connect to each other, on any port; if hosts have "
                "several networks, name the one to use in GLOO_SOCKET_IFNAME"
            ) from None


# ── the coordinator of rank 0 ────────────────────────────────────────────────────────────────────


@final
class HostedCoordinator(Closing, NotInherited):
    """A coordinator on a thread of rank 0, which ends with the last team that uses it.

    Teams of one script share it if they use the same address. Each calls ``host`` and closes the
    result.

    Attributes:
        where: Its address.
        num_users: Number of teams that use it.
    """

    def __init__(self, environment: DistributedTrainConfig, timeout_s: float) -> None:
        token = _team_token(environment)
        reached_at, port = environment.coordinator_addr, environment.coordinator_port
        if environment.agent_store:  # the agent has the port, and its store passes the token
            reached_at = LOOPBACK if is_loopback(reached_at) else own_address(reached_at, 1)
            port, token = 0, token or secrets.token_hex(16).encode()
        listening = open_port(reached_at, port, program="the team's coordinator", is_guarded=True)
        if token is None and environment.launched_by != "evener":
            _warn_if_open(environment, listening)
        options = CoordinatorOptions(
            most=environment.world_size,
            token=token,
            deadlines=Deadlines(timeout_s=timeout_s, patience_s=timeout_s),
        )
        self._coordinator = CoordinatorThread(options, listening, tick_s=_TICK_S)
        if is_number(reached_at) and ip_address(reached_at).is_unspecified:
            reached_at = LOOPBACK  # on which it listens, too
        address = join_address(reached_at, self._coordinator.port)
        self.where = Whereabouts(address, token, attempt_s=_OWN_HOST_S)
        self._key = meeting_key(environment)
        self.num_users = 0
        close_in_children(self)

    def close(self) -> None:
        """End one use."""
        with _lock:
            self.num_users -= 1
            if not self.num_users:
                del _hosted[self._key]
                self._coordinator.close()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets; see ``NotInherited``."""
        close_server(self._coordinator.port)


def host(environment: DistributedTrainConfig, timeout_s: float) -> HostedCoordinator:
    """Host the coordinator of a fixed team, or use the one that an open team of this rank has.

    Raises:
        LaunchError: The port is in use, or not allowed.
    """
    key = meeting_key(environment)
    with _lock:
        if key not in _hosted:
            _hosted[key] = HostedCoordinator(environment, timeout_s)
        _hosted[key].num_users += 1
        return _hosted[key]


def _team_token(environment: DistributedTrainConfig) -> bytes | None:
    """Return the token of rank 0's coordinator: that which rank 0 has sent, or the user's.

    With a process group and a token file there are two; all ranks prefer the same one.
    """
    return environment.coordinator_token.encode() or read_team_token(os.environ)


def _warn_if_open(environment: DistributedTrainConfig, listening: socket.socket) -> None:
    number = str(listening.getsockname()[0])
    if listens_everywhere(listening) or not is_loopback(number):
        warn(
            f"anyone who reaches {environment.coordinator_addr} port "
            f"{environment.coordinator_port} can join this team; set EVENER_TOKEN_FILE to a file "
            "with the same secret on every machine, or use a private network"
        )


@final
class _AgentStore:
    """The store in which rank 0 publishes its coordinator, if torchrun's agent has the port.

    The agent keeps it while it restarts the ranks, so its content may be from ranks that have
    ended.

    Args:
        environment: This rank's place.
        team: Name of the team.
        timeout_s: Longest wait for the agent.

    Raises:
        LaunchError: The agent does not answer.
    """

    def __init__(self, environment: DistributedTrainConfig, team: str, timeout_s: float) -> None:
        self._rank = environment.rank
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"evener/coordinator/{attempt}/{team}"
        host, port = environment.coordinator_addr, environment.coordinator_port
        try:
            self._store = _connect(host, port, max(1.0, timeout_s))
        except (RuntimeError, TimeoutError) as error:
            raise LaunchError(
                f"{host}:{port} does not answer as the store of torchrun's agent "
                f"({first_line(error)}): is another program using the port, or has the agent ended?"
            ) from None

    def publish(self, where: Whereabouts) -> None:
        """Publish the coordinator's address."""
        token = (where.token or b"").decode("latin-1")
        self._store.set(self._key, json.dumps([where.address, token]))

    def read(self, timeout_s: float, but: Whereabouts | None = None) -> Whereabouts:
        """Wait until rank 0 has published its coordinator's address.

        Args:
            timeout_s: Longest wait.
            but: A known address, which does not count.

        Raises:
            LaunchError: Rank 0 has not published it in time.
        """
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        try:
            while (where := self._look()) is None or where == but:
                if time.monotonic() >= deadline:
                    raise LaunchError(
                        f"rank {self._rank} waited {timeout_s:.0f} s for rank 0 to publish the "
                        "address of the team's coordinator: start rank 0, or look at its output"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self._rank} lost the store of torchrun's agent while the team was forming "
                f"({first_line(error)}): the agent has ended, and its output shows why"
            ) from None
        return where

    def _look(self) -> Whereabouts | None:
        if not self._store.check([self._key]):  # get() would ignore Ctrl-C while it waits
            return None
        address, token = json.loads(self._store.get(self._key))
        return Whereabouts(address, token.encode("latin-1") or None, attempt_s=_ATTEMPT_S)


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    answer: Future[TCPStore] = Future()

    def ask() -> None:
        try:
            answer.set_result(TCPStore(host, port, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # raised in the waiting thread
            answer.set_exception(error)

    # A thread, because torch waits forever for a silent server, and ignores Ctrl-C.
    threading.Thread(target=ask, name="evener-store", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        raise TimeoutError(f"silent for {timeout_s:.0f} s") from None
