"""The workers of a managed run that replaces those that fail: an elastic team on this host."""

import os
import signal
import subprocess
import threading
from typing import Self, final

from evener.errors import WorkerError
from evener.managed.description import ManagedRun
from evener.managed.processes import JOB_FD, STOP_S, WORKER, worker_environment
from evener.managed.threaded import ThreadedRun, failure_of
from evener.managed.trained import TrainedState
from evener.managed.travel import pack
from evener.team.channel import Message
from evener.team.elastic_launch import ElasticLauncher, ElasticRun, LaunchedTeam, open_team
from evener.team.signals import SignalQueue
from evener.team.supervisor import Child


@final
class ElasticWorkers(ThreadedRun):
    """A run whose workers are replaced when they fail.

    Args:
        job: What to do; its ``elastic`` says how many workers there are.

    Raises:
        ConfigError: A function or the data cannot travel, or a function made no sink.
        LaunchError: The coordinator or a worker could not be started.
    """

    def __init__(self, job: ManagedRun) -> None:
        super().__init__(job)
        self._job = pack(job.parts())
        assert job.elastic is not None
        least, most = job.elastic
        self._devices, self._limits = job.device_names, f"{least}:{most}"
        self._max_failures = job.max_failures
        self._requests = _Requests()
        self._begin()

    def stop(self) -> None:
        """Ask all workers to stop after their micro-batch."""
        self._requests.put(signal.SIGTERM)

    def _end_now(self) -> None:
        self._requests.put(signal.SIGTERM)
        self._requests.put(signal.SIGINT)

    def _run_workers(self) -> None:
        run = ElasticRun(
            limits=self._limits,
            nproc=len(self._devices),
            max_failures=self._max_failures,
            environ=worker_environment(),
            handed={JOB_FD: self._job.fileno()},
        )
        try:
            with self._requests, open_team(run) as team:
                launcher = _ManagedLauncher(self, self._requests, run, team)
                launcher.run_workers()
            if self.error is None and (launcher.is_given_up or self.state is None):
                self.error = launcher.failure(self.state)
        finally:
            self._job.close()

    def has_begun(self) -> None:
        """Let the call that has started the run return."""
        self._started.set()


class _Requests(SignalQueue):
    """What the user's thread wants, in the form of signals; handlers stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._lock = threading.Lock()
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_open = False
            os.close(self._reader)
            os.close(self._writer)

    def put(self, signum: signal.Signals) -> None:
        """Add a request; nobody hears it after the end."""
        with self._lock:
            if self._is_open:
                os.write(self._writer, bytes([signum]))


class _ManagedLauncher(ElasticLauncher):
    """Launches the workers, and hands on what they send."""

    stdin = subprocess.DEVNULL
    _interrupted_again = ""  # who has abandoned the run knows it

    def __init__(
        self, owner: ElasticWorkers, requests: SignalQueue, run: ElasticRun, team: LaunchedTeam
    ) -> None:
        super().__init__(requests, WORKER, run, team)
        self._owner = owner

    def failure(self, state: TrainedState | None) -> WorkerError:
        """Return why the run has not been done to its end; ``state`` is what is left of it."""
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
        also = many if num_failures > self._run.max_failures else ""
        return failure_of(last, last.who, also, state)

    def _decide(self) -> None:
        self._owner.has_begun()
        super()._decide()

    def _take(self, child: Child, message: Message) -> None:
        super()._take(child, message)
        self._owner.take_in(message)
        if "failure" in message:  # others hold the model
            child.channel.tell({"order": "exit"})

    def _stop(self, signum: signal.Signals, where: str = "") -> None:
        self._stop_signal = signum
        self._ask_to_stop(signum)

    def _ask_to_stop(self, signum: signal.Signals) -> None:
        self._set_deadline(STOP_S, f"did not stop within {STOP_S:g} s")
        for child in self._at_work:
            if child.report is None:
                child.channel.tell({"order": "stop"})
