"""A managed run in processes of its own, as seen by the process that has started it."""

import threading
from abc import abstractmethod

from evener.data.fetching import RemoteTraceback
from evener.errors import LaunchError, UsageError, WorkerError
from evener.loop.event_stream import open_sinks
from evener.managed.description import ManagedRun
from evener.managed.epoch_metrics import EpochMetrics
from evener.managed.handle import Run
from evener.managed.trained import TrainedState, unpack_trained
from evener.team.channel import Message
from evener.team.failures import RankRecord


class ThreadedRun(Run):
    """A run whose workers a thread looks after.

    The thread also starts them: the kernel ends a worker together with the thread that started it.

    Args:
        job: What to do; its ``metrics_fn`` and its sinks are called on the thread.

    Raises:
        ConfigError: A function made no sink.
    """

    def __init__(self, job: ManagedRun) -> None:
        super().__init__(job)
        self._sink = open_sinks(job.event_sinks)
        self._last_epoch = -1
        self._on_metrics = job.metrics_fn
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="evener-workers", daemon=True)

    def _begin(self) -> None:
        """Start the thread, and wait until it has started the workers.

        Raises:
            LaunchError: A worker could not be started.
        """
        try:
            self._thread.start()
            self._started.wait()
        except BaseException:  # a Ctrl-C: nobody would know of the workers
            self._end_now()
            raise
        if isinstance(self.error, LaunchError):
            self._ended.wait()
            raise self.error

    # ── for a leaf ───────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _run_workers(self) -> None:
        """Start the workers and look after them until all have ended; on the thread."""

    @abstractmethod
    def _end_now(self) -> None:
        """Let ``_run_workers`` kill the workers."""

    # ── for the handle ───────────────────────────────────────────────────────────────────────

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
        unheard = not self.is_done
        self._end_now()
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
        try:
            self._run_workers()
        except BaseException as error:
            self.error = error  # raised where the run is joined
        finally:
            self._sink.close()
            self._started.set()
            self._metrics.put(None)
            self._ended.set()

    def take_in(self, message: Message) -> None:
        """Take in what a worker has sent."""
        if "metrics" in message:
            self._publish(EpochMetrics.from_document(message["metrics"]))
        elif "event" in message:
            self._sink.emit(message["event"])
        elif "state" in message:
            self.state = unpack_trained(message["state"], message.get("payload", bytearray()))

    def _publish(self, metrics: EpochMetrics) -> None:
        if metrics.epoch <= self._last_epoch:  # another worker has sent it
            return
        self._last_epoch = metrics.epoch
        self._metrics.put(metrics)
        if self._on_metrics is None or self.error is not None:
            return
        try:
            self._on_metrics(metrics)
        except BaseException as error:
            self.error = error  # the user's own, to be raised where the run is joined
            self.stop()


def failure_of(first: RankRecord, who: str, also: str, state: TrainedState | None) -> WorkerError:
    """Return the error of a run that a worker has ended.

    Args:
        first: The worker whose failure counts.
        who: What it is called.
        also: What else is to be said.
        state: What is left of the model.
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
