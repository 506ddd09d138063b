"""A managed run in separate processes, one for each device, and the agent that watches them.

The agent has its own thread: the kernel ends a worker together with the thread that started it, and
the user's functions must not block the agent.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from evener.data.fetching import RemoteTraceback
from evener.errors import LaunchError, UsageError, WorkerError
from evener.loop.event_stream import open_sinks
from evener.managed.description import ManagedRun
from evener.managed.epoch_metrics import EpochMetrics
from evener.managed.handle import Run
from evener.managed.trained import TrainedState, read_trained
from evener.managed.travel import anonymous_file, pack
from evener.team.agent import ANOTHER_PROGRAM, Agent, JoinedTeam
from evener.team.failures import ProcessRecord, first_failure
from evener.team.launch import LaunchPlan, open_team
from evener.team.signals import Requests
from evener.team.wire import DONE, JOINED, JOINING, Message
from evener.team.worker_processes import Child

#: Descriptor of the file with the pickled job, in a worker.
JOB_FD: Final = "EVENER_JOB_FD"
#: Descriptor of the file to which the worker that is asked for the model writes it.
STATE_FD: Final = "EVENER_STATE_FD"

#: The command of a worker.
WORKER: Final = (sys.executable, "-P", "-m", "evener.managed.worker")

#: Time for workers that were asked to stop to finish their micro-batch.
STOP_S = 60.0
#: Time for the other workers to notice a failure, at their next exchange.
SURVIVORS_S = 30.0
#: Time for a surviving worker to send its copy of the model.
STATE_S = 300.0
#: Time for the user's code that runs at a worker's exit, such as sending logs.
LEAVE_S = 60.0
# Time for a worker without further work to end.
_EXIT_S = 10.0


@final
class ProcessRun(Run):
    """A run on several devices, each with its own process.

    If one fails, all end, unless the team is elastic: then it is replaced.

    Args:
        job: What to do; its ``metrics_fn`` and its sinks are called on a thread.

    Raises:
        ConfigError: A function or the data cannot be pickled, or a function returned no sink.
        LaunchError: A worker could not be started.
    """

    def __init__(self, job: ManagedRun) -> None:
        super().__init__(job)
        self._job, self._state_file = pack(job.parts()), anonymous_file()
        self._sink = open_sinks(job.event_sinks)
        self._last_epoch = -1
        self._requests = Requests()
        self._agent: ManagedAgent | None = None
        self._agent_error: BaseException | None = None
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._started, self._ended = threading.Event(), threading.Event()
        self._looks_after = threading.Thread(target=self._look_after, name="evener-agent")
        self._looks_after.daemon = True
        self._thread = threading.Thread(target=self._work, name="evener-workers", daemon=True)
        self._begin()

    def _begin(self) -> None:
        """Start the workers, and wait until they have been started."""
        try:
            self._looks_after.start()
            self._thread.start()
            self._started.wait()
        except BaseException:  # such as Ctrl-C: otherwise the workers would remain
            self._end_now()
            raise
        if isinstance(self._agent_error, LaunchError):
            self._ended.wait()
            raise self._agent_error

    # ── for the handle ───────────────────────────────────────────────────────────────────────────

    @property
    def pids(self) -> tuple[int, ...]:
        """Process of each worker."""
        return tuple(child.pid for child in self._agent.workers) if self._agent else ()

    def stop(self) -> None:
        """Ask all workers to stop after their micro-batch."""
        self._requests.put(signal.SIGTERM)

    def next_metrics(self, timeout_s: float | None) -> EpochMetrics | None:
        """Wait for the next epoch that the workers send; return ``None`` at the end."""
        self._check_thread()
        return super().next_metrics(timeout_s)

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the epochs that the workers have sent."""
        self._check_thread()
        return super().poll_metrics()

    def finish(self, timeout_s: float | None) -> bool:
        """Wait until all workers have ended; return whether they have."""
        self._check_thread()
        if not self._ended.wait(timeout_s):
            return False
        self._thread.join()
        return True

    def abandon(self) -> bool:
        """Kill the workers; return whether they were still at work."""
        was_at_work = not self.is_done
        self._end_now()
        self.finish(None)
        return was_at_work

    @property
    def is_done(self) -> bool:
        """Whether all workers have ended."""
        return self._ended.is_set()

    def _end_now(self) -> None:
        self._requests.put(signal.SIGTERM)
        self._requests.put(signal.SIGINT)

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(
                "metrics_fn waits for the run that it is called by; call handle.stop() there, and "
                "join(), metrics() and poll_metrics() elsewhere"
            )

    # ── the agent's thread ───────────────────────────────────────────────────────────────────────

    def _look_after(self) -> None:
        limits = self.job.elastic
        plan = LaunchPlan(
            nproc=len(self.job.device_names),
            elastic="{}:{}".format(*limits) if limits else "",
        )
        try:
            with open_team(plan) as team:
                self._agent = ManagedAgent(
                    WORKER,
                    team,
                    self._requests,
                    on_message=self._messages.put,
                    has_begun=self._note_start,
                    environ=worker_environment(),
                    handed={JOB_FD: self._job.fileno(), STATE_FD: self._state_file.fileno()},
                    max_failures=self.job.max_failures,
                )
                self._agent.run()
        except BaseException as error:
            self._agent_error = error  # raised by ``join``
        finally:
            self._job.close()
            self._requests.close()
            self._messages.put(None)
            self._started.set()

    def _note_start(self) -> None:
        """Note that all workers have been started; in a fixed team they have inherited the job."""
        if self.job.elastic is None:
            self._job.close()
        self._started.set()

    # ── the thread for results ───────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._take_in(message)
        except BaseException as error:
            self.error = self.error or error
            self._end_now()
        finally:
            self._looks_after.join()
            self._conclude()
            self._sink.close()
            self._state_file.close()
            self._metrics.put(None)
            self._ended.set()

    def _take_in(self, message: Message) -> None:
        if "metrics" in message:
            metrics = EpochMetrics.from_document(message["metrics"])
            if metrics.epoch > self._last_epoch:  # otherwise another worker has sent it
                self._last_epoch = metrics.epoch
                self._publish(metrics)
        elif "event" in message:
            self._sink.emit(message["event"])
        elif "state" in message:
            self.state = read_trained(message["state"], self._state_file)

    def _conclude(self) -> None:
        """Find why the run was not completed."""
        if self.error is None:
            self.error = self._agent_error
        if self.error is None and self._agent is not None:
            self.error = self._agent.failure(self.state, self.job.device_names)


@final
class ManagedAgent(Agent):
    """An agent that exchanges messages with its workers.

    In a fixed team, workers that survive the failure of one keep their model: one sends it.

    Args:
        command: See ``Agent``.
        team: See ``Agent``.
        requests: See ``Agent``.
        on_message: Called with each message of a worker.
        has_begun: Called when all have been started, and at each event after that.
        environ: See ``Agent``.
        handed: See ``Agent``.
        max_failures: See ``Agent``.
    """

    stdin = subprocess.DEVNULL

    def __init__(
        self,
        command: Sequence[str],
        team: JoinedTeam,
        requests: Requests,
        *,
        on_message: Callable[[Message], object],
        has_begun: Callable[[], object] = lambda: None,
        environ: Mapping[str, str] | None = None,
        handed: Mapping[str, int] | None = None,
        max_failures: int = 0,
    ) -> None:
        super().__init__(
            command, team, requests, environ=environ, handed=handed, max_failures=max_failures
        )
        self._on_message, self._on_begun = on_message, has_begun
        self._is_failing = self._is_leaving = self._has_state = False
        self._asked: Child | None = None  # for its state
        self._late: WorkerError | None = None

    def failure(self, state: TrainedState | None, devices: Sequence[str]) -> WorkerError | None:
        """Return why the run was not completed; ``None`` if it was.

        Args:
            state: The model, if a worker sent it.
            devices: Device of each rank.
        """
        if self._is_fixed:
            if self._late is not None or not self._is_failing:
                return self._late
            first = first_failure([c for c in self._processes.all if c.place != DONE])
            assert first is not None
            others = [c.in_short for c in self._processes.all if c.report and c is not first]
            also = f"also ended: {', '.join(others)}" if others else ""
            who = f"rank {first.rank} ({devices[first.rank]}, pid {first.pid})"
            return _failure_of(first, who, also, state)
        if not self.is_given_up and state is not None:
            return None
        if not self._failures:
            return WorkerError(
                "the run ended before a worker had sent the model: it was stopped or killed; with "
                "checkpoint_dir, resume continues it",
                rank=0,
                kind=None,
                state=None,
            )
        num_failures, last = len(self._failures), self._failures[-1]
        many = f"{num_failures} workers have failed, more than max_failures allows"
        return _failure_of(last, last.who, many if num_failures > self._max_failures else "", state)

    # ── in both kinds of teams ───────────────────────────────────────────────────────────────────

    def _decide(self) -> None:
        self._on_begun()
        super()._decide()

    def _take(self, child: Child, message: Message) -> None:
        super()._take(child, message)
        self._has_state |= "state" in message
        self._on_message(message)
        if "failure" in message and not self._is_fixed:  # other workers hold the model
            self._order("exit", [child])

    def _stop(self, signum: signal.Signals, why: str = "") -> None:
        self._stop_signal = signum
        self._ask_to_stop(signum)

    def _ask_to_stop(self, signum: signal.Signals) -> None:
        self._set_deadline(STOP_S, f"did not stop within {STOP_S:g} s")
        self._order("stop", [child for child in self._at_work if child.report is None])

    def _order(self, order: str, children: Sequence[Child]) -> None:
        for child in children:
            child.channel.send({"order": order})

    def _is_hurried(self) -> bool:
        return self._killed

    def _kill(self, why: str) -> None:
        alive = self._processes.alive
        early = any(child.place != DONE for child in self._processes.all)
        if self._is_fixed and alive and early and not self._is_failing and self._late is None:
            words = why if why == self._lateness else "ended on request"
            names = ", ".join(child.who for child in alive)
            self._late = WorkerError(
                f"{names}: {words}, and killed; what was trained since the last checkpoint is lost",
                rank=alive[0].rank,
                kind=None,
                state=None,
            )
        super()._kill("")

    # ── a fixed team ─────────────────────────────────────────────────────────────────────────────

    def _keep_together(self) -> None:
        super()._keep_together()
        if self._killed:
            return
        if self._is_failing:
            self._wind_up()
        elif all(child.place == DONE for child in self._processes.all):
            if not self._is_leaving:
                self._is_leaving = True
                self._set_deadline(LEAVE_S, "did not end")
        elif self._failed_for_sure():
            self._fail()

    def _heed_stopped_ranks(self) -> None:
        """Do nothing: a worker that ends by a signal has failed."""

    def _find_deserters(self, waiting: Sequence[int]) -> None:
        for child in self._processes.all:
            has_left = child.has_ended and child.code == 0 and child.place != DONE
            if has_left and (child.report is None or child.report.is_exit):
                child.desertion = "ended with exit code 0; its output above may show why"
            elif child in self._able and child.is_another_program:
                child.desertion = ANOTHER_PROGRAM
                child.kill()  # it would neither train nor learn of the end

    @property
    def _able(self) -> list[Child]:
        """Return the workers that can still answer; not those that were killed."""
        able = [c for c in self._processes.alive if signal.SIGKILL not in c.signals]
        return [child for child in able if child.place != DONE and child.report is None]

    def _fail(self) -> None:
        self._is_failing = True
        self._set_deadline(SURVIVORS_S, "did not notice that another rank had failed")
        for child in self._able:
            # A worker that waits for others to connect has no state to lose.
            if child.place in ("", JOINING, JOINED):
                child.kill()
            else:
                self._order("stop", [child])

    def _end_late(self) -> None:
        late = self._able
        if self._is_fixed and self._is_failing and late:
            for child in late:
                child.kill()
            self._set_deadline(_EXIT_S, "did not end when killed")
        else:
            super()._end_late()

    def _wind_up(self) -> None:
        """Ask a surviving worker for the model once all are idle, and then end all."""
        if self._is_leaving or self._able:
            return
        alive = self._processes.alive
        if self._asked is None and not self._has_state:
            # The other workers hold a whole model; the failed one may have been updating it.
            able = [(c.report, c) for c in alive if c.report and c.report.steps >= 0]
            able.sort(key=lambda pair: (not pair[0].follow_up, -pair[0].steps, pair[1].rank))
            if able:
                self._asked = able[0][1]
                self._order("send_state", [self._asked])
                self._set_deadline(STATE_S, "did not send the model")
        if self._has_state or self._asked is None or self._asked.has_ended:
            self._is_leaving = True
            self._set_deadline(_EXIT_S, "did not end")
            self._order("exit", alive)


def worker_environment() -> dict[str, str]:
    """Return the base of the workers' environment: modules importable here are importable there."""
    path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    return {**os.environ, "PYTHONPATH": path}


def _failure_of(
    first: ProcessRecord, who: str, also: str, state: TrainedState | None
) -> WorkerError:
    """Return the error of a run that a worker has ended.

    Args:
        first: The worker whose failure counts.
        who: Its name in the message.
        also: Text to append.
        state: The model, if a worker sent it.
    """
    report = first.report
    text = first.silent_end
    if report is not None:
        text = f"{who} failed: {report.kind}: {report.message}"
    if also:
        text += f"; {also}"
    if state is not None:
        text += f"; handle.state holds the model after step {state.progress.steps}"
    kind = report.kind if report else None
    error = WorkerError(text, rank=first.rank, kind=kind, state=state)
    if report is not None:
        error.__cause__ = RemoteTraceback(report.traceback)
    return error
