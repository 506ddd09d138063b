"""Starts the ranks of one host, watches over them, and ends them together.

The launcher never imports torch. Every rank gets a session of its own, so that a terminal's Ctrl-C
reaches the launcher alone, which passes it on once.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from evener.errors import LaunchError
from evener.run.launching import lifeline
from evener.run.launching.failures import read_report
from evener.run.launching.nodes import Node
from evener.run.launching.numbering import meet
from evener.run.launching.output import OutputPump
from evener.run.launching.ranks import LocalRanks, bind_store, check_nproc, rank_environment
from evener.run.launching.signals import SignalQueue
from evener.run.launching.terminal import say
from evener.run.launching.verdict import Outcome, exit_code, explain
from evener.run.team.environment import STORE_FD

#: Seconds that ranks get to end by themselves after they were asked to.
GRACE_S = 5.0

# Ends of ranks wake the launcher; this is only how often it looks for reports of ranks that have
# failed but hang on their way out.
_LOOK_S = 0.5
# A rank that lost its peer may say so while the peer still unwinds from what really happened: the
# others are left alone for so long, so that it can say it.
_SETTLE_S = 2.0
# A killed process is gone at once, unless it hangs inside the kernel.
_DEATH_S = 10.0
# Output that is on its way gets so long, unless a reader such as a pager holds it up.
_DRAIN_S = 2.0


def launch(
    command: Sequence[str],
    *,
    nproc: int,
    port: int | None = None,
    grace_s: float = GRACE_S,
    store_waits: bool = False,
    node: Node | None = None,
) -> int:
    """Runs ``nproc`` copies of a command as the ranks of a team on this host.

    Where several hosts take part, each runs this, and ranks start once all are here. The first rank
    of a host writes straight to the terminal; each line of the others is marked with its rank. The
    first rank that fails ends the run, and what it raised is printed. SIGINT, SIGTERM, SIGHUP and
    SIGUSR1 are passed on once; ranks that then take longer than ``grace_s``, or that a second
    Ctrl-C finds still running, are killed. Nothing that the ranks have started outlives this call,
    nor this process. Call it on the main thread.

    Args:
        command: Program and arguments, the same for every rank.
        nproc: Number of ranks.
        port: Port for the store of a team on this host alone; ``None`` takes a free one.
        grace_s: Seconds that ranks get to end by themselves.
        store_waits: Connections to the store may wait for rank 0 to open it, which is quicker. Only
            for commands that open it on the socket handed over: a plain torch script opens the port
            itself, and can do so only while nobody listens there.
        node: This host among several; ``None`` for a team on this host alone.

    Returns:
        The first failing rank's exit code (1 if it was killed); 128 + the signal's number after a
        stop by signal; else 0.

    Raises:
        ConfigError: ``nproc`` or ``port`` is impossible.
        LaunchError: The port is in use, another host did not come, or a rank could not be started.
    """
    check_nproc(nproc)
    ranks, store = _find_place(nproc, port, node, store_waits=store_waits)
    with (
        store or nullcontext(),
        tempfile.TemporaryDirectory(prefix="evener-") as folder,
        SignalQueue() as signals,
    ):
        team = _Team(grace_s=grace_s, signals=signals)
        try:
            team.start(command, ranks, store, Path(folder))
            if store is not None:
                store.close()  # rank 0's alone now: if it dies, others see that nobody answers
            outcomes = team.watch()
        finally:
            team.end_all()
        if words := explain(outcomes, team.stop_signal):
            say(words, end="")
        return exit_code(outcomes, team.stop_signal)


def _find_place(
    nproc: int, port: int | None, node: Node | None, *, store_waits: bool
) -> tuple[LocalRanks, socket.socket | None]:
    """Which ranks this host starts; and, where rank 0 is one of them, the socket of the store."""
    if node is not None:
        return meet(node, nproc, store_waits=store_waits)
    store = bind_store(port, listen=store_waits)
    port = store.getsockname()[1]
    return LocalRanks(count=nproc, world_size=nproc, port=port), store


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    error_file: Path
    signals: set[int] = field(default_factory=set)
    outcome: Outcome | None = None


@dataclass(slots=True, kw_only=True)
class _Team:
    grace_s: float
    signals: SignalQueue
    stop_signal: signal.Signals | None = None
    _ranks: list[_Rank] = field(default_factory=list)
    _lifeline: subprocess.Popen[bytes] | None = None
    _pump: OutputPump | None = None
    _deadline: float | None = None  # on the monotonic clock; None while nobody was asked to stop
    _settles_at: float | None = None  # likewise; None while no rank says that it lost another
    _killed: bool = False

    def start(
        self, command: Sequence[str], ranks: LocalRanks, store: socket.socket | None, folder: Path
    ) -> None:
        """Starts the ranks and what looks after them; raises LaunchError if one cannot start."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._lifeline = start_lifeline()
        for local_rank in range(ranks.count):
            number = ranks.first + local_rank
            error_file = folder / f"rank-{number}.json"
            environ = rank_environment(os.environ, ranks, local_rank, error_file=error_file)
            store_fd = store.fileno() if store is not None and number == 0 else None
            process = _spawn(command, environ, local_rank, store_fd)
            self._ranks.append(_Rank(number, process, error_file))
            self._tell_lifeline("+", process.pid)
        self._pump = OutputPump(
            [
                (f"[rank {rank.number}] ".encode(), source, target)
                for rank in self._ranks
                for source, target in ((rank.process.stdout, 1), (rank.process.stderr, 2))
                if source is not None
            ]
        )
        self._pump.start()

    def watch(self) -> list[Outcome]:
        """Waits until all ranks have ended, and sees to it that they do end."""
        while alive := [r for r in self._ranks if r.outcome is None]:
            for signum in self.signals.wait(self._patience_s()):
                self._on_signal(signum)
            for rank in alive:
                self._look_after(rank)
            if self._deadline is None and self._failed_for_sure():
                self._ask_to_stop(signal.SIGTERM)
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                if self._killed:
                    break
                self._kill(f"had not ended {self.grace_s:g} s after being asked to")
        return [r.outcome or self._undead(r) for r in self._ranks]

    def end_all(self) -> None:
        """Leaves nothing behind; harmless when all has ended already."""
        for rank in self._ranks:
            if rank.outcome is None:
                kill_group(rank.process.pid)
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(_DEATH_S)
        if self._pump is None or self._drained(self._pump):
            for rank in self._ranks:
                for source in (rank.process.stdout, rank.process.stderr):
                    if source is not None:
                        source.close()
        if self._lifeline is not None:
            with suppress(subprocess.TimeoutExpired):
                self._lifeline.communicate(timeout=_DEATH_S)

    def _drained(self, pump: OutputPump) -> bool:
        deadline = time.monotonic() + _DRAIN_S
        while not pump.finish(_LOOK_S):
            interrupted = set(self.signals.wait(0)) - {signal.SIGCHLD}
            if interrupted or (time.monotonic() >= deadline and not pump.is_writing):
                return False
        return True

    def _patience_s(self) -> float:
        if self._deadline is None:
            return _LOOK_S
        return min(_LOOK_S, max(0.0, self._deadline - time.monotonic()))

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGCHLD:
            return
        if self._deadline is None:
            self.stop_signal = signum
            plural = "s" if len(self._ranks) > 1 else ""
            _say(
                f"{signum.name}: asked the rank{plural} to stop, which may take "
                f"{self.grace_s:g} s; press Ctrl-C to kill them at once"
            )
            # The terminal has gone: to the ranks that is a request like any other.
            self._ask_to_stop(signal.SIGTERM if signum == signal.SIGHUP else signum)
        elif signum == signal.SIGINT and not self._killed:
            self.stop_signal = self.stop_signal or signum
            self._kill("interrupted again")

    def _look_after(self, rank: _Rank) -> None:
        code = rank.process.poll()
        if code is None:
            return
        kill_group(rank.process.pid)  # what it has started and not ended
        self._tell_lifeline("-", rank.process.pid)
        rank.outcome = Outcome(
            rank=rank.number,
            pid=rank.process.pid,
            code=code,
            time=time.time(),
            report=read_report(rank.error_file),
            signals=frozenset(rank.signals),
        )

    def _failed_for_sure(self) -> bool:
        follow_ups = 0
        for rank in self._ranks:
            report = rank.outcome.report if rank.outcome else read_report(rank.error_file)
            if report is not None and report.follow_up:
                follow_ups += 1
            elif report is not None or (rank.outcome is not None and rank.outcome.failed):
                return True
        if not follow_ups:
            return False
        self._settles_at = self._settles_at or time.monotonic() + _SETTLE_S
        return time.monotonic() >= self._settles_at

    def _ask_to_stop(self, signum: signal.Signals) -> None:
        self._deadline = time.monotonic() + self.grace_s
        for rank in self._ranks:
            # One that has written its report is on its way out already.
            if rank.outcome is None and not rank.error_file.exists():
                rank.process.send_signal(signum)
                if rank.process.returncode is None:  # otherwise it had ended by itself
                    rank.signals.add(signum)

    def _kill(self, why: str) -> None:
        self._killed = True
        self._deadline = time.monotonic() + _DEATH_S
        alive = [rank for rank in self._ranks if rank.outcome is None]
        _say(f"{why}: killed " + ", ".join(f"rank {r.number} (pid {r.process.pid})" for r in alive))
        for rank in alive:
            rank.signals.add(signal.SIGKILL)
            kill_group(rank.process.pid)

    def _undead(self, rank: _Rank) -> Outcome:
        _say(
            f"rank {rank.number} (pid {rank.process.pid}) does not end even when killed: it hangs "
            "in the kernel, in a device driver or a network file system"
        )
        return Outcome(
            rank=rank.number,
            pid=rank.process.pid,
            code=-signal.SIGKILL,
            time=time.time(),
            report=read_report(rank.error_file),
            signals=frozenset(rank.signals),
        )

    def _tell_lifeline(self, sign: str, pid: int) -> None:
        if self._lifeline is not None:
            tell_lifeline(self._lifeline, sign, pid)


def start_lifeline() -> subprocess.Popen[bytes]:
    """Starts the program that kills what this process leaves behind; see ``lifeline.py``."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(lifeline.__file__))],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def tell_lifeline(process: subprocess.Popen[bytes], sign: str, pid: int) -> None:
    """Adds (``+``) or removes (``-``) the process group of a rank."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.write(f"{sign}{pid}\n".encode())
            process.stdin.flush()


def _spawn(
    command: Sequence[str], environ: Mapping[str, str], local_rank: int, store_fd: int | None
) -> subprocess.Popen[bytes]:
    first = local_rank == 0
    handed = [] if store_fd is None else [store_fd]
    try:
        return subprocess.Popen(
            command,
            env={**environ, STORE_FD: str(store_fd)} if handed else environ,
            stdin=None if first else subprocess.DEVNULL,
            stdout=None if first else subprocess.PIPE,
            stderr=None if first else subprocess.PIPE,
            pass_fds=handed,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(
            f"rank {environ['RANK']} could not be started ({command[0]}: {error.strerror}); check "
            "that the program exists and that the machine has memory and processes left"
        ) from error


def kill_group(group: int) -> None:
    """Kills a process group, if there is still one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _say(text: str) -> None:
    say(f"evener: {text}")
