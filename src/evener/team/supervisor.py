"""Starts the ranks of one host, watches them, and ends them together.

``evener launch`` and managed runs have a supervisor each, which decides what their ranks are told
and when they have to end.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import ClassVar, Final

from evener.comm.addresses import LOOPBACK, bind
from evener.errors import ConfigError, LaunchError
from evener.team import lifeline
from evener.team.channel import CHANNEL_FD, DONE, Channel, Message
from evener.team.child import PARENT_PID
from evener.team.environment import LAUNCHED, STORE_FD
from evener.team.failures import FailureReport, RankRecord
from evener.team.host import threads_per_rank
from evener.team.output import OutputPump
from evener.team.process_state import KernelState, describe_halt, program_of, state_of
from evener.team.shortage import MemoryWatch, remedy_of_shortage
from evener.team.signals import start_in_silence
from evener.team.terminal import TERMINAL_FDS, say

# ── what ranks are given ─────────────────────────────────────────────────────────────────────────

#: More ranks than this on one host are taken for a typing error.
MAX_NPROC = 256

# What another launcher may have left in our environment, and would mislead the ranks.
_FOREIGN_PREFIX = "TORCHELASTIC_"
_FOREIGN = frozenset(
    {
        CHANNEL_FD,
        STORE_FD,
        TERMINAL_FDS,
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
        count: How many they are.
        world_size: Ranks of the team, on all hosts.
        host: Where the store is.
        port: Its port.
    """

    first: int = 0
    count: int
    world_size: int
    host: str = LOOPBACK
    port: int


def check_nproc(nproc: int) -> None:
    """Refuse an impossible number of ranks.

    Raises:
        ConfigError: It is below 1 or above ``MAX_NPROC``.
    """
    if not 1 <= nproc <= MAX_NPROC:
        raise ConfigError(
            f"--nproc is {nproc}; give the number of ranks to start on this host, from 1 to "
            f"{MAX_NPROC} (usually one per device)"
        )


def rank_environment(base: Mapping[str, str], ranks: LocalRanks, local_rank: int) -> dict[str, str]:
    """Return the environment of one rank: torchrun's variables, and evener's own.

    Args:
        base: Environment of the launcher.
        ranks: The ranks of this host.
        local_rank: Which of them.
    """
    environ = {
        name: value
        for name, value in base.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIX)
    }
    environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks.count)))
    # A store that goes away is reported by evener; torch would add its C++ stack.
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


def bind_store(port: int | None, *, listen: bool) -> socket.socket:
    """Open the port of the store, on loopback; the first rank inherits it.

    Args:
        port: Which; ``None`` takes a free one.
        listen: Connections may wait for rank 0; see ``launch``.

    Raises:
        ConfigError: The port is impossible.
        LaunchError: It is in use.
    """
    if port is not None and not 1 <= port <= 65_535:
        raise ConfigError(f"--port is {port}; give a port from 1 to 65535, or none for a free one")
    try:
        # A plain torch script can open the port itself while we keep others from being given it.
        return bind(LOOPBACK, port or 0, MAX_NPROC if listen else 0)
    except OSError as error:
        raise LaunchError(
            f"port {port} cannot be opened on {LOOPBACK} ({error.strerror}); choose another with "
            "--port, or leave --port out to get a free one"
        ) from error


# ── how they are watched ─────────────────────────────────────────────────────────────────────────

#: What is said of a rank that has called ``exec``.
ANOTHER_PROGRAM: Final = (
    "has become another program (exec), while the other ranks count on it; start that program "
    "beside the rank, as by subprocess.run"
)

# What a rank says wakes its supervisor, and so do signals; the rest it looks for.
_LOOK_S = 0.1
# A debugger that attaches, or a tool that reads a process's stack, holds it for a moment.
_HALT_S = 0.3
# A rank that lost its peer may say so while the peer still unwinds from what really happened: the
# others are left alone for so long, so that it can say it.
_SETTLE_S = 2.0
# A killed process is gone at once, unless it hangs inside the kernel.
_DEATH_S = 10.0
# Output that is on its way gets so long, unless a reader such as a pager holds it up.
_DRAIN_S = 2.0


@dataclass(slots=True, kw_only=True)
class Child(RankRecord):
    """A rank's process, as the process that started it sees it.

    Attributes:
        process: Leader of a session and a process group of its own.
        channel: To it.
        program: What it runs, as ``program_of`` returns it; empty until it tells.
        place: The last place that it told: ``""`` at first, then such as ``JOINING``.
        halted_since: Unix seconds at which it was first seen halted; 0 while it is not.
        is_halted: Whether that has lasted, so that people were told.
        finished: Whether the run had ended when it left its elastic team, unless it told otherwise.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    program: str = ""
    place: str = ""
    halted_since: float = 0.0
    is_halted: bool = False
    finished: bool = True

    @property
    def is_another_program(self) -> bool:
        """Whether it has called ``exec``, which closes its channel.

        The channel alone does not tell: Python closes it, too, while the interpreter shuts down.
        """
        if self.has_ended or not self.channel.has_ended:
            return False
        return program_of(self.pid) not in ("", self.program)

    def take(self, message: Message) -> None:
        """Take in what it says of itself."""
        self.program = message.get("program", self.program)
        self.place = message.get("place", self.place)
        self.finished = message.get("finished", self.finished)
        if "failure" in message:
            self.report = FailureReport(**message["failure"])

    def become(self, rank: int, name: str) -> None:
        """Note that it has become a worker, after it had only waited."""
        self.rank, self.name = rank, name

    def look(self) -> bool:
        """Take in its end, and kill what it leaves behind; returns whether it has ended now."""
        code = self.process.poll()
        if code is not None:
            self.end(code)
            _kill_group(self.pid)
        return code is not None

    def look_at_state(self) -> KernelState | None:
        """Return its state, if it was halted for good or continued since the last look."""
        state, now = state_of(self.pid), time.time()
        if not state.is_halted:
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

    def desert(self, words: str) -> None:
        """Note how it has left others waiting for it."""
        self.desertion = words

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended by itself."""
        self.process.send_signal(signum)
        if self.process.returncode is None:
            self.signals.add(signum)

    def kill(self) -> None:
        """End it, and what it has started, at once."""
        self.signals.add(signal.SIGKILL)
        _kill_group(self.pid)


class Supervisor(ABC):
    """Starts the ranks of one host, watches them, and ends them together.

    Each rank gets a session of its own, so that a terminal's Ctrl-C reaches this process alone. The
    first rank of a host writes straight to the terminal; each line of the others is marked with its
    rank. Nothing that the ranks have started outlives ``run``, nor this process.

    Attributes:
        children: The ranks that have been started.
    """

    #: Standard input of the first rank, as ``subprocess`` takes it.
    stdin: ClassVar[int | None] = None

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._lifeline: subprocess.Popen[bytes] | None = None
        self._pump = OutputPump()
        self._terminal: tuple[int, ...] = ()  # our output and error, for the main process
        self._memory = MemoryWatch()
        self._deadline: float | None = None  # on the monotonic clock; None while nobody has to end
        self._lateness = ""  # what is said of those who miss it
        self._settles_at: float | None = None  # likewise; None while no rank has lost another
        self._killed = False

    def run(
        self,
        command: Sequence[str],
        ranks: LocalRanks,
        store: socket.socket | None,
        environ: Mapping[str, str],
        handed: Mapping[str, int],
    ) -> None:
        """Run a command as the ranks of this host, until all have ended.

        The kernel ends a rank together with the thread that calls this.

        Args:
            command: Program and arguments, the same for every rank.
            ranks: The ranks of this host.
            store: Socket for rank 0, which opens the store on it; closed here.
            environ: What the environment of each rank is made from.
            handed: Descriptors that every rank inherits, by the variable that names each.

        Raises:
            LaunchError: A rank could not be started.
        """
        with self._supervising(), store or nullcontext(), start_in_silence():
            # The socket is rank 0's alone from then on: if it dies, others see that nobody answers.
            for local_rank in range(ranks.count):
                given = {} if store is None or local_rank else {STORE_FD: store.fileno()}
                its_own = rank_environment(environ, ranks, local_rank)
                child = self._spawn(
                    command, its_own, {**handed, **given}, ranks.first + local_rank, not local_rank
                )
                self._carry_output(child)

    @contextmanager
    def _supervising(self) -> Iterator[None]:
        """Watch what the block starts until it has ended, and leave nothing behind."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._begin_watch()
            yield
            self._watch()
        finally:
            self._end_all()

    def _begin_watch(self) -> None:
        """Start what ends the ranks if this process is killed, and what carries their output."""
        try:
            with start_in_silence():
                self._lifeline = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(Path(lifeline.__file__))],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
            self._pump.start()
            with suppress(OSError):  # closed, or too many are open: lines stay marked then
                self._terminal = (os.dup(1), os.dup(2))
        except (OSError, RuntimeError) as error:
            remedy = remedy_of_shortage(error)
            raise LaunchError(f"ranks cannot be watched here ({error}); {remedy}") from error

    # ── what differs ─────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _decide(self) -> None:
        """Heed requests, look at the ranks, and tell those that have to end."""

    @property
    def _requests(self) -> Sequence[int]:
        """Descriptors to wait on besides those of the ranks."""
        return ()

    @property
    def _goes_on(self) -> bool:
        """Whether there is, or will be, a process to watch."""
        return bool(self._alive)

    def _end_late(self) -> None:
        """The deadline has come, and some run on."""
        self._kill(self._lateness)

    def _is_hurried(self) -> bool:
        """Return whether output that is still on its way shall be left."""
        return False

    # ── for all ──────────────────────────────────────────────────────────────────────────────

    @property
    def _alive(self) -> list[Child]:
        return [child for child in self.children if not child.has_ended]

    def _spawn(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        handed: Mapping[str, int],
        rank: int,
        is_first: bool,
        name: str = "",
    ) -> Child:
        """Start a process; the first of a host has the terminal, others pipes."""
        target = None if is_first else subprocess.PIPE
        terminal = () if is_first else self._terminal
        marked = {TERMINAL_FDS: ",".join(map(str, terminal))} if terminal else {}
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                handed = {**handed, CHANNEL_FD: theirs.fileno()}
                given = {name: str(number) for name, number in handed.items()}
                process = subprocess.Popen(
                    command,
                    env={**environ, **given, **marked},
                    stdin=self.stdin if is_first else subprocess.DEVNULL,
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
        self.children.append(child)
        self._tell_lifeline(child.pid)
        return child

    def _carry_output(self, child: Child) -> None:
        """Write what a process prints into its pipes to the terminal, marked with its name."""
        for source, number in ((child.process.stdout, 1), (child.process.stderr, 2)):
            if source is not None:
                self._pump.carry(f"[{child.title}] ".encode(), source, number)

    def _watch(self) -> None:
        while self._goes_on:
            channels = [child.channel for child in self.children if not child.channel.has_ended]
            wait([*(channel.fileno() for channel in channels), *self._requests], _LOOK_S)
            self._memory.look()
            for child in self._alive:
                self._look_after(child)
            for child in self.children:  # after their ends: what they told before has come
                for message in child.channel.receive():
                    self._take(child, message)
            self._decide()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._killed:
                    break
                self._end_late()
        for child in self._alive:
            say(
                f"evener: {child.who} does not end even when killed: it hangs in the kernel, in a "
                "device driver or a network file system"
            )
            child.end(-signal.SIGKILL)

    def _look_after(self, child: Child) -> None:
        if child.look():
            child.memory_was_short = self._memory.was_short()
            self._tell_lifeline(child.pid)
        elif (state := child.look_at_state()) is not None:
            self._note_state(child, state)

    def _note_state(self, child: Child, state: KernelState) -> None:
        """A rank was stopped, is held by a debugger, or runs again; nothing is ended for it."""
        if not state.is_halted:
            say(f"evener: {child.who} runs again")
            return
        alone = len(self.children) == 1
        waiting = "nothing waits for it on this host" if alone else "the other ranks wait for it"
        say(describe_halt(child.who, child.pid, state, child.halted_since, waiting))

    def _take(self, child: Child, message: Message) -> None:
        child.take(message)

    def _failed_for_sure(self) -> bool:
        # However a process ends that has done its work, nobody misses it.
        working = [child for child in self.children if child.place != DONE]
        failing = [child for child in working if child.report is not None or child.failed]
        if any(c.report is None or not c.report.follow_up or c.desertion for c in failing):
            return True
        if failing and self._settles_at is None:
            self._settles_at = time.monotonic() + _SETTLE_S
        return self._settles_at is not None and time.monotonic() >= self._settles_at

    def _set_deadline(self, seconds: float, lateness: str) -> None:
        self._deadline, self._lateness = time.monotonic() + seconds, lateness

    def _kill(self, why: str) -> None:
        for child in self._alive:
            child.kill()
        self._killed = True
        self._set_deadline(_DEATH_S, why)

    def _end_all(self) -> None:
        """Leave nothing behind; harmless when all has ended already."""
        for child in self._alive:
            _kill_group(child.pid)
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(_DEATH_S)
        self._drain()
        for descriptor in self._terminal:
            os.close(descriptor)
        for child in self.children:
            child.channel.close()
        if self._lifeline is not None:
            with suppress(subprocess.TimeoutExpired):
                self._lifeline.communicate(timeout=_DEATH_S)

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_S
        while not self._pump.finish(_LOOK_S):
            is_late = time.monotonic() >= deadline and not self._pump.is_writing
            if is_late or self._is_hurried():
                return

    def _tell_lifeline(self, left: int | Path) -> None:
        """Add a process group or file that must not outlive this process, or remove it again."""
        if self._lifeline is not None and self._lifeline.stdin is not None:
            with suppress(BrokenPipeError):
                self._lifeline.stdin.write(f"{left}\n".encode())
                self._lifeline.stdin.flush()


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(group, signal.SIGKILL)
