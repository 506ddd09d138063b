"""Launches the workers of an elastic team on this host: those that fail are started again.

The launcher that begins a team also runs its coordinator; one that joins a team does not. Both
report the states of their workers' processes to the coordinator at once. A warm standby process,
which has loaded torch, takes the place of the next worker that fails.
"""

import os
import secrets
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

from evener.errors import (
    ConfigError,
    CoordinatorLostError,
    LaunchError,
    LeftOutError,
    RunEndedError,
)
from evener.protocol.formation import ProcessState, read_team_limits
from evener.team.address import parse_address
from evener.team.channel import JOINED, JOINING
from evener.team.child import run_child
from evener.team.connection import SupervisorConnection
from evener.team.coordinator_process import CoordinatorProcess
from evener.team.environment import COORDINATOR, ELASTIC, MEMBER, TOKEN_FILE
from evener.team.failures import judge
from evener.team.launcher import TerminalSupervisor
from evener.team.process_state import KernelState, clock_time, describe_halt, state_of
from evener.team.signals import SignalQueue, end_in_silence, start_in_silence
from evener.team.standby import TAKE
from evener.team.supervisor import (
    ANOTHER_PROGRAM,
    Child,
    LocalRanks,
    check_nproc,
    rank_environment,
)
from evener.team.terminal import say, warn
from evener.team.token_files import read_token

#: A team stops when more workers than this have failed, unless the user says otherwise.
MAX_FAILURES: Final = 10
#: What a standby loads, by the module that it runs when it becomes a worker.
LIBRARIES: Final = {
    "evener": ("torch", "transformers", "evener.tasks.job"),
    "evener.team.script": ("torch", "evener.ddp"),
    "evener.managed.worker": ("evener.managed.rank",),
}
#: Seconds that workers get to stop: they finish their window.
GRACE_S: Final = 30.0

# A worker that has run for so long was well: when it fails, it is started again at once.
_SETTLED_S = 10.0
_LONGEST_PAUSE_S = 60.0
# A worker that has told of its failure, or closed its channel, has to end within so long.
_UNWIND_S = 10.0
_MOST_STANDBYS_LOST = 3
# The coordinator of this launcher is still starting then.
_CONNECT_S = 30.0
# Workers of other launchers that end with those of this one have left by then.
_FAREWELL_S = 1.0
_LOOK_S = 0.1
_TOKEN_PREFIX = "evener-token-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRun:
    """What the launcher of an elastic team is told.

    Attributes:
        limits: Fewest and most workers, as ``MIN:MAX``; ignored where a team is joined.
        nproc: Workers on this host; ``None`` for as many as the team may have.
        port: The coordinator's port; ``None`` takes a free one.
        token_file: Holds what workers must know. ``None`` makes one that lives as long as the run;
            where a team is joined, its coordinator has no token then.
        max_failures: The run stops when more workers than this have failed here.
        join: ``HOST:PORT`` of the coordinator of a team that runs already; empty to begin one.
        program: What a further worker has to run: the script, or a command, with its arguments.
        environ: What the environment of each worker is made from.
        handed: Descriptors that every worker inherits, by the variable that names each.
    """

    limits: str = ""
    nproc: int | None = None
    port: int | None = None
    token_file: Path | None = None
    max_failures: int = MAX_FAILURES
    join: str = ""
    program: Sequence[str] = ("SCRIPT",)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    handed: Mapping[str, int] = field(default_factory=dict)


def launch_elastic(command: Sequence[str], run: ElasticRun) -> int:
    """Run workers of an elastic team until the run is over; call it on the main thread.

    Args:
        command: Python, its options, ``-m``, a module of ``LIBRARIES``, its arguments; the same for
            every worker.
        run: The rest.

    Returns:
        0 when a worker has done the run to its end; 128 + n after a stop by signal n; else the exit
        code of the failure that ended the run, 1 if that was a kill.

    Raises:
        ConfigError: An option is impossible.
        LaunchError: The coordinator does not start or is not there, or a worker cannot be started.
        TeamRefusedError: The coordinator refuses this launcher.
    """
    with open_team(run) as team, SignalQueue() as signals:
        if team.coordinator is not None:
            least, most = team.limits
            # Behind the two dashes, options are the program's own.
            what = shlex.join(["--", *run.program] if run.program[1:] else run.program)
            say(
                f"evener: elastic team of {least} to {most} workers, {team.nproc} of them here; "
                f"`evener join {team.address} --token-file {team.token_file} {what}` adds one"
            )
        launcher = ElasticLauncher(signals, command, run, team)
        launcher.run_workers()
        return launcher.conclude()


@contextmanager
def open_team(run: ElasticRun) -> Iterator["LaunchedTeam"]:
    """Start the coordinator of a team, or find that of a team that runs already.

    Raises:
        ConfigError: An option is impossible.
        LaunchError: The coordinator does not start or is not there.
        TeamRefusedError: The coordinator refuses this launcher.
        RunEndedError: The run of the team has ended.
    """
    with ExitStack() as stack:
        if run.nproc is not None:
            check_nproc(run.nproc)
        if run.max_failures < 0:
            raise ConfigError(
                f"--max-failures is {run.max_failures}; give how many workers may fail, 0 or more"
            )
        token_file, address = run.token_file, run.join
        if run.join and token_file is not None and _is_left_over(token_file, run.join):
            raise RunEndedError(_has_ended(run.join))
        token = read_token(token_file)
        coordinator: CoordinatorProcess | None = None
        if not run.join:
            read_team_limits(run.limits, "--elastic")
            if token_file is None:
                token_file = stack.enter_context(_own_token())
                token = read_token(token_file)
            coordinator = CoordinatorProcess(run.limits, run.port, token_file)
            stack.enter_context(coordinator)
            address = coordinator.address
        connection = stack.enter_context(
            SupervisorConnection(address, token=token or None, timeout_s=_CONNECT_S)
        )
        nproc = run.nproc or (1 if run.join else connection.limits[1])
        check_nproc(nproc)
        yield LaunchedTeam(
            address, token_file, connection.limits, nproc, run.environ, connection, coordinator
        )


def _has_ended(address: str) -> str:
    return f"the run of the team at {address} has ended; no worker can join it any more"


def _is_left_over(token_file: Path, address: str) -> bool:
    """Return whether a launcher made this token file for a run that has ended since.

    It removes the file last, after the coordinator has ended.
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


@dataclass(frozen=True, slots=True)
class LaunchedTeam:
    """A team, and where the workers of this launcher find it.

    Attributes:
        address: ``HOST:PORT`` of the coordinator.
        token_file: Holds what workers must know; ``None`` where the coordinator has no token.
        limits: Fewest and most workers of the team.
        nproc: Workers on this host.
        environ: What the environment of each worker is made from.
        connection: Tells the coordinator of the workers' processes.
        coordinator: Its process, where this launcher has begun the team.
    """

    address: str
    token_file: Path | None
    limits: tuple[int, int]
    nproc: int
    environ: Mapping[str, str]
    connection: SupervisorConnection
    coordinator: CoordinatorProcess | None

    def environment(self, slot: int, member: str) -> dict[str, str]:
        """Return the environment of a worker, but for its channel."""
        host, port = parse_address(self.address, "the coordinator's address")
        assert port is not None
        least, most = self.limits
        count = min(self.nproc, most)
        ranks = LocalRanks(count=count, world_size=most, host=host, port=port)
        return rank_environment(self.environ, ranks, slot % count) | {
            COORDINATOR: self.address,
            ELASTIC: f"{least}:{most}",
            MEMBER: member,
            TOKEN_FILE: "" if self.token_file is None else str(self.token_file.resolve()),
        }


@dataclass(slots=True)
class _Slot:
    """A place for a worker on this host, and the worker that has it.

    Attributes:
        number: Its number on this host.
        starts: How many workers have had it.
        started_s: When the last one started, on the monotonic clock.
        due_s: When the next one starts; ``None`` while none has to.
        failures: How many have failed soon after their start, one after the other.
    """

    number: int
    starts: int = 0
    started_s: float = 0.0
    due_s: float | None = 0.0
    failures: int = 0

    def begin(self, base: str) -> str:
        """Note a start; return the new worker's id, which no other worker ever had."""
        self.starts += 1
        self.started_s, self.due_s = time.monotonic(), None
        return f"{base}/{self.number}{f'.{self.starts}' if self.starts > 1 else ''}"

    def fail(self) -> float:
        """Note a failure; return the seconds until the next start."""
        now_s = time.monotonic()
        self.failures = 1 if now_s - self.started_s >= _SETTLED_S else self.failures + 1
        pause_s = 0.0 if self.failures == 1 else min(_LONGEST_PAUSE_S, 2.0 ** (self.failures - 2))
        self.due_s = now_s + pause_s
        return pause_s

    def close(self) -> None:
        """Start no worker here any more."""
        self.due_s = None


class ElasticLauncher(TerminalSupervisor):
    """Starts workers again that fail, tells the coordinator, and keeps that alive, too."""

    def __init__(
        self,
        signals: SignalQueue,
        command: Sequence[str],
        run: ElasticRun,
        team: LaunchedTeam,
    ) -> None:
        super().__init__(signals, GRACE_S)
        self._command, self._run, self._team = command, run, team
        self._connection, self._coordinator = team.connection, team.coordinator
        host = socket.gethostname()
        self._base = f"{host}/{os.getpid()}" if run.join else host
        self._slots = [_Slot(number) for number in range(team.nproc)]
        self._workers: dict[int, tuple[_Slot, str]] = {}  # by process: where, and the worker's id
        self._accounted: set[int] = set()  # processes whose end was dealt with
        self._lingering: dict[int, float] = {}  # processes that should end, and since when
        self._standby: Child | None = None
        self._num_standbys_lost = 0
        self._failures: list[Child] = []
        self._has_begun = False  # a worker of this host has joined the team
        self._is_over = False  # one has done the run to its end
        self._why = ""  # the run was given up
        self._code = 0
        self._loss: LaunchError | None = None  # of the coordinator
        self._is_coordinator_late = False

    def run_workers(self) -> None:
        """Start the workers and watch them until the run is over.

        Raises:
            LaunchError: A worker could not be started, or the coordinator ends again and again.
        """
        with self._supervising():
            if self._coordinator is not None:
                self._tell_lifeline(self._coordinator.pid)
            if self._run.token_file is None and self._team.token_file is not None:
                self._tell_lifeline(self._team.token_file.resolve())
            self._fill_slots()
        if self._loss is not None:
            raise self._loss

    def conclude(self) -> int:
        """Say why the run ended, if it did not go to its end; returns the exit code."""
        if self._why:
            say(self._why, end="")
            return self._code or 1
        ended = [child for child in self.children if child.pid in self._workers]
        if self._stop_signal is not None:
            return 128 + self._stop_signal if any(child.code for child in ended) else 0
        if self._is_over or not ended:
            return 0
        left = [child.code for child in ended if _has_left(child)]
        # As shells tell the end by a signal; the last ones may all have left.
        return self._code or max((code if code >= 0 else 128 - code for code in left), default=1)

    @property
    def is_given_up(self) -> bool:
        """Whether a failure has ended the run."""
        return bool(self._why) or (self._code > 0 and not self._is_over)

    # ── what differs from a fixed team ───────────────────────────────────────────────────────────

    @property
    def _requests(self) -> Sequence[int]:
        return [self._signals.fileno()]

    @property
    def _goes_on(self) -> bool:
        return bool(self._alive) or self._is_due

    @property
    def _is_due(self) -> bool:
        """Whether a worker is still to be started."""
        return self._deadline is None and any(slot.due_s is not None for slot in self._slots)

    @property
    def _at_work(self) -> list[Child]:
        return [child for child in self._alive if child.pid in self._workers]

    def _before_stop(self, signum: signal.Signals) -> None:
        self._drop_standby()

    def _passed_on(self, signum: signal.Signals) -> signal.Signals:
        # SIGINT means to a worker that it alone has to leave; SIGTERM that the team has to stop.
        return signal.SIGINT if self._run.join else signal.SIGTERM

    def _note_state(self, child: Child, state: KernelState) -> None:
        if child.pid not in self._workers:
            return
        _, member = self._workers[child.pid]
        told = ProcessState.STOPPED if state.is_halted else ProcessState.CONTINUED
        self._connection.tell(member, told, str(state))
        if state.is_halted:
            words = "the team continues without it"
            say(describe_halt(child.who, child.pid, state, child.halted_since, words))
        else:
            say(f"evener: {child.who} runs again, and joins the team")

    def _decide(self) -> None:
        self._heed_signals()
        self._keep_coordinator()
        self._watch_coordinator()
        self._notice_end()
        for child in self.children:
            self._has_begun |= child.place == JOINED
            if child.has_ended and child.pid not in self._accounted:
                self._accounted.add(child.pid)
                self._account_for(child)
            elif not child.has_ended:
                self._hasten(child)
        if self._deadline is None and self._is_due:
            self._fill_slots()
        if not (self._at_work or self._is_due):
            self._drop_standby()
        elif self._deadline is None:
            self._warm_up()

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────

    def _keep_coordinator(self) -> None:
        if self._coordinator is None:
            return
        try:
            ended = self._coordinator.look()
        except LaunchError as error:
            self._coordinator, self._loss = None, error
            say("evener: the coordinator ends again and again: its workers save, and end")
            self._give_up(1, "")
            # To save without a lease, they wait so long for the coordinator first.
            patience_s = self._connection.deadlines.patience_s
            self._set_deadline(patience_s + GRACE_S, "did not end after the coordinator")
        else:
            if ended is not None:
                self._tell_lifeline(ended)
                self._tell_lifeline(self._coordinator.pid)

    def _watch_coordinator(self) -> None:
        """Say that workers wait for a coordinator that does not answer, and for how long."""
        silent_s = self._connection.silent_s
        if bool(silent_s) == self._is_coordinator_late or not self._at_work:
            return
        self._is_coordinator_late = bool(silent_s)
        since = time.time() - silent_s
        who = f"the coordinator at {self._team.address}"
        patience = f"{self._connection.deadlines.patience_s:g} s (patience_s)"
        waiting = f"the workers of this launcher wait for it up to {patience}, then save and end"
        pid = 0 if self._coordinator is None else self._coordinator.pid
        state = state_of(pid) if pid else KernelState.UNKNOWN
        if not silent_s:
            say(f"evener: {who} answers again")
        elif state.is_halted:
            say(describe_halt(f"{who} (pid {pid})", pid, state, since, waiting))
        else:
            say(
                f"evener: {who} has not answered since {clock_time(since)}: its process is stopped "
                f"or busy, or the link to its machine is cut; {waiting}"
            )

    def _watch(self) -> None:
        super()._watch()
        self._serve_others()

    def _serve_others(self) -> None:
        """Keep the coordinator for workers of other launchers, until a signal or their end."""
        own = {member for _, member in self._workers.values()}
        said_s = time.monotonic() + _FAREWELL_S
        is_said = False
        is_told = self._stop_signal not in (None, signal.SIGINT)
        heard: list[signal.Signals] = []
        while self._coordinator is not None and not (self._why or is_told):
            others = sorted(self._connection.workers - own)
            if not others or (is_said and heard):
                return
            if not is_said and time.monotonic() >= said_s:
                is_said = True
                say(
                    f"evener: the workers of this launcher have ended; its coordinator serves "
                    f"{', '.join(others)} until these have ended, too: press Ctrl-C to end it now"
                )
            wait([*self._requests], _LOOK_S)
            heard += self._signals.take()  # or the next waits would end at once
            self._keep_coordinator()

    def _notice_end(self) -> None:
        """End workers that were started too late to join the run, without an error."""
        is_late = self._run.join and self._connection.run_has_ended and not self._has_begun
        if is_late and self._deadline is None:
            self._is_over = True
            for slot in self._slots:
                slot.close()
            say(f"evener: {_has_ended(self._team.address)}")
            self._ask_to_stop(signal.SIGTERM)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _hasten(self, child: Child) -> None:
        """End a worker that cannot work any more, but lingers."""
        if signal.SIGKILL in child.signals or child.pid not in self._workers:
            return
        # On its way out Python closes the channel some time before the process ends. A program that
        # takes the place of a worker when that has left the team disturbs nobody.
        is_awaited = child.place in (JOINING, JOINED)
        lingers = (child.is_another_program and is_awaited) or child.has_raised
        since_s = self._lingering.setdefault(child.pid, time.monotonic()) if lingers else None
        if since_s is not None and time.monotonic() - since_s > _UNWIND_S:
            if child.is_another_program:
                child.desert(ANOTHER_PROGRAM)
            child.kill()

    def _account_for(self, child: Child) -> None:
        """Tell the coordinator of an end, and decide what follows from it."""
        if child.pid not in self._workers:
            self._lose_standby(child)
            return
        slot, member = self._workers[child.pid]
        how = child.in_short.partition("(")[2].rstrip(")")
        is_done = not (child.failed or child.code or _has_left(child))
        state = ProcessState.FINISHED if is_done else ProcessState.GONE
        self._connection.tell(member, state, f"its process ended ({how})")
        if self._deadline is not None:
            return
        if _has_left(child):
            say(f"evener: {child.who} has left the team")
        elif not child.failed:
            self._is_over = True
            for each in self._slots:
                each.close()
        else:
            self._failures.append(child)
            self._replace(child, slot)

    def _replace(self, child: Child, slot: _Slot) -> None:
        """Start another worker in the place of one that has failed, or give the run up."""
        if self._is_over:  # it came too late: the others have done the run to its end
            return
        code, words = judge([child], None)
        report = child.report
        if not self._has_begun:
            self._give_up(code, words)
        elif report is not None and (
            report.user_error or report.kind == CoordinatorLostError.__name__
        ):
            # It would fail in the same way again; the others may still do the run to its end.
            say(words, end="")
            self._code = self._code or code
            if not (self._at_work or self._is_due):
                self._give_up(code, "")
        elif len(self._failures) > self._run.max_failures:
            self._give_up(
                code,
                f"{words}error: {len(self._failures)} workers have failed here, and --max-failures "
                f"is {self._run.max_failures}; end what makes them fail, or raise it\n",
            )
        else:
            pause_s = slot.fail()
            end = child.silent_end
            if report is not None and report.kind == LeftOutError.__name__:
                end = f"{child.who} ended, as the team had continued without it"
            elif child.has_raised:
                say(words, end="")
                end = f"{child.who} failed"
            when = f"in {pause_s:g} s" if pause_s else "at once"
            say(f"evener: {end}; another worker takes its place {when}")

    def _give_up(self, code: int, words: str) -> None:
        self._code, self._why = code, words or self._why
        for slot in self._slots:
            slot.close()
        self._drop_standby()
        self._ask_to_stop(self._passed_on(signal.SIGTERM))

    # ── starts ───────────────────────────────────────────────────────────────────────────────────

    def _fill_slots(self) -> None:
        now_s = time.monotonic()
        for slot in self._slots:
            if slot.due_s is not None and slot.due_s <= now_s:
                self._start(slot)

    def _start(self, slot: _Slot) -> None:
        member = slot.begin(self._base)
        environ = self._team.environment(slot.number, member)
        child, self._standby = self._standby, None
        if child is not None and not child.has_ended:
            names = (COORDINATOR, ELASTIC, MEMBER, TOKEN_FILE, "RANK", "LOCAL_RANK")
            child.channel.tell({TAKE: {name: environ[name] for name in names}})
            child.become(slot.number, f"worker {member}")
        else:
            is_first = not (slot.number or slot.starts > 1)
            try:
                with start_in_silence():
                    child = self._spawn(
                        self._command,
                        environ,
                        self._run.handed,
                        slot.number,
                        is_first,
                        f"worker {member}",
                    )
            except LaunchError as error:
                if not (self._has_begun and self._at_work):
                    raise
                warn(f"{error}. The others continue; it is tried again in {slot.fail():g} s")
                return
        self._workers[child.pid] = (slot, member)
        self._connection.attend(member)
        self._carry_output(child)

    def _warm_up(self) -> None:
        """Have a standby load what a worker needs, once the workers have done so themselves."""
        at_work = self._at_work
        if (
            self._standby is not None
            or self._num_standbys_lost >= _MOST_STANDBYS_LOST
            or not at_work
            or any(child.place != JOINED for child in at_work)
        ):
            return
        end = self._command.index("-m") + 1
        python, program = self._command[:end], self._command[end:]
        command = [*python, "evener.team.standby", ",".join(LIBRARIES[program[0]]), *program]
        environ = self._team.environment(0, "")
        try:
            with start_in_silence():
                self._standby = self._spawn(
                    command, environ, self._run.handed, 0, False, "the standby"
                )
        except LaunchError as error:
            self._num_standbys_lost = _MOST_STANDBYS_LOST
            self._do_without_standby(str(error))

    def _drop_standby(self) -> None:
        if self._standby is not None and not self._standby.has_ended:
            self._standby.kill()
        self._num_standbys_lost = _MOST_STANDBYS_LOST

    def _lose_standby(self, child: Child) -> None:
        if child is self._standby:
            self._standby = None
        if signal.SIGKILL in child.signals:
            for pipe in filter(None, (child.process.stdout, child.process.stderr)):
                pipe.close()
        else:
            self._carry_output(child)  # it says why
            self._num_standbys_lost += 1
            if self._num_standbys_lost == _MOST_STANDBYS_LOST:
                self._do_without_standby(child.silent_end)

    def _do_without_standby(self, why: str) -> None:
        warn(
            f"{why}. No further standby is started, so a worker that fails is replaced more slowly"
        )


def _has_left(child: Child) -> bool:
    """Return whether a worker was told to leave or to stop, and not by its launcher."""
    if child.code == 0:  # its script may catch KeyboardInterrupt
        return not child.finished
    return child.stop_signal is not None


def _launch_script(limits: str, command: Sequence[str]) -> int:
    program = command[command.index("evener.team.script") + 1 :]
    return launch_elastic(command, ElasticRun(limits=limits, program=program))


if __name__ == "__main__":
    code = run_child(lambda: _launch_script(sys.argv[1], sys.argv[2:]))
    end_in_silence()
    sys.exit(code)
