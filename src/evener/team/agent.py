"""The agent: one for each host of a team. It starts workers, watches, replaces and ends them.

In a fixed team the first worker that fails ends the run. In an elastic team a worker that fails is
replaced, up to a number of failures; a warm standby process, which has loaded torch, takes the
place of the next one. An agent reports the state of its workers' processes to the coordinator, and
never imports torch.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import ClassVar, Final

from evener.comm.addresses import parse_address
from evener.comm.messages import name_ranks
from evener.errors import CoordinatorLostError, LaunchError, LeftOutError
from evener.protocol.formation import ProcessState
from evener.team.connection import AgentConnection
from evener.team.environment import COORDINATOR, ELASTIC, MEMBER, TOKEN_FILE
from evener.team.failures import judge
from evener.team.host import KernelState, clock_time
from evener.team.signals import STOPPING, Requests
from evener.team.standby import TAKE
from evener.team.terminal import printable, say, warn
from evener.team.wire import DONE, JOINED, JOINING, Message
from evener.team.worker_processes import (
    DEATH_S,
    Child,
    LocalRanks,
    WorkerProcesses,
    rank_environment,
)

#: Default number of failed workers beyond which an elastic team stops.
MAX_FAILURES: Final = 10
#: Seconds for ranks of a fixed team to end by themselves after they were asked to.
GRACE_S: Final = 5.0
#: The same for workers of an elastic team: they finish their window.
ELASTIC_GRACE_S: Final = 30.0
#: Modules that a standby loads, by the module that it runs when it becomes a worker.
LIBRARIES: Final = {
    "evener": ("torch", "transformers", "evener.tasks.job"),
    "evener.team.script": ("torch", "evener.ddp"),
    "evener.managed.worker": ("evener.managed.rank",),
}
#: Message about a rank that has called ``exec``.
ANOTHER_PROGRAM: Final = (
    "has become another program (exec), while the other ranks wait for it; start that program "
    "in another process, for example with subprocess.run"
)

# A worker that fails after at least this time is replaced at once.
_SETTLED_S = 10.0
_LONGEST_PAUSE_S = 60.0
# A rank may report a lost peer before the peer has reported the original error. So the other ranks
# are not ended for this time.
_SETTLE_S = 2.0
# Time for a worker to end after it has reported its failure, or closed its channel.
_UNWIND_S = 10.0
_MOST_STANDBYS_LOST = 3
# By then, workers of other agents that end together with those of this one have left.
_FAREWELL_S = 1.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTeam:
    """A team, and its address for the workers of this host.

    Attributes:
        address: ``HOST:PORT`` of the coordinator.
        token_file: File with the token; ``None`` if the coordinator has none.
        connection: Reports the workers' processes to the coordinator.
        nproc: Workers on this host.
        ranks: In a fixed team, the ranks of this host; ``None`` in an elastic team.
        hosts_coordinator: Whether the coordinator is a thread of this process.
        is_own_token: Whether the token file was made for this run.
    """

    address: str
    token_file: Path | None
    connection: AgentConnection
    nproc: int
    ranks: LocalRanks | None = None
    hosts_coordinator: bool = False
    is_own_token: bool = False

    def environment(self, base: Mapping[str, str], slot: int, member: str) -> dict[str, str]:
        """Return the environment of a worker, except for its channel.

        Args:
            base: The environment that it extends.
            slot: The worker's place on this host.
            member: Its id.
        """
        ranks = self.ranks
        if ranks is None:
            host, port = parse_address(self.address, "the coordinator's address")
            most = self.connection.limits[1]
            count = min(self.nproc, most)
            ranks = LocalRanks(count=count, world_size=most, host=host, port=port or 0)
        environ = rank_environment(base, ranks, slot % ranks.count)
        if self.ranks is None:
            environ[ELASTIC] = "{}:{}".format(*self.connection.limits)
        token_file = "" if self.token_file is None else str(self.token_file.resolve())
        return environ | {COORDINATOR: self.address, MEMBER: member, TOKEN_FILE: token_file}


@dataclass(slots=True)
class _Slot:
    """A place for a worker on this host, and the worker that has it.

    Attributes:
        number: Its number on this host.
        starts: Number of workers that were started in it.
        started_s: When the last one started, on the monotonic clock.
        due_s: When the next one starts; ``None`` if none is needed.
        failures: Number of successive workers that failed soon after their start.
    """

    number: int
    starts: int = 0
    started_s: float = 0.0
    due_s: float | None = 0.0
    failures: int = 0

    def begin(self, base: str, rank: int) -> str:
        """Note a start of a rank; return the new worker's id, which is never reused."""
        self.starts += 1
        self.started_s, self.due_s = time.monotonic(), None
        return f"{base}/{rank}{f'.{self.starts}' if self.starts > 1 else ''}"

    def fail(self) -> float:
        """Note a failure; return the seconds until the next start."""
        now_s = time.monotonic()
        self.failures = 1 if now_s - self.started_s >= _SETTLED_S else self.failures + 1
        pause_s = 0.0 if self.failures == 1 else min(_LONGEST_PAUSE_S, 2.0 ** (self.failures - 2))
        self.due_s = now_s + pause_s
        return pause_s


class Agent:
    """Watches the workers of one host until the run is over.

    Args:
        command: Python, its options, ``-m``, a module of ``LIBRARIES``, its arguments; the same for
            every worker. In a fixed team, any program and its arguments.
        team: The team of the workers.
        requests: Signals that were sent to this agent.
        environ: The base of each worker's environment.
        handed: Descriptors that every worker inherits, by the variable that holds their number.
        max_failures: An elastic team's run stops when more workers than this have failed here.
        grace_s: Seconds for workers to end by themselves; by default ``GRACE_S``.
    """

    #: Standard input of the first worker, as ``subprocess`` takes it.
    stdin: ClassVar[int | None] = None

    def __init__(
        self,
        command: Sequence[str],
        team: JoinedTeam,
        requests: Requests,
        *,
        environ: Mapping[str, str] | None = None,
        handed: Mapping[str, int] | None = None,
        max_failures: int = 0,
        grace_s: float | None = None,
    ) -> None:
        self._command, self._team, self._requests = command, team, requests
        self._environ, self._handed = os.environ if environ is None else environ, handed or {}
        self._max_failures = max_failures
        self._is_fixed = team.ranks is not None
        default_s = GRACE_S if self._is_fixed else ELASTIC_GRACE_S
        self._grace_s = default_s if grace_s is None else grace_s
        self._connection = team.connection
        self._processes = WorkerProcesses(self.stdin, self._is_hurried)
        host = socket.gethostname()
        hosts = team.hosts_coordinator or self._is_fixed
        self._base = host if hosts else f"{host}/{os.getpid()}"
        self._slots = [_Slot(number) for number in range(team.nproc)]
        self._workers: dict[int, tuple[_Slot, str]] = {}  # by process: where, and the worker's id
        self._accounted: set[int] = set()  # processes whose end was handled
        self._lingering: dict[int, float] = {}  # processes that should end, and since when
        self._standby: Child | None = None
        self._num_standbys_lost = 0
        self._failures: list[Child] = []
        self._has_begun = False  # a worker of this host has joined the team
        self._is_over = False  # a worker has completed the run
        self._why = ""  # the run was given up
        self._code = 0
        # On other hosts of a fixed team:
        self._failure_elsewhere = ""  # why the run failed there
        self._ended_elsewhere: set[int] = set()  # ranks there that ended with exit code 0
        self._lost_hosts: list[str] = []  # as text
        self._is_coordinator_late = False
        self._stop_signal: signal.Signals | None = None
        self._deadline: float | None = None  # on the monotonic clock; None while no worker must end
        self._lateness = ""  # the message about workers that miss it
        self._settles_at: float | None = None  # likewise; None while no rank has lost another
        self._killed = False

    def run(self) -> None:
        """Start the workers and watch them until the run is over.

        The kernel ends a worker together with the thread that calls this.

        Raises:
            LaunchError: A worker could not be started.
        """
        with self._processes:
            if self._team.is_own_token and self._team.token_file is not None:
                self._processes.guard(self._team.token_file.resolve())
            self._fill_slots()
            self._watch()
            if self._team.hosts_coordinator and not self._is_fixed:
                self._serve_others()

    @property
    def workers(self) -> list[Child]:
        """Processes that are or were workers, in the order of their starts."""
        return [child for child in self._processes.all if child.pid in self._workers]

    # ── the watch ────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        while self._processes.alive or self._is_due:
            self._processes.wait([self._requests.fileno()])
            self._processes.look()
            for child in self._processes.alive:
                state = child.look_at_state()
                if state is not None and child.pid in self._workers:
                    self._note_state(child, state)
            for child in self._processes.all:  # after their ends, so all their messages have come
                for message in child.channel.receive():
                    self._take(child, message)
            self._decide()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._killed:
                    break
                self._end_late()
        for child in self._processes.alive:
            say(
                f"evener: {child.who} does not end after SIGKILL: it hangs in the kernel, in a "
                "device driver or a network file system"
            )
            child.end(-signal.SIGKILL)

    def _take(self, child: Child, message: Message) -> None:
        """Handle a worker's message."""
        child.take(message)
        self._has_begun |= child.place == JOINED

    def _decide(self) -> None:
        """Handle requests and messages, and replace or end workers."""
        self._heed_requests()
        self._watch_coordinator()
        for child in self._processes.all:
            if child.has_ended and child.pid not in self._accounted:
                self._accounted.add(child.pid)
                self._account_for(child)
        if self._is_fixed:
            self._keep_together()
        else:
            self._keep_going()

    @property
    def _is_due(self) -> bool:
        """Whether another worker must be started."""
        return self._deadline is None and any(slot.due_s is not None for slot in self._slots)

    @property
    def _at_work(self) -> list[Child]:
        return [child for child in self._processes.alive if child.pid in self._workers]

    def _note_state(self, child: Child, state: KernelState) -> None:
        """Report that a worker was stopped, is held by a debugger, or runs again."""
        _, member = self._workers[child.pid]
        is_halted = state is KernelState.STOPPED
        reported = ProcessState.STOPPED if is_halted else ProcessState.CONTINUED
        self._connection.report_state(member, reported, str(state))
        if not is_halted:
            joins = "" if self._is_fixed else ", and joins the team"
            say(f"evener: {child.who} runs again{joins}")
            return
        words = "the team continues without it"
        if self._is_fixed:
            alone = len(self._processes.all) == 1
            words = "nothing waits for it on this host" if alone else "the other ranks wait for it"
        say(
            f"evener: {child.who} is stopped since {clock_time(child.halted_since)}, and {words}; "
            f"`kill -CONT {child.pid}`, or the debugger that holds it, continues it"
        )

    def _account_for(self, child: Child) -> None:
        """Report a worker's end to the coordinator, and react to it."""
        if child.pid not in self._workers:
            self._lose_standby(child)
            return
        slot, member = self._workers[child.pid]
        how = child.in_short.partition("(")[2].rstrip(")")
        is_done = not (child.failed or child.code or _has_left(child))
        state = ProcessState.FINISHED if is_done else ProcessState.GONE
        self._connection.report_state(member, state, f"its process ended ({how})")
        if self._is_fixed:
            if child.code == 0:
                self._connection.relay({"ended": child.rank})
        elif self._deadline is None:
            self._follow_end(child, slot)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def _heed_requests(self) -> None:
        for signum in self._requests.take():
            if self._deadline is None:
                self._stop_everywhere(signum)
            elif signum == signal.SIGINT and not self._killed:
                self._stop_signal = self._stop_signal or signum
                self._kill("interrupted again")

    def _stop_everywhere(self, signum: signal.Signals, why: str = "") -> None:
        """Ask the workers to stop, and in a fixed team those of other hosts."""
        if self._is_fixed:
            self._connection.relay({"stop": int(signum)})
        self._stop(signum, why)

    def _stop(self, signum: signal.Signals, why: str = "") -> None:
        """Ask the workers of this host to stop."""
        self._stop_signal = signum
        self._drop_standby()
        alive = len(self._at_work)
        asked = (
            f": asked the rank{'s' if alive > 1 else ''} to stop, which may take "
            f"{self._grace_s:g} s; press Ctrl-C to kill them at once"
        )
        say(f"evener: {why or signum.name}{asked if alive else ''}")
        # The terminal was closed: ranks handle it like any other request to stop.
        passed = signal.SIGTERM if signum == signal.SIGHUP else signum
        if not self._is_fixed:
            # On SIGINT, a worker leaves by itself; on SIGTERM, all workers stop.
            passed = signal.SIGTERM if self._team.hosts_coordinator else signal.SIGINT
        self._ask_to_stop(passed)

    def _ask_to_stop(self, signum: signal.Signals) -> None:
        self._set_deadline(self._grace_s, f"had not ended {self._grace_s:g} s after being asked to")
        for child in self._processes.alive:
            if child.report is None:  # otherwise it is already ending
                child.send_signal(signum)

    def _set_deadline(self, seconds: float, lateness: str) -> None:
        self._deadline, self._lateness = time.monotonic() + seconds, lateness

    def _end_late(self) -> None:
        """Kill the workers that still run at the deadline."""
        self._kill(self._lateness)

    def _kill(self, why: str) -> None:
        alive = self._processes.alive
        if why:
            say(f"evener: {why}: killed {', '.join(child.who for child in alive)}")
        for child in alive:
            child.kill()
        self._killed = True
        self._set_deadline(DEATH_S, why)

    def _is_hurried(self) -> bool:
        """Return whether output that has not arrived is dropped."""
        return bool(self._requests.take())

    # ── starts ───────────────────────────────────────────────────────────────────────────────────

    def _fill_slots(self) -> None:
        now_s = time.monotonic()
        for slot in self._slots:
            if slot.due_s is not None and slot.due_s <= now_s:
                self._start(slot)

    def _start(self, slot: _Slot) -> None:
        # Several agents of a fixed team may be on one host, or on hosts with the same name.
        rank = slot.number + (self._team.ranks.first if self._team.ranks else 0)
        member = slot.begin(self._base, rank)
        environ = self._team.environment(self._environ, slot.number, member)
        child, self._standby = self._standby, None
        name = "" if self._is_fixed else f"worker {member}"
        if child is not None and not child.has_ended:
            names = (COORDINATOR, ELASTIC, MEMBER, TOKEN_FILE, "RANK", "LOCAL_RANK")
            child.channel.send({TAKE: {name: environ[name] for name in names}})
            child.rank, child.name = slot.number, name
        else:
            is_first = not (slot.number or slot.starts > 1)
            try:
                child = self._processes.start(
                    self._command, environ, self._handed, rank, is_first=is_first, name=name
                )
            except LaunchError as error:
                if not (self._has_begun and self._at_work):
                    raise
                warn(f"{error}. The others continue; it is started again in {slot.fail():g} s")
                return
        self._workers[child.pid] = (slot, member)
        self._connection.attend(member)
        self._processes.carry_output(child)

    # ── a fixed team ends together ───────────────────────────────────────────────────────────────

    def _keep_together(self) -> None:
        """End the ranks of a fixed team if one has failed, here or on another host."""
        for relayed in self._connection.take_relayed():
            self._hear_agent(relayed)
        self._heed_stopped_ranks()
        waiting = [child.rank for child in self._processes.alive if child.place == JOINING]
        self._find_deserters(waiting)
        if self._deadline is not None:
            return
        if waiting and self._ended_elsewhere:
            gone = name_ranks([*self._ended_elsewhere])
            self._fail_elsewhere(
                f"{gone} on another machine ended with exit code 0{_waited(waiting)}"
            )
        elif self._failed_for_sure():
            self._fail()

    def _fail(self) -> None:
        """Stop the run: a rank of this host has failed, and not because of another one."""
        self._connection.relay({"failed": [child.rank for child in self._processes.all]})
        self._ask_to_stop(signal.SIGTERM)

    def _hear_agent(self, message: Message) -> None:
        """Handle a message of the agent of another host."""
        stop, failed, ended = (message.get(name) for name in ("stop", "failed", "ended"))
        if isinstance(ended, int):
            self._ended_elsewhere.add(ended)
        if isinstance(name := message.get("lost"), str):
            words = (
                f"the connection to {printable(name)} ended at {clock_time(time.time())}: the link "
                "to that machine is cut, or the machine or its launcher has ended"
            )
            self._lost_hosts.append(f"{words}; check both, and start every machine's part again")
            if self._deadline is None:
                say(f"evener: {words}; ranks wait for one another until their timeout_s")
        if self._deadline is not None:
            return
        if stop in {int(signum) for signum in (*STOPPING, signal.SIGHUP)}:
            self._stop(signal.Signals(stop), f"{signal.Signals(stop).name} on another machine")
        elif isinstance(failed, list) and failed and all(type(rank) is int for rank in failed):
            self._fail_elsewhere(
                f"the run failed on another machine, which has {name_ranks(failed)}; its output "
                "says why"
            )

    def _fail_elsewhere(self, words: str) -> None:
        self._failure_elsewhere = f"error: {words}\n"
        self._ask_to_stop(signal.SIGTERM)

    def _heed_stopped_ranks(self) -> None:
        """Stop the run if a rank ends by a signal that this agent did not send."""
        for child in self._processes.all:
            signum = child.stop_signal
            if signum is None or child.signals:
                continue
            if self._deadline is None:
                self._stop_everywhere(signum, f"{child.who} has stopped ({signum.name})")
            if self._stop_signal is not None:  # otherwise another rank has failed before
                child.signals.add(signum)

    def _find_deserters(self, waiting: Sequence[int]) -> None:
        """Find ranks that others wait for and that will never come."""
        for child in self._processes.all:
            if child.desertion or child.signals:
                continue
            if child.is_another_program and (waiting or child.place in (JOINING, JOINED)):
                child.desertion = f"{ANOTHER_PROGRAM}, or after ddp.close()"
            elif waiting and child.has_ended and not child.failed:
                child.desertion = f"ended with exit code 0{_waited(waiting)}"

    def _failed_for_sure(self) -> bool:
        # After a process has done its work, its exit code does not matter.
        working = [child for child in self._processes.all if child.place != DONE]
        failing = [child for child in working if child.report is not None or child.failed]
        if any(c.report is None or not c.report.follow_up or c.desertion for c in failing):
            return True
        if failing and self._settles_at is None:
            self._settles_at = time.monotonic() + _SETTLE_S
        return self._settles_at is not None and time.monotonic() >= self._settles_at

    # ── an elastic team continues ────────────────────────────────────────────────────────────────

    def _keep_going(self) -> None:
        """Replace failed workers of an elastic team, and end workers that should have ended."""
        self._notice_end()
        for child in self._at_work:
            self._hasten(child)
        if self._is_due:
            self._fill_slots()
        if not (self._at_work or self._is_due):
            self._drop_standby()
        elif self._deadline is None:
            self._warm_up()

    def _follow_end(self, child: Child, slot: _Slot) -> None:
        if _has_left(child):
            say(f"evener: {child.who} has left the team")
        elif not child.failed:
            self._is_over = True
            self._start_no_more()
        elif not self._is_over:  # otherwise it came too late: others have completed the run
            self._failures.append(child)
            self._replace(child, slot)

    def _start_no_more(self) -> None:
        for slot in self._slots:
            slot.due_s = None

    def _replace(self, child: Child, slot: _Slot) -> None:
        """Replace a failed worker, or give up the run."""
        code, words = judge([child], None)
        report = child.report
        if not self._has_begun:
            self._give_up(code, words)
        elif report is not None and (
            report.user_error or report.kind == CoordinatorLostError.__name__
        ):
            # It would fail in the same way again; the others may still complete the run.
            say(words, end="")
            self._code = self._code or code
            if not (self._at_work or self._is_due):
                self._give_up(code, "")
        elif len(self._failures) > self._max_failures:
            self._give_up(
                code,
                f"{words}error: {len(self._failures)} workers have failed here, and --max-failures "
                f"is {self._max_failures}; fix the cause, or raise --max-failures\n",
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
        self._start_no_more()
        self._drop_standby()
        self._ask_to_stop(signal.SIGTERM if self._team.hosts_coordinator else signal.SIGINT)

    def _hasten(self, child: Child) -> None:
        """End a worker that cannot work any more but has not ended."""
        if signal.SIGKILL in child.signals:
            return
        # At exit Python closes the channel some time before the process ends. If a worker that has
        # left the team calls exec, the new program may run on.
        is_awaited = child.place in (JOINING, JOINED)
        lingers = (child.is_another_program and is_awaited) or child.has_raised
        since_s = self._lingering.setdefault(child.pid, time.monotonic()) if lingers else None
        if since_s is not None and time.monotonic() - since_s > _UNWIND_S:
            if child.is_another_program:
                child.desertion = ANOTHER_PROGRAM
            child.kill()

    def _notice_end(self) -> None:
        """End workers that were started too late to join the run, without an error."""
        joins = not self._team.hosts_coordinator
        is_late = joins and self._connection.run_has_ended and not self._has_begun
        if is_late and self._deadline is None:
            self._is_over = True
            self._start_no_more()
            say(f"evener: {run_has_ended(self._team.address)}")
            self._ask_to_stop(signal.SIGTERM)

    def _warm_up(self) -> None:
        """Let a standby load what a worker needs, after the workers have loaded it."""
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
        environ = self._team.environment(self._environ, 0, "")
        try:
            self._standby = self._processes.start(
                command, environ, self._handed, 0, is_first=False, name="the standby"
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
            self._processes.carry_output(child)  # it has the cause
            self._num_standbys_lost += 1
            if self._num_standbys_lost == _MOST_STANDBYS_LOST:
                self._do_without_standby(child.silent_end)

    def _do_without_standby(self, why: str) -> None:
        warn(
            f"{why}. No further standby is started, so a worker that fails is replaced more slowly"
        )

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────

    def _watch_coordinator(self) -> None:
        """Print that workers wait for a coordinator that does not answer, and for how long."""
        silent_s = self._connection.silent_s
        is_known = self._is_fixed or self._team.hosts_coordinator
        if is_known or bool(silent_s) == self._is_coordinator_late or not self._at_work:
            return
        self._is_coordinator_late = bool(silent_s)
        who = f"the coordinator at {self._team.address}"
        if not silent_s:
            say(f"evener: {who} answers again")
            return
        say(
            f"evener: {who} has not answered since {clock_time(time.time() - silent_s)}: its "
            "process is stopped or busy, or the link to its machine is cut; the workers of this "
            f"launcher wait for it up to {self._connection.deadlines.patience_s:g} s (patience_s), "
            "then save and end"
        )

    def _serve_others(self) -> None:
        """Serve the coordinator for workers of other agents, until a signal or their end."""
        own = {member for _, member in self._workers.values()}
        announce_s = time.monotonic() + _FAREWELL_S
        is_announced = False
        signals: list[signal.Signals] = []
        while not self._why and self._stop_signal in (None, signal.SIGINT):
            others = sorted(self._connection.workers - own)
            if not others or (is_announced and signals):
                return
            if not is_announced and time.monotonic() >= announce_s:
                is_announced = True
                say(
                    f"evener: the workers of this launcher have ended; its coordinator serves "
                    f"{', '.join(others)} until these have ended, too: press Ctrl-C to end it now"
                )
            wait([self._requests.fileno()], _LOOK_S)
            signals += self._requests.take()  # otherwise the next waits would return at once

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    @property
    def is_given_up(self) -> bool:
        """Whether a failure has ended the run."""
        return bool(self._why) or (self._code > 0 and not self._is_over)

    def conclude(self) -> tuple[int, str]:
        """Return the result of the run.

        Returns:
            The exit code: 0 if a worker has completed the run; 128 + n after a stop by signal n;
            else that of the failure that ended the run, 1 if that was a kill. And the cause of a
            failure as text, empty without one.
        """
        if self._is_fixed:
            lost = "\n".join(self._lost_hosts)
            code, words = judge(self._processes.all, self._stop_signal, lost)
            words = words or self._failure_elsewhere
            return code or int(bool(words)), words
        if self._why:
            return self._code or 1, self._why
        ended = self.workers
        if self._stop_signal is not None:
            return 128 + self._stop_signal if any(child.code for child in ended) else 0, ""
        if self._is_over or not ended:
            return 0, ""
        left = [child.code for child in ended if _has_left(child)]
        # The exit code as in shells; the last workers may all have left.
        last = max((code if code >= 0 else 128 - code for code in left), default=1)
        return self._code or last, ""


def run_has_ended(address: str) -> str:
    """Return a message: no worker can join the run any more."""
    return f"the run of the team at {address} has ended; no worker can join it any more"


def _has_left(child: Child) -> bool:
    """Return whether a worker was asked to leave or to stop, and not by its agent."""
    if child.code == 0:  # its script may catch KeyboardInterrupt
        return not child.finished
    return child.stop_signal is not None


def _waited(waiting: Sequence[int]) -> str:
    return (
        f" while {name_ranks(waiting)} waited for it in Ddp.setup; let every rank run the whole "
        "script, and call Ddp.setup the same number of times"
    )
