"""The worker processes of a managed run, one for each device, and their supervisor."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from evener.data.workers import RemoteTraceback
from evener.errors import LaunchError, UsageError, WorkerError
from evener.loop.reporting import open_sinks
from evener.managed.description import ManagedRun
from evener.managed.epoch_metrics import EpochMetrics
from evener.managed.handle import Run
from evener.managed.trained import unpack_trained
from evener.managed.travel import pack
from evener.team.channel import DONE, JOINED, JOINING, Message
from evener.team.failures import first_failure
from evener.team.supervisor import ANOTHER_PROGRAM, Child, LocalRanks, Supervisor, bind_store

#: Descriptor of the file with the pickled job, in a worker.
JOB_FD: Final = "EVENER_JOB_FD"

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
class WorkerTeam(Supervisor, Run):
    """A run on several devices, each with a process of its own, and a thread that looks after them.

    The thread also starts them: the kernel ends a worker together with the thread that started it.

    Args:
        job: What to do; its ``metrics_fn`` and its sinks are called on the thread.

    Raises:
        ConfigError: A function or the data cannot travel, or a function made no sink.
        LaunchError: A worker could not be started.
    """

    stdin = subprocess.DEVNULL

    def __init__(self, job: ManagedRun) -> None:
        super().__init__()
        self._job = pack(job.parts())
        self._sink = open_sinks(job.sinks)
        self._metrics: queue.SimpleQueue[EpochMetrics | None] = queue.SimpleQueue()
        self._devices = job.device_names
        self._on_metrics = job.metrics_fn
        self._started = threading.Event()
        self._ended = threading.Event()
        self._must_stop = threading.Event()
        self._must_end = threading.Event()
        self._asked: Child | None = None  # for its state
        self._failing = self._leaving = False
        self._thread = threading.Thread(target=self._work, name="evener-workers", daemon=True)
        try:
            self._thread.start()
            self._started.wait()
        except BaseException:  # a Ctrl-C: nobody would know of the workers
            self._must_end.set()
            raise
        if isinstance(self.error, LaunchError):
            self._ended.wait()
            raise self.error

    # ── for the handle ───────────────────────────────────────────────────────────────────────

    @property
    def pids(self) -> tuple[int, ...]:
        """Process of each rank."""
        return tuple(child.pid for child in self.children)

    def next_metrics(self) -> EpochMetrics | None:
        """Wait for the next epoch; return ``None`` at the end."""
        self._check_thread()
        metrics = self._metrics.get()
        if metrics is None:
            self._metrics.put(None)  # for whoever asks next
        return metrics

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the epochs that the workers have sent."""
        self._check_thread()
        landed = []
        with suppress(queue.Empty):
            while (metrics := self._metrics.get_nowait()) is not None:
                landed.append(metrics)
            self._metrics.put(None)
        return landed

    def finish(self, timeout_s: float | None) -> bool:
        """Wait until all workers have ended; return whether they have."""
        self._check_thread()
        if not self._ended.wait(timeout_s):
            return False
        self._thread.join()
        return True

    def stop(self) -> None:
        """Ask all workers to stop after their micro-batch."""
        self._must_stop.set()

    def abandon(self) -> bool:
        """Kill the workers; return whether they were still at work."""
        unheard = not self.is_done
        self._must_end.set()
        self.finish(None)
        return unheard

    @property
    def is_done(self) -> bool:
        """Whether all workers have ended."""
        return self._ended.is_set()

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(
                "metrics_fn waits for the run that it is called by; call handle.stop() there, and "
                "join(), metrics() and poll_metrics() elsewhere"
            )

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        command = [sys.executable, "-P", "-m", "evener.managed.worker"]
        # What is importable here has to be importable there.
        path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
        nproc = len(self._devices)
        try:
            store = bind_store(None, listen=True)
            ranks = LocalRanks(count=nproc, world_size=nproc, port=store.getsockname()[1])
            handed = {JOB_FD: self._job.fileno()}
            self.run(command, ranks, store, {**os.environ, "PYTHONPATH": path}, handed)
            if self.error is None and self._failing:
                self.error = self._failure()
        except BaseException as error:
            self.error = error  # raised where the run is joined
        finally:
            self._job.close()
            self._sink.close()
            self._started.set()
            self._metrics.put(None)
            self._ended.set()

    def _take(self, child: Child, message: Message) -> None:
        super()._take(child, message)
        if "metrics" in message:
            self._publish(EpochMetrics.from_document(message["metrics"]))
        elif "event" in message:
            self._sink.emit(message["event"])
        elif "state" in message:
            self.state = unpack_trained(message["state"], message.get("payload", bytearray()))

    def _publish(self, metrics: EpochMetrics) -> None:
        self._metrics.put(metrics)
        if self._on_metrics is None or self.error is not None:
            return
        try:
            self._on_metrics(metrics)
        except BaseException as error:
            self.error = error  # the user's own, to be raised where the run is joined
            self.stop()

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
        report = first.report
        if report is not None:
            who = f"rank {first.rank} ({self._devices[first.rank]}, pid {first.pid})"
            text = f"{who} failed: {report.kind}: {report.message}"
        else:
            text = first.silent_end
        others = [child.in_short for child in self.children if child.report and child is not first]
        if others:
            text += f"; also ended: {', '.join(others)}"
        if self.state is not None:
            text += f"; handle.state holds the model after step {self.state.progress.steps}"
        kind = report.kind if report else None
        error = WorkerError(text, rank=first.rank, kind=kind, state=self.state)
        if report is not None:
            error.__cause__ = RemoteTraceback(report.traceback)
        return error
