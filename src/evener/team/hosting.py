"""Where the ranks of a fixed team find their coordinator: their launcher's, or one of rank 0's.

Rank 0 hosts a coordinator on a thread where no launcher of evener's has started one. The others
find it at ``MASTER_ADDR``, in the store of torchrun's agent, or as a process group has told them.
"""

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final, final

from evener.closing import Closing
from evener.comm.addresses import (
    LOOPBACK,
    bind,
    is_loopback,
    is_number,
    listens_everywhere,
)
from evener.comm.c10d import TCPStore
from evener.comm.forks import NotInherited, leave_behind_in_children
from evener.comm.messages import first_line
from evener.comm.network import own_address
from evener.comm.wires import close_server
from evener.errors import LaunchError
from evener.protocol.formation import Deadlines
from evener.team.coordinator import CoordinatorOptions, CoordinatorThread
from evener.team.environment import TOKEN_FILE, DistributedTrainConfig
from evener.team.terminal import warn
from evener.team.token_files import read_token

#: Fixed teams form by events; meanwhile the interpreter belongs to the rank.
_TICK_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a coordinator is.

    Attributes:
        host: Name or number of its host.
        port: Its port.
        token: What its visitors must know; ``None`` for nothing.
        host_rank: The rank whose process hosts it; ``None`` for none of them.
    """

    host: str
    port: int
    token: bytes | None
    host_rank: int | None

    @property
    def address(self) -> str:
        """Host and port, as people write them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@final
class HostedCoordinator(Closing, NotInherited):
    """A coordinator on a thread of rank 0, which ends with the last team that uses it.

    Teams of one script share it if they are to meet at the same place. Each calls ``host`` and
    closes what that returns.

    Attributes:
        reached_at: Name or number of its host, by which the ranks reach it.
        port: Where it listens.
        token: What its visitors must know.
    """

    def __init__(
        self, key: str, reached_at: str, listening: socket.socket, options: CoordinatorOptions
    ) -> None:
        self._coordinator = CoordinatorThread(options, listening, tick_s=_TICK_S)
        self._key, self.reached_at = key, reached_at
        self.port, self.token = self._coordinator.port, options.token
        self.num_users = 0
        leave_behind_in_children(self)

    def close(self) -> None:
        """End one use."""
        with _lock:
            self.num_users -= 1
            if not self.num_users:
                del _hosted[self._key]
                self._coordinator.close()

    def leave_behind(self) -> None:
        """Close a forked child's copies of the sockets; see ``NotInherited``."""
        close_server(self.port)


_lock = threading.RLock()
_hosted: dict[str, HostedCoordinator] = {}


def host(environment: DistributedTrainConfig, timeout_s: float) -> HostedCoordinator:
    """Host the coordinator of a fixed team, or use the one that an open team of this rank has.

    Raises:
        LaunchError: The port is in use, or not allowed.
    """
    key = meeting_key(environment)
    with _lock:
        found = _hosted.get(key)
        if found is None:
            found = _hosted[key] = _start(key, environment, timeout_s)
        found.num_users += 1
        return found


def meeting_key(environment: DistributedTrainConfig) -> str:
    """Return a text for the place at which ranks meet, by which they count their teams."""
    return f"{environment.coordinator_addr} {environment.coordinator_port}"


def _start(key: str, environment: DistributedTrainConfig, timeout_s: float) -> HostedCoordinator:
    token = read_team_token(os.environ)
    reached_at = environment.coordinator_addr
    if not environment.agent_store:
        listening = listen(reached_at, environment.coordinator_port)
        token = token or environment.coordinator_token.encode() or None
        if token is None and environment.launched_by != "evener":
            _warn_of_strangers(environment, listening)
    else:  # an agent has the port; the token travels through its store
        reached_at = LOOPBACK if is_loopback(reached_at) else own_address(reached_at, 1)
        listening = listen(reached_at, 0)
        token = token or secrets.token_hex(16).encode()
    options = CoordinatorOptions(
        most=environment.world_size,
        token=token,
        deadlines=Deadlines(timeout_s=timeout_s, patience_s=timeout_s),
    )
    if is_number(reached_at) and ip_address(reached_at).is_unspecified:
        reached_at = LOOPBACK  # which it listens on, too
    return HostedCoordinator(key, reached_at, listening, options)


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens for the ranks of a team, on this address alone; see ``bind``.

    Raises:
        LaunchError: The port is in use, or not allowed.
    """
    try:
        return bind(address, port, socket.SOMAXCONN)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is in use on {address}, so the team's coordinator cannot listen "
                "there: end the other program (perhaps an earlier run), or choose another port"
            ) from None
        raise LaunchError(
            f"the team's coordinator cannot listen on {address}:{port} ({error.strerror}): rank 0 "
            "must run on the host with that address, and ports below 1024 need root"
        ) from None


def _warn_of_strangers(environment: DistributedTrainConfig, listening: socket.socket) -> None:
    number = str(listening.getsockname()[0])
    if listens_everywhere(listening) or not is_loopback(number):
        warn(
            f"anyone who reaches {environment.coordinator_addr} port "
            f"{environment.coordinator_port} can join this team; set EVENER_TOKEN_FILE to a file "
            "with the same secret on every machine, or use a private network"
        )


def read_team_token(environ: Mapping[str, str]) -> bytes | None:
    """Return what the user or the launcher has all processes of a team know, if anything."""
    token_file = environ.get(TOKEN_FILE)
    return read_token(Path(token_file) if token_file else None) or None


# ── the store of torchrun's agent ────────────────────────────────────────────────────────────────


@final
class AgentStore:
    """Where rank 0 tells the others its coordinator's address, if torchrun's agent has the port.

    The agent keeps it while it starts the ranks again, so what is found there may be of ranks that
    have ended.

    Args:
        environment: This rank's place.
        team: Name of the team.
        timeout_s: Longest wait for the agent.

    Raises:
        LaunchError: The agent does not answer.
    """

    def __init__(self, environment: DistributedTrainConfig, team: str, timeout_s: float) -> None:
        self._environment = environment
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
        """Say where the coordinator is."""
        token = (where.token or b"").decode("latin-1")
        self._store.set(self._key, json.dumps([where.host, where.port, token]))

    def read(self, timeout_s: float, before: Whereabouts | None = None) -> Whereabouts:
        """Wait until rank 0 has said where its coordinator is; not where it was ``before``.

        Raises:
            LaunchError: It has not said so in time.
        """
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        try:
            # check() first: get() would wait for the key, and ignore Ctrl-C.
            while not self._store.check([self._key]) or (where := self._read()) == before:
                if time.monotonic() >= deadline:
                    raise LaunchError(
                        f"rank {self._environment.rank} waited {timeout_s:.0f} s for rank 0 to say "
                        "where the team's coordinator is: start rank 0, or look at its output"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self._environment.rank} lost the store of torchrun's agent while the team "
                f"was forming ({first_line(error)}): the agent has ended, and its output says why"
            ) from None
        return where

    def _read(self) -> Whereabouts:
        host, port, token = json.loads(self._store.get(self._key))
        return Whereabouts(host, port, token.encode("latin-1") or None, 0)


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    answer: Future[TCPStore] = Future()

    def ask() -> None:
        try:
            answer.set_result(TCPStore(host, port, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # raised where it is waited for
            answer.set_exception(error)

    # A thread, because torch waits without end for a silent server, and ignores Ctrl-C.
    threading.Thread(target=ask, name="evener-store", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        raise TimeoutError(f"silent for {timeout_s:.0f} s") from None
