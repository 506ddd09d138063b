"""The worker processes of a managed run, one for each device, and their supervisor."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from evener.errors import WorkerError
from evener.managed.description import ManagedRun
from evener.managed.threaded import ThreadedRun, failure_of
from evener.managed.travel import pack
from evener.team.channel import DONE, JOINED, JOINING, Message
from evener.team.failures import first_failure
from evener.team.supervisor import ANOTHER_PROGRAM, Child, LocalRanks, Supervisor, bind_store

#: Descriptor of the file with the pickled job, in a worker.
JOB_FD: Final = "EVENER_JOB_FD"

#: What a worker runs.
WORKER: Final = (sys.executable, "-P", "-m", "evener.managed.worker")

#: Workers that were asked to stop finish their micro-batch, at most this long.
STOP_S = 60.0
#: When one has failed, the others notice at their next exchange, at most so much later.
SURVIVORS_S = 30.0
#: A survivor sends its copy of the model in this time.
STATE_S = 300.0
#: Whatever the user's program does at exit in a worker, such as sending off logs, gets so long.
LEAVE_S = 60.0
# A worker that has nothing left to do ends at once.
_EXIT_S = 10.0


@final
class WorkerTeam(Supervisor, ThreadedRun):
    """A run on several devices, each with a process of its own: the failure of one ends all.

    Args:
        job: What to do; see ``ThreadedRun``.

    Raises:
        ConfigError: A function or the data cannot travel, or a function made no sink.
        LaunchError: A worker could not be started.
    """

    stdin = subprocess.DEVNULL

    def __init__(self, job: ManagedRun) -> None:
        Supervisor.__init__(self)
        ThreadedRun.__init__(self, job)
        self._job = pack(job.parts())
        self._devices = job.device_names
        self._must_stop = threading.Event()
        self._must_end = threading.Event()
        self._asked: Child | None = None  # for its state
        self._failing = self._leaving = False
        self._begin()

    # ── for the handle ───────────────────────────────────────────────────────────────────────

    @property
    def pids(self) -> tuple[int, ...]:
        """Process of each rank."""
        return tuple(child.pid for child in self.children)

    def stop(self) -> None:
        """Ask all workers to stop after their micro-batch."""
        self._must_stop.set()

    def _end_now(self) -> None:
        self._must_end.set()

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _run_workers(self) -> None:
        nproc = len(self._devices)
        try:
            store = bind_store(None, listen=True)
            ranks = LocalRanks(count=nproc, world_size=nproc, port=store.getsockname()[1])
            self.run(WORKER, ranks, store, worker_environment(), {JOB_FD: self._job.fileno()})
            if self.error is None and self._failing:
                self.error = self._failure()
        finally:
            self._job.close()

    def _take(self, child: Child, message: Message) -> None:
        super()._take(child, message)
        self.take_in(message)

    def _is_hurried(self) -> bool:
        return self._must_end.is_set()

    def _decide(self) -> None:
        self._job.close()  # the workers have it
        self._started.set()
        at_work = self._at_work
        for child in self.children:
            has_left = child.has_ended and child.code == 0 and child.place != DONE
            if has_left and (child.report is None or child.report.is_exit):
                child.desert("ended with exit code 0; its output above may say why")
            elif child in at_work and child.is_another_program:
                child.desert(ANOTHER_PROGRAM)
                child.kill()  # it would neither train nor be told of the end
        if self._must_end.is_set():
            if not self._killed:
                self._kill("ended on request")
        elif self._failing:
            self._wind_up()
        elif self._failed_for_sure():
            self._start_failing()
        elif all(child.place == DONE for child in self.children):
            if not self._leaving:
                self._leaving = True
                self._set_deadline(LEAVE_S, "did not end")
        elif self._must_stop.is_set() and self._deadline is None:
            self._set_deadline(STOP_S, f"did not stop within {STOP_S:g} s")
            self._order("stop", self._alive)

    @property
    def _at_work(self) -> list[Child]:
        """Workers of which more is to come than what they are asked for; not those killed."""
        able = [child for child in self._alive if signal.SIGKILL not in child.signals]
        return [child for child in able if child.place != DONE and child.report is None]

    def _order(self, order: str, children: Sequence[Child]) -> None:
        for child in children:
            child.channel.tell({"order": order})

    # ── when one has failed ──────────────────────────────────────────────────────────────────

    def _start_failing(self) -> None:
        self._failing = True
        self._set_deadline(SURVIVORS_S, "did not notice that another rank had failed")
        for child in self._at_work:
            # One that waits for the others to appear has nothing to lose.
            if child.place in ("", JOINING, JOINED):
                child.kill()
            else:
                self._order("stop", [child])

    def _end_late(self) -> None:
        late = self._at_work
        if self._failing and late:
            for child in late:
                child.kill()
            self._set_deadline(_EXIT_S, "did not end when killed")
        else:
            super()._end_late()

    def _wind_up(self) -> None:
        """Ask a survivor for the model once all have come to rest, and then let all go."""
        if self._leaving or self._at_work:
            return
        if self._asked is None and self.state is None:
            # Those that followed hold a whole model; the one that failed may have been updating it.
            able = [(c.report, c) for c in self._alive if c.report and c.report.steps >= 0]
            able.sort(key=lambda pair: (not pair[0].follow_up, -pair[0].steps, pair[1].rank))
            if able:
                self._asked = able[0][1]
                self._order("send_state", [self._asked])
                self._set_deadline(STATE_S, "did not send the model")
        if self.state is not None or self._asked is None or self._asked.has_ended:
            self._leaving = True
            self._set_deadline(_EXIT_S, "did not end")
            self._order("exit", self._alive)

    def _kill(self, why: str) -> None:
        alive = self._alive
        early = any(child.place != DONE for child in self.children)
        if alive and early and not self._failing and self.error is None:
            names = ", ".join(child.who for child in alive)
            self.error = WorkerError(
                f"{names}: {why}, and killed; what was trained since the last checkpoint is lost",
                rank=alive[0].rank,
                kind=None,
                state=None,
            )
        super()._kill(why)

    def _failure(self) -> WorkerError:
        first = first_failure([child for child in self.children if child.place != DONE])
        assert first is not None
        others = [child.in_short for child in self.children if child.report and child is not first]
        also = f"also ended: {', '.join(others)}" if others else ""
        who = f"rank {first.rank} ({self._devices[first.rank]}, pid {first.pid})"
        return failure_of(first, who, also, self.state)


def worker_environment() -> dict[str, str]:
    """Return what the environment of workers is made from: what is importable here is there."""
    path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    return {**os.environ, "PYTHONPATH": path}
