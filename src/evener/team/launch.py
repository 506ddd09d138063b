"""Launch this host's part of a team: its agent, and on the first host the coordinator.

A plainly started script becomes ``python -P -m evener.team.launch N|MIN:MAX COMMAND``; see
``starting.py``. It never imports torch.
"""

import errno
import os
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from evener.comm.addresses import LOOPBACK, bind, is_own, join_address, parse_address
from evener.errors import LaunchError, RunEndedError
from evener.protocol.formation import Deadlines, read_team_limits
from evener.team.agent import MAX_FAILURES, Agent, JoinedTeam, run_has_ended
from evener.team.child import run_child
from evener.team.connection import AgentConnection
from evener.team.coordinator_options import CoordinatorOptions, listen
from evener.team.coordinator_thread import CoordinatorThread
from evener.team.environment import ADDRESS, TOKEN_FILE
from evener.team.nodes import DEFAULT_TIMEOUT_S, MAX_NPROC, Nodes
from evener.team.signals import SignalQueue, end_in_silence
from evener.team.terminal import say
from evener.team.wire import read_token
from evener.team.worker_processes import LocalRanks

#: Longest wait for the coordinator of a running team.
_CONNECT_S: Final = 30.0
_OWN_S: Final = 10.0
_TOKEN_PREFIX: Final = "evener-token-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The workers to launch on this host.

    Attributes:
        nproc: Workers on this host; ``None`` for the most workers of an elastic team, or 1 to join
            a team.
        elastic: Fewest and most workers of an elastic team, as ``MIN:MAX``; empty for a fixed team.
        nodes: The machines of the run; ``None`` for only this one.
        port: On one machine: the coordinator's port in an elastic team, that of the script's own
            process group in a fixed one; ``None`` for a free one.
        token_file: File with the token. ``None`` for the one that ``EVENER_TOKEN_FILE`` names; on
            one machine, a token is made for the run.
        address: Address at which workers of other machines reach those of this one; ``None`` for
            that of the route to the coordinator.
        max_failures: An elastic team's run stops when more workers than this have failed here;
            ``None`` for the agent's default.
        join: ``HOST:PORT`` of the coordinator of a running team; empty to begin one.
        program: The command of a further worker: the script, or a program, with its arguments.
        grace_s: Seconds for workers to end by themselves; ``None`` for the agent's default.
    """

    nproc: int | None = None
    elastic: str = ""
    nodes: Nodes | None = None
    port: int | None = None
    token_file: Path | None = None
    address: str | None = None
    max_failures: int | None = None
    join: str = ""
    program: Sequence[str] = ("SCRIPT",)
    grace_s: float | None = None


def launch(command: Sequence[str], plan: LaunchPlan) -> int:
    """Run this host's workers until the run is over; call it on the main thread.

    The first worker of a host writes directly to the terminal; each line of the others is prefixed
    with its name. In a fixed team the first rank that fails ends the run, and its error is printed;
    in an elastic team a failed worker is replaced. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed
    on once; workers that then take too long, or still run at a second Ctrl-C, are killed. No
    process that they have started outlives this call or this process.

    Args:
        command: Program and arguments, the same for every worker; see ``Agent``.
        plan: The workers.

    Returns:
        See ``Agent.conclude``.

    Raises:
        ConfigError: An option is invalid.
        LaunchError: A port is in use, the coordinator or another host does not answer, or a worker
            cannot be started.
        TeamRefusedError: The coordinator refuses this host.
        RunEndedError: The run of the team to be joined has ended.
    """
    with open_team(plan) as team, SignalQueue() as signals:
        if team.hosts_coordinator and team.ranks is None:
            least, most = team.connection.limits
            # After the two dashes, options belong to the program.
            what = shlex.join(["--", *plan.program] if plan.program[1:] else plan.program)
            token = f" --token-file {team.token_file}" if team.token_file is not None else ""
            say(
                f"evener: elastic team of {least} to {most} workers, {team.nproc} of them here; "
                f"`evener join {team.address}{token} {what}` adds one"
            )
        agent = Agent(
            command,
            team,
            signals,
            environ={**os.environ, **({ADDRESS: plan.address} if plan.address else {})},
            max_failures=MAX_FAILURES if plan.max_failures is None else plan.max_failures,
            grace_s=plan.grace_s,
        )
        agent.run()
        code, words = agent.conclude()
        if words:
            say(words, end="")
        return code


@contextmanager
def open_team(plan: LaunchPlan) -> Iterator[JoinedTeam]:
    """Start the coordinator of a team, or connect to it, and register this host.

    Raises:
        ConfigError: An option is invalid.
        LaunchError: The coordinator does not start or answer, or another host does not connect.
        TeamRefusedError: The coordinator refuses this host.
        RunEndedError: The run of the team to be joined has ended.
    """
    nodes, token_file = plan.nodes, plan.token_file
    if token_file is None and (nodes is not None or plan.join) and os.environ.get(TOKEN_FILE):
        token_file = Path(os.environ[TOKEN_FILE])
    is_fixed = not (plan.join or plan.elastic or (nodes is not None and not nodes.are_fixed))
    with ExitStack() as stack:
        is_own_token = token_file is None and not plan.join and nodes is None
        if is_own_token:
            token_file = stack.enter_context(_own_token())
        elif plan.join and token_file is not None and _is_left_over(token_file, plan.join):
            raise RunEndedError(run_has_ended(plan.join))
        token = read_token(token_file) or None
        address, thread = plan.join, None
        if not plan.join:
            least, most = _limits(plan, is_fixed=is_fixed)
            host = nodes.host if nodes is not None else LOOPBACK
            port = nodes.port if nodes is not None else 0 if is_fixed else plan.port or 0
            options = CoordinatorOptions(
                host=host,
                port=port,
                token=token,
                deadlines=Deadlines(timeout_s=nodes.timeout_s if nodes else DEFAULT_TIMEOUT_S),
                nnodes=(nodes.least if nodes is not None else 1) if is_fixed else 0,
                least=least,
                most=most,
            )
            thread = _host_coordinator(options, nodes)
            if thread is not None:
                port = stack.enter_context(closing(thread)).port
            address = join_address(host, port)
        hosts = thread is not None
        wait_s = nodes.timeout_s if nodes is not None else _CONNECT_S
        # A coordinator of this process answers at once, unless the address is another machine's.
        connect_s = min(wait_s, _OWN_S) if hosts else wait_s
        try:
            connection = AgentConnection(address, token=token, timeout_s=connect_s)
        except LaunchError as error:
            if nodes is None or not hosts:
                raise
            raise LaunchError(
                f"node {nodes.number or 0} does not reach its own coordinator at {address} "
                f"({error}): --master-addr must be an address of this machine that every machine "
                "can reach (`ip address` lists them)"
            ) from None
        stack.enter_context(connection)
        nproc = plan.nproc or (1 if plan.join else min(connection.limits[1], MAX_NPROC))
        team = JoinedTeam(
            address=address,
            token_file=token_file,
            connection=connection,
            nproc=nproc,
            hosts_coordinator=hosts,
            is_own_token=is_own_token,
        )
        if is_fixed:
            reserved = stack.enter_context(_reserve_port(plan)) if hosts else None
            number = 0 if nodes is None else nodes.number or 0
            first, world_size, at, own_port = connection.enter(
                number,
                1 if nodes is None else nodes.least,
                nproc,
                0 if reserved is None else reserved.getsockname()[1],
                timeout_s=wait_s,
            )
            ranks = LocalRanks(
                first=first, count=nproc, world_size=world_size, host=at, port=own_port
            )
            team = replace(team, ranks=ranks)
        yield team


def _limits(plan: LaunchPlan, *, is_fixed: bool) -> tuple[int, int]:
    """Return the fewest and most workers; of a fixed team, once all hosts have connected."""
    if plan.elastic:
        return read_team_limits(plan.elastic, "--elastic")
    nproc = plan.nproc or 1
    if is_fixed or plan.nodes is None:
        return nproc, nproc
    return plan.nodes.least * nproc, plan.nodes.most * nproc


def _host_coordinator(options: CoordinatorOptions, nodes: Nodes | None) -> CoordinatorThread | None:
    """Start the coordinator, if this is its host."""
    if nodes is not None and nodes.number:
        return None
    # Without a node number, the machine that has the address hosts it, and of several agents there
    # the first.
    is_unsaid = nodes is not None and nodes.number is None
    if is_unsaid and not is_own(options.host):
        return None
    try:
        listening = listen(options)
    except LaunchError as error:
        cause = error.__cause__
        if is_unsaid and isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            return None
        raise
    return CoordinatorThread(options, listening)


def _reserve_port(plan: LaunchPlan) -> socket.socket:
    """Reserve the port for the script's own process groups.

    It is not listened on, so a script can open the port itself.
    """
    host, port = LOOPBACK, plan.port or 0
    if plan.nodes is not None:
        host, port = plan.nodes.host, 0
    try:
        return bind(host, port)
    except OSError as error:
        raise LaunchError(
            f"port {port} cannot be opened on {host} ({error.strerror}); choose another with "
            "--port, or leave --port out to get a free one"
        ) from error


def _is_left_over(token_file: Path, address: str) -> bool:
    """Return whether a launcher made this token file for a run that has ended.

    The launcher removes the file last, after the coordinator has ended.
    """
    if not token_file.name.startswith(_TOKEN_PREFIX) or token_file.exists():
        return False
    host, port = parse_address(address, "the coordinator's address")
    if port is None:
        return False
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except (OSError, UnicodeError):
        return True
    return False


@contextmanager
def _own_token() -> Iterator[Path]:
    """Make a token in a file that only this user can read; it is removed at the end."""
    descriptor, path = tempfile.mkstemp(prefix=_TOKEN_PREFIX)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        yield Path(path)
    finally:
        with suppress(OSError):
            Path(path).unlink()


def _launch_script(workers: str, command: Sequence[str]) -> int:
    program = command[command.index("evener.team.script") + 1 :]
    if ":" in workers:
        return launch(command, LaunchPlan(elastic=workers, program=program))
    return launch(command, LaunchPlan(nproc=int(workers)))


if __name__ == "__main__":
    code = run_child(lambda: _launch_script(sys.argv[1], sys.argv[2:]))
    end_in_silence()
    sys.exit(code)
