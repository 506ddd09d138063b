"""Starts the ranks of one host, watches over them, and ends them together.

The launcher never imports torch. Every rank gets a session of its own, so that a terminal's Ctrl-C
reaches the launcher alone, which passes it on once.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from evener.errors import LaunchError
from evener.team import lifeline
from evener.team.child import start_in_silence
from evener.team.environment import STORE_FD
from evener.team.failures import FailureReport
from evener.team.meeting import meet
from evener.team.news import JOINED, JOINING, NEWS_FD, Listener
from evener.team.nodes import Node
from evener.team.output import OutputPump
from evener.team.peers import Peers
from evener.team.ranks import LocalRanks, bind_store, check_nproc, rank_environment
from evener.team.signals import STOPPING, SignalQueue
from evener.team.terminal import say
from evener.team.verdict import Outcome, exit_code, explain

#: Seconds that ranks get to end by themselves after they were asked to.
GRACE_S = 5.0

#: What is said of a rank that has called ``exec``.
ANOTHER_PROGRAM = (
    "has become another program (exec), while the other ranks count on it; start that program "
    "beside the rank, as by subprocess.run"
)

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
    ranks, store, peers = _find_place(nproc, port, node, store_waits=store_waits)
    with store or nullcontext(), closing(peers), SignalQueue() as signals:
        team = _Team(grace_s=grace_s, signals=signals, peers=peers)
        try:
            team.start(command, ranks, store)
            if store is not None:
                store.close()  # rank 0's alone now: if it dies, others see that nobody answers
            outcomes = team.watch()
        finally:
            team.end_all()
        words = explain(outcomes, team.stop_signal) or team.failure_elsewhere
        if words:
            say(words, end="")
        return exit_code(outcomes, team.stop_signal) or int(bool(team.failure_elsewhere))


def _find_place(
    nproc: int, port: int | None, node: Node | None, *, store_waits: bool
) -> tuple[LocalRanks, socket.socket | None, Peers]:
    """Which ranks this host starts; where rank 0 is one of them, the store's socket; its peers."""
    if node is not None:
        return meet(node, nproc, store_waits=store_waits)
    store = bind_store(port, listen=store_waits)
    port = store.getsockname()[1]
    return LocalRanks(count=nproc, world_size=nproc, port=port), store, Peers()


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    news: Listener
    signals: set[int] = field(default_factory=set)
    desertion: str = ""
    outcome: Outcome | None = None

    @property
    def report(self) -> FailureReport | None:
        failure = self.news.failure
        return None if failure is None else FailureReport(**failure)

    @property
    def is_another_program(self) -> bool:
        """Whether it has called ``exec``."""
        return self.outcome is None and self.news.has_ended and still_runs(self.process.pid)

    def end(self, code: int) -> Outcome:
        """How it ended."""
        return Outcome(
            rank=self.number,
            pid=self.process.pid,
            code=code,
            time=time.time(),
            report=self.report,
            signals=frozenset(self.signals),
            desertion=self.desertion,
        )


@dataclass(slots=True, kw_only=True)
class _Team:
    grace_s: float
    signals: SignalQueue
    peers: Peers
    stop_signal: signal.Signals | None = None
    failure_elsewhere: str = ""
    _ended_elsewhere: set[int] = field(default_factory=set)
    _ranks: list[_Rank] = field(default_factory=list)
    _lifeline: subprocess.Popen[bytes] | None = None
    _pump: OutputPump | None = None
    _deadline: float | None = None  # on the monotonic clock; None while nobody was asked to stop
    _settles_at: float | None = None  # likewise; None while no rank says that it lost another
    _killed: bool = False

    def start(self, command: Sequence[str], ranks: LocalRanks, store: socket.socket | None) -> None:
        """Starts the ranks and what looks after them; raises LaunchError if one cannot start."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._lifeline = start_lifeline()
        for local_rank in range(ranks.count):
            number = ranks.first + local_rank
            environ = rank_environment(os.environ, ranks, local_rank)
            store_fd = store.fileno() if store is not None and number == 0 else None
            process, news = _spawn(command, environ, local_rank, store_fd)
            self._ranks.append(_Rank(number, process, Listener(news)))
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
            news = [r.news.descriptor for r in self._ranks if not r.news.has_ended]
            also = [*news, *self.peers.descriptors]
            for signum in self.signals.wait(self._patience_s(), also):
                self._on_signal(signum)
            for message in self.peers.hear():
                self._on_message(message)
            for rank in alive:
                self._look_after(rank)
            for rank in self._ranks:  # after their ends: what they told before is in the pipes
                rank.news.hear()
            self._find_deserters()
            if self._deadline is None and self._failed_for_sure():
                self.peers.tell(failed=[r.number for r in self._ranks])
                self._ask_to_stop(signal.SIGTERM)
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                if self._killed:
                    break
                self._kill(f"had not ended {self.grace_s:g} s after being asked to")
        return [
            replace(r.outcome, desertion=r.desertion) if r.outcome else self._undead(r)
            for r in self._ranks
        ]

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
        for rank in self._ranks:
            rank.news.close()
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
            self.peers.tell(stop=int(signum))
            self._stop(signum)
        elif signum == signal.SIGINT and not self._killed:
            self.stop_signal = self.stop_signal or signum
            self._kill("interrupted again")

    def _on_message(self, message: Mapping[str, object]) -> None:
        """What the launcher of another machine says."""
        stop, failed, ended = (message.get(name) for name in ("stop", "failed", "ended"))
        if isinstance(ended, int):
            self._ended_elsewhere.add(ended)
        if self._deadline is not None:
            return
        if stop in {int(signum) for signum in (*STOPPING, signal.SIGHUP)}:
            self._stop(signal.Signals(stop), " on another machine")
        elif isinstance(failed, list):
            self.failure_elsewhere = (
                f"error: the run failed on another machine, which has {_name(failed)}; its output "
                "says why\n"
            )
            self._ask_to_stop(signal.SIGTERM)

    def _stop(self, signum: signal.Signals, where: str = "") -> None:
        self.stop_signal = signum
        plural = "s" if len(self._ranks) > 1 else ""
        _say(
            f"{signum.name}{where}: asked the rank{plural} to stop, which may take "
            f"{self.grace_s:g} s; press Ctrl-C to kill them at once"
        )
        # The terminal has gone: to the ranks that is a request like any other.
        self._ask_to_stop(signal.SIGTERM if signum == signal.SIGHUP else signum)

    def _look_after(self, rank: _Rank) -> None:
        code = rank.process.poll()
        if code is None:
            return
        kill_group(rank.process.pid)  # what it has started and not ended
        self._tell_lifeline("-", rank.process.pid)
        rank.news.hear()
        rank.outcome = rank.end(code)
        if code == 0:
            self.peers.tell(ended=rank.number)

    def _find_deserters(self) -> None:
        """Finds ranks that others wait for, and that cannot come any more."""
        waiting = [r.number for r in self._ranks if not r.outcome and r.news.place == JOINING]
        for rank in self._ranks:
            if rank.desertion or rank.signals:
                continue
            if rank.is_another_program and (waiting or rank.news.place in (JOINING, JOINED)):
                rank.desertion = f"{ANOTHER_PROGRAM}, or after ddp.close()"
            elif waiting and rank.outcome is not None and not rank.outcome.failed:
                rank.desertion = f"ended with exit code 0{_waited(waiting)}"
        if waiting and self._ended_elsewhere and self._deadline is None:
            gone = _name(sorted(self._ended_elsewhere))
            self.failure_elsewhere = (
                f"error: {gone} on another machine ended with exit code 0{_waited(waiting)}\n"
            )
            self._ask_to_stop(signal.SIGTERM)

    def _failed_for_sure(self) -> bool:
        follow_ups = 0
        for rank in self._ranks:
            report = rank.report
            if rank.desertion:
                return True
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
            if rank.outcome is None and rank.news.failure is None:
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
        return rank.end(-signal.SIGKILL)

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
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a rank; with it, where its news can be read."""
    first = local_rank == 0
    news, pen = os.pipe()
    handed = {NEWS_FD: pen} if store_fd is None else {NEWS_FD: pen, STORE_FD: store_fd}
    try:
        with start_in_silence():
            process = subprocess.Popen(
                command,
                env={**environ, **{name: str(number) for name, number in handed.items()}},
                stdin=None if first else subprocess.DEVNULL,
                stdout=None if first else subprocess.PIPE,
                stderr=None if first else subprocess.PIPE,
                pass_fds=list(handed.values()),
                start_new_session=True,
            )
        return process, news
    except OSError as error:
        os.close(news)
        raise LaunchError(
            f"rank {environ['RANK']} could not be started ({command[0]}: {error.strerror}); check "
            "that the program exists and that the machine has memory and processes left"
        ) from error
    finally:
        os.close(pen)


def _name(ranks: Sequence[object]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _waited(waiting: Sequence[int]) -> str:
    return (
        f" while {_name(waiting)} waited for it in Ddp.setup; let every rank go through the whole "
        "script, and call Ddp.setup as often as the others"
    )


def kill_group(group: int) -> None:
    """Kills a process group, if there is still one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def still_runs(pid: int) -> bool:
    """Whether a process that has closed its pipe to us runs on, as another program.

    One that is ending closes its files, too, but has no memory any more by then. Needs ``/proc``.
    """
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def _say(text: str) -> None:
    say(f"evener: {text}")
