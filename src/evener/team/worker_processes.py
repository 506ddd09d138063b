"""The worker processes of one host: how they are started, watched and ended.

``agent.py`` decides when.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final, Self, final

from evener.errors import LaunchError
from evener.team import lifeline
from evener.team.child import PARENT_PID
from evener.team.environment import COORDINATOR, ELASTIC, LAUNCHED, MEMBER, TOKEN_FILE
from evener.team.failures import FailureReport, ProcessRecord
from evener.team.host import (
    KernelState,
    count_kills,
    program_of,
    remedy_of_shortage,
    state_of,
    threads_per_rank,
)
from evener.team.output import OutputPump
from evener.team.signals import start_in_silence
from evener.team.terminal import TERMINAL_FDS
from evener.team.wire import CHANNEL_FD, Channel, Message

# ── the environment of ranks ─────────────────────────────────────────────────────────────────────

# Variables of another launcher in our environment, which would mislead the ranks.
_FOREIGN_PREFIX = "TORCHELASTIC_"
_FOREIGN = frozenset(
    {
        CHANNEL_FD,
        COORDINATOR,
        ELASTIC,
        MEMBER,
        TERMINAL_FDS,
        TOKEN_FILE,
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """The ranks of this host among those of the team.

    Attributes:
        first: The first of them; the others follow it.
        count: Their number.
        world_size: Ranks of the team, on all hosts.
        host: Node 0, for the script's own process groups.
        port: A free port there.
    """

    first: int = 0
    count: int
    world_size: int
    host: str
    port: int


def rank_environment(base: Mapping[str, str], ranks: LocalRanks, local_rank: int) -> dict[str, str]:
    """Return the environment of one rank: torchrun's variables, and evener's own.

    Args:
        base: Environment of the launcher.
        ranks: The ranks of this host.
        local_rank: The rank's number among them.
    """
    environ = {
        name: value
        for name, value in base.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIX)
    }
    environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks.count)))
    # evener reports the end of a store; torch would add its C++ stack.
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environ | {
        "RANK": str(ranks.first + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.count),
        "MASTER_ADDR": ranks.host,
        "MASTER_PORT": str(ranks.port),
        LAUNCHED: "1",
        PARENT_PID: str(os.getpid()),
    }


# ── how they are watched ─────────────────────────────────────────────────────────────────────────

# Messages of workers and signals wake the agent; other changes are polled.
_LOOK_S = 0.1
# A debugger that attaches, or a tool that reads a process's stack, stops it for a moment.
_HALT_S = 0.3
#: A killed process ends at once, unless it hangs inside the kernel.
DEATH_S: Final = 10.0
# Time for remaining output, unless a reader such as a pager blocks it.
_DRAIN_S = 2.0


@dataclass(slots=True, kw_only=True)
class Child(ProcessRecord):
    """A rank's process, for the process that started it.

    Attributes:
        process: Leader of its own session and process group.
        channel: Channel to it.
        program: Its program, as ``program_of`` returns it; empty until it reports it.
        place: The last progress that it reported: ``""`` at first, then ``JOINING`` and so on.
        halted_since: Unix seconds at which it was first found stopped; 0 while it is not.
        is_halted: Whether it was stopped for long enough to be reported.
        finished: Whether the run had ended when it left its elastic team, as far as it reports.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    program: str = ""
    place: str = ""
    halted_since: float = 0.0
    is_halted: bool = False
    finished: bool = True

    @property
    def _is_gone(self) -> bool:
        """Whether it has ended by itself; its exit code is not collected yet."""
        if self.has_ended:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def is_another_program(self) -> bool:
        """Whether it has called ``exec``, which closes its channel.

        A closed channel alone does not show it: Python also closes it at exit.
        """
        if self.has_ended or not self.channel.has_ended:
            return False
        return program_of(self.pid) not in ("", self.program)

    def take(self, message: Message) -> None:
        """Handle its message."""
        self.program = message.get("program", self.program)
        self.place = message.get("place", self.place)
        self.finished = message.get("finished", self.finished)
        if "failure" in message:
            self.report = FailureReport(**message["failure"])

    def look(self) -> bool:
        """Note its end, and kill the processes that it leaves; return whether it has ended now."""
        if not self._is_gone:
            return False
        _kill_group(self.pid)  # the number is not reused until its exit code is collected
        self.end(self.process.wait())
        return True

    def look_at_state(self) -> KernelState | None:
        """Return its state, if it was stopped or continued since the last call."""
        state, now = state_of(self.pid), time.time()
        if state is not KernelState.STOPPED:
            was_halted, self.is_halted, self.halted_since = self.is_halted, False, 0.0
            return state if was_halted else None
        self.halted_since = self.halted_since or now
        if self.is_halted or now - self.halted_since < _HALT_S:
            return None
        self.is_halted = True
        return state

    def end(self, code: int) -> None:
        """Note that it has ended, or that it never will."""
        self.has_ended, self.code, self.time = True, code, time.time()

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended by itself."""
        if not self._is_gone:
            os.kill(self.pid, signum)
            self.signals.add(signum)

    def kill(self) -> None:
        """Kill it, and the processes that it has started, at once."""
        self.signals.add(signal.SIGKILL)
        _kill_group(self.pid)


@final
class WorkerProcesses:
    """The workers that one process has started; a context manager that ends all of them.

    Each worker gets its own session, so that Ctrl-C in a terminal reaches only this process. The
    first worker of a host writes directly to the terminal; each line of the others is prefixed with
    its name. No process that the workers have started outlives the context or this process.

    Args:
        stdin: Standard input of the first worker, as in ``subprocess``.
        is_hurried: Returns whether remaining output is dropped at the end.

    Attributes:
        all: The workers that have been started.

    Raises:
        LaunchError: On entering, workers cannot be watched here.
    """

    def __init__(self, stdin: int | None, is_hurried: Callable[[], bool]) -> None:
        self.all: list[Child] = []
        self._stdin = stdin
        self._is_hurried = is_hurried
        self._lifeline: subprocess.Popen[bytes] | None = None
        self._pump = OutputPump()
        self._terminal: tuple[int, ...] = ()  # our output and error, for the main process
        self._num_kills = count_kills()

    @property
    def alive(self) -> list[Child]:
        """The workers that have not ended."""
        return [child for child in self.all if not child.has_ended]

    def __enter__(self) -> Self:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with start_in_silence():
                self._lifeline = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(Path(lifeline.__file__))],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
            with suppress(OSError):  # closed, or too many are open: then lines keep their prefix
                self._terminal = (os.dup(1), os.dup(2))
        except (OSError, RuntimeError) as error:
            self.__exit__()
            remedy = remedy_of_shortage(error)
            raise LaunchError(f"ranks cannot be watched here ({error}); {remedy}") from error
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.alive:
            _kill_group(child.pid)
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(DEATH_S)
        self._drain()
        for descriptor in self._terminal:
            os.close(descriptor)
        for child in self.all:
            child.channel.close()
        if self._lifeline is not None:
            with suppress(subprocess.TimeoutExpired):
                self._lifeline.communicate(timeout=DEATH_S)

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        handed: Mapping[str, int],
        rank: int,
        *,
        is_first: bool,
        name: str = "",
    ) -> Child:
        """Start a worker; the kernel ends it together with the thread that calls this.

        Args:
            command: Program and arguments.
            environ: Its environment.
            handed: Descriptors that it inherits, by the variable that names each.
            rank: Its rank.
            is_first: It has the terminal; others have pipes, see ``carry_output``.
            name: What messages call it; its rank by default.

        Raises:
            LaunchError: It could not be started.
        """
        target = None if is_first else subprocess.PIPE
        terminal = () if is_first else self._terminal
        marked = {TERMINAL_FDS: ",".join(map(str, terminal))} if terminal else {}
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            with theirs, start_in_silence():
                handed = {**handed, CHANNEL_FD: theirs.fileno()}
                given = {name: str(number) for name, number in handed.items()}
                process = subprocess.Popen(
                    command,
                    env={**environ, **given, **marked},
                    stdin=self._stdin if is_first else subprocess.DEVNULL,
                    stdout=target,
                    stderr=target,
                    pass_fds=[*handed.values(), *terminal],
                    start_new_session=True,
                )
        except OSError as error:
            if ours is not None:
                ours.close()
            remedy = remedy_of_shortage(error) or "check that the program exists"
            raise LaunchError(
                f"{name or f'rank {rank}'} could not be started ({command[0]}: {error.strerror}); "
                f"{remedy}"
            ) from error
        child = Child(rank=rank, pid=process.pid, process=process, channel=Channel(ours), name=name)
        self.all.append(child)
        self.guard(child.pid)
        return child

    def carry_output(self, child: Child) -> None:
        """Copy a worker's output from its pipes to the terminal, with its name before each line."""
        for source, number in ((child.process.stdout, 1), (child.process.stderr, 2)):
            if source is not None:
                self._pump.carry(f"[{child.title}] ".encode(), source, number)

    def guard(self, left: int | Path) -> None:
        """Add a process group or file that must not outlive this process, or remove it again."""
        if self._lifeline is not None and self._lifeline.stdin is not None:
            with suppress(BrokenPipeError):
                self._lifeline.stdin.write(f"{left}\n".encode())
                self._lifeline.stdin.flush()

    def wait(self, others: Sequence[int]) -> None:
        """Wait for a message of a worker, an event on another descriptor, or a timeout."""
        channels = [child.channel for child in self.all if not child.channel.has_ended]
        wait([*(channel.fileno() for channel in channels), *others], _LOOK_S)

    def look(self) -> None:
        """Note which workers have ended."""
        for child in self.alive:
            if child.look():
                child.memory_was_short = count_kills() > self._num_kills
                self.guard(child.pid)

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_S
        while not self._pump.finish(_LOOK_S):
            is_late = time.monotonic() >= deadline and not self._pump.is_writing
            if is_late or self._is_hurried():
                return


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(group, signal.SIGKILL)
