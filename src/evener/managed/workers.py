"""Starts a worker process for each device of a managed run, listens to all, ends them together."""

import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from evener.data.workers import RemoteTraceback
from evener.errors import LaunchError, UsageError, WorkerError
from evener.loop.reporting import open_sinks
from evener.managed.channel import Message
from evener.managed.handle import Run
from evener.managed.job import Job
from evener.managed.metrics import EpochMetrics
from evener.managed.spawning import Worker, start_worker
from evener.managed.trained import unpack_trained
from evener.managed.travel import pack
from evener.team.failures import FailureReport
from evener.team.launch import (
    ANOTHER_PROGRAM,
    kill_group,
    start_lifeline,
    still_runs,
    tell_lifeline,
)
from evener.team.output import OutputPump
from evener.team.ranks import LocalRanks, bind_store, rank_environment
from evener.team.verdict import Outcome, first_failure, silent_end

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
# One that lost its peer may say so while the peer still unwinds from what really happened.
_SETTLE_S = 2.0
_LOOK_S = 0.1


@final
class WorkerTeam(Run):
    """A run on several devices, each with a process of its own, and a thread that looks after them.

    The thread also starts them: the kernel ends a worker together with the thread that started it.

    Args:
        job: What to do; its ``metrics_fn`` and its sinks are called on the thread.

    Raises:
        ConfigError: A function or the data cannot travel, or a function made no sink.
        LaunchError: A worker could not be started.
    """

    def __init__(self, job: Job) -> None:
        self._job = pack(job.parts())
        self._sink = open_sinks(job.sinks)
        self._metrics: queue.SimpleQueue[EpochMetrics | None] = queue.SimpleQueue()
        self._devices = job.devices
        self._on_metrics = job.metrics_fn
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._lifeline: subprocess.Popen[bytes] | None = None
        self._pump: OutputPump | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._stop = threading.Event()
        self._kill = threading.Event()
        self._deadline: float | None = None  # on the monotonic clock
        self._deadline_means = ""
        self._settles_at: float | None = None
        self._asked: Worker | None = None  # for its state
        self._failing = self._leaving = self._killed = False
        self._thread = threading.Thread(target=self._run, name="evener-workers", daemon=True)
        try:
            self._thread.start()
            self._started.wait()
        except BaseException:  # a Ctrl-C: nobody would know of the workers
            self._kill.set()
            raise
        if isinstance(self.error, LaunchError):
            self._ended.wait()
            raise self.error

    # ── for the handle ───────────────────────────────────────────────────────────────────────

    @property
    def pids(self) -> tuple[int, ...]:
        """Process of each rank."""
        return tuple(worker.process.pid for worker in self._workers)

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
        self._stop.set()

    def abandon(self) -> bool:
        """Kill the workers; return whether they were still at work."""
        unheard = not self.is_done
        self._kill.set()
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

    def _run(self) -> None:
        try:
            self._start_all()
            self._started.set()
            self._watch()
            self._conclude()
        except BaseException as error:
            self.error = error  # raised where the run is joined
        finally:
            self._end_all()
            self._sink.close()
            self._started.set()
            self._metrics.put(None)
            self._ended.set()

    def _start_all(self) -> None:
        nproc = len(self._devices)
        sys.stdout.flush()
        sys.stderr.flush()
        with self._job, bind_store(None, listen=True) as store:
            ranks = LocalRanks(count=nproc, world_size=nproc, port=store.getsockname()[1])
            self._lifeline = start_lifeline()
            for rank, device in enumerate(self._devices):
                environ = rank_environment(os.environ, ranks, rank)
                # What is importable here has to be importable there.
                environ["PYTHONPATH"] = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
                store_fd = store.fileno() if rank == 0 else None
                worker = start_worker(rank, device, environ, self._job.fileno(), store_fd)
                self._workers.append(worker)
                self._selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
                tell_lifeline(self._lifeline, "+", worker.process.pid)
        self._pump = OutputPump(
            [
                (f"[rank {worker.rank}] ".encode(), source, target)
                for worker in self._workers
                for source, target in ((worker.process.stdout, 1), (worker.process.stderr, 2))
                if source is not None
            ]
        )
        self._pump.start()

    def _watch(self) -> None:
        while alive := [w for w in self._workers if w.outcome is None]:
            for key, _ in self._selector.select(_LOOK_S):
                self._listen(key.data)
            for worker in alive:
                self._look_after(worker)
            if self._kill.is_set():
                self._kill_all("ended on request")
            elif self._failing:
                self._wind_up()
            elif self._failed_for_sure():
                self._start_failing()
            elif all(w.is_done for w in self._workers):
                if not self._leaving:
                    self._leaving = True
                    self._set_deadline(LEAVE_S, "did not end")
            elif self._stop.is_set() and self._deadline is None:
                self._set_deadline(STOP_S, f"did not stop within {STOP_S:g} s")
                for worker in alive:
                    worker.tell("stop")
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._killed:
                    break  # it hangs in the kernel
                self._end_what_is_late()

    def _listen(self, worker: Worker) -> bool:
        """Takes what a worker has sent; False when nothing is there, or it has hung up."""
        try:
            messages = worker.channel.receive(wait=False)
        except BlockingIOError:
            return False
        for message in messages or ():
            self._take(worker, message)
        if messages is None:
            self._selector.unregister(worker.channel.socket)
            worker.channel.close()
        return messages is not None

    def _take(self, worker: Worker, message: Message) -> None:
        if message.kind == "ready":
            worker.is_ready = True
        elif message.kind == "done":
            worker.is_done = True
        elif message.kind == "metrics":
            self._publish(EpochMetrics.from_document(message.document))
        elif message.kind == "event":
            self._sink.emit(message.document)
        elif message.kind == "state":
            self.state = unpack_trained(message.document, message.payload)
        elif message.kind == "failed":
            worker.report = FailureReport(**message.document["report"])
            worker.steps = message.document["steps"]

    def _publish(self, metrics: EpochMetrics) -> None:
        self._metrics.put(metrics)
        if self._on_metrics is None or self.error is not None:
            return
        try:
            self._on_metrics(metrics)
        except BaseException as error:
            self.error = error  # the user's own, to be raised where the run is joined
            self.stop()

    def _look_after(self, worker: Worker) -> None:
        code = worker.process.poll()
        if code is None:
            hung_up = worker.channel.socket.fileno() < 0 and not worker.has_ended_work
            if hung_up and not worker.desertion and still_runs(worker.process.pid):
                worker.desertion = ANOTHER_PROGRAM
                worker.kill()
            return
        kill_group(worker.process.pid)  # what it has started and not ended
        if self._lifeline is not None:
            tell_lifeline(self._lifeline, "-", worker.process.pid)
        while worker.channel.socket.fileno() >= 0 and self._listen(worker):
            pass  # its last words
        worker.outcome = Outcome(
            rank=worker.rank,
            pid=worker.process.pid,
            code=code,
            time=time.time(),
            report=worker.report,
            signals=frozenset(worker.signals),
            desertion=worker.desertion,
        )

    # ── when one has failed ──────────────────────────────────────────────────────────────────

    def _failed_for_sure(self) -> bool:
        follow_ups = 0
        for worker in self._workers:
            if worker.report is not None and worker.report.follow_up:
                follow_ups += 1
            elif worker.report is not None or (worker.outcome is not None and not worker.is_done):
                return True
        if not follow_ups:
            return False
        self._settles_at = self._settles_at or time.monotonic() + _SETTLE_S
        return time.monotonic() >= self._settles_at

    def _start_failing(self) -> None:
        self._failing = True
        self._set_deadline(SURVIVORS_S, "did not notice that another rank had failed")
        for worker in self._workers:
            if worker.has_ended_work:
                continue
            if worker.is_ready:
                worker.tell("stop")
            else:
                worker.kill()  # it waits for the others to appear, and has nothing to lose

    def _end_what_is_late(self) -> None:
        late = [w for w in self._workers if not w.has_ended_work]
        if self._failing and late:
            for worker in late:
                worker.kill()
            self._set_deadline(_EXIT_S, "did not end when killed")
        else:
            self._kill_all(self._deadline_means)

    def _wind_up(self) -> None:
        """Asks a survivor for the model once all have come to rest, and then lets all go."""
        if self._leaving or not all(w.has_ended_work for w in self._workers):
            return
        if self._asked is None and self.state is None:
            # Those that followed hold a whole model; the one that failed may have been updating it.
            able = [w for w in self._workers if w.outcome is None and w.report and w.steps >= 0]
            order = sorted(
                able, key=lambda w: (not (w.report and w.report.follow_up), -w.steps, w.rank)
            )
            if order:
                self._asked = order[0]
                self._asked.tell("send_state")
                self._set_deadline(STATE_S, "did not send the model")
        if self.state is not None or self._asked is None or self._asked.outcome is not None:
            self._leaving = True
            self._set_deadline(_EXIT_S, "did not end")
            for worker in self._workers:
                worker.tell("exit")

    def _set_deadline(self, seconds: float, means: str) -> None:
        self._deadline, self._deadline_means = time.monotonic() + seconds, means

    def _kill_all(self, why: str) -> None:
        alive = [w for w in self._workers if w.outcome is None]
        early = any(not w.is_done for w in self._workers)
        if alive and early and not self._failing and self.error is None:
            names = ", ".join(f"rank {w.rank} (pid {w.process.pid})" for w in alive)
            self.error = WorkerError(
                f"{names}: {why}, and killed; what was trained since the last checkpoint is lost",
                rank=alive[0].rank,
                kind=None,
                state=None,
            )
        for worker in alive:
            worker.kill()
        if not self._killed:
            self._killed = True
            self._set_deadline(_EXIT_S, why)

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _conclude(self) -> None:
        outcomes = [w.outcome for w in self._workers if w.outcome is not None]
        if self.error is None and self._failing:
            self.error = self._failure(outcomes)

    def _failure(self, outcomes: Sequence[Outcome]) -> WorkerError:
        first = first_failure(outcomes)
        # One may leave with exit code 0, by sys.exit or without a word: no failure of a process.
        left = [w.outcome for w in self._workers if w.outcome and w.outcome.code == 0]
        left = [o for o in left if not o.report or o.report.is_exit]
        left = [o for o in left if not self._workers[o.rank].is_done]
        if left and (first is None or (first.report is not None and first.report.follow_up)):
            first = left[0]
        assert first is not None
        device = self._devices[first.rank]
        others = [f"rank {o.rank} ({o.report.kind})" for o in outcomes if o.report and o != first]
        if first.report is not None:
            head = f"rank {first.rank} ({device}, pid {first.pid}) failed"
            text = f"{head}: {first.report.kind}: {first.report.message}"
        else:
            text = silent_end(first)
        if others:
            text += f"; also ended: {', '.join(others)}"
        if self.state is not None:
            text += f"; handle.state holds the model after step {self.state.progress.steps}"
        error = WorkerError(
            text,
            rank=first.rank,
            kind=first.report.kind if first.report else None,
            state=self.state,
        )
        if first.report is not None:
            error.__cause__ = RemoteTraceback(first.report.traceback)
        return error

    def _end_all(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                kill_group(worker.process.pid)
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_EXIT_S)
            worker.channel.close()
        self._selector.close()
        if self._pump is not None:
            self._pump.finish(_EXIT_S)
        for worker in self._workers:
            for source in (worker.process.stdout, worker.process.stderr):
                if source is not None:
                    source.close()
        if self._lifeline is not None:
            with suppress(subprocess.TimeoutExpired):
                self._lifeline.communicate(timeout=_EXIT_S)
