"""A managed run as its user holds it: metrics as they land, the trained model, stop."""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self, final

from evener.errors import UsageError, WorkerError
from evener.loop.reporting import open_sinks
from evener.managed.job import Job
from evener.managed.metrics import EpochMetrics
from evener.managed.rank import ManagedRank
from evener.managed.trained import TrainedState
from evener.managed.travel import pack
from evener.managed.workers import WorkerTeam
from evener.team.environment import DistributedTrainConfig
from evener.team.signals import OneInterrupt
from evener.team.terminal import say

# An interrupted run gets so long to stop and hand over its state; a second Ctrl-C ends it at once.
_INTERRUPTED_S = 30.0


class Run(ABC):
    """Where a managed run happens: in this thread, or in processes of its own."""

    @abstractmethod
    def next_metrics(self, *, wait: bool) -> EpochMetrics | None:
        """The next epoch; ``None`` at the end, or when there is none yet and it shall not wait."""

    @abstractmethod
    def finish(self, timeout_s: float | None) -> bool:
        """Waits for the end; returns whether it has come."""

    @abstractmethod
    def stop(self) -> None:
        """Asks the run to stop after the micro-batches that are being computed."""

    @abstractmethod
    def abandon(self) -> bool:
        """Ends the run at once, its result unheard; returns whether it was still going on."""

    #: Whether it goes on only while somebody asks for its results.
    is_inline: bool

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether it has ended."""

    @property
    @abstractmethod
    def state(self) -> TrainedState | None:
        """The model at the end."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What ended the run early."""


@final
class InlineRun(Run):
    """A run on one device, in the thread that asks for its results."""

    is_inline = True

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rank: ManagedRank | None = None
        self._epochs: Iterator[EpochMetrics] | None = None
        self._stop = threading.Event()
        self._done = False
        self._state: TrainedState | None = None
        self._error: BaseException | None = None

    def next_metrics(self, *, wait: bool) -> EpochMetrics | None:
        """Trains the next epoch, whether or not it shall wait: nobody else would."""
        if self._done:
            return None
        try:
            metrics = self._train()
        except Exception as error:
            self._end(error)
            self._error = WorkerError(
                f"rank 0 ({self._job.devices[0]}) failed: {type(error).__name__}: {error}",
                rank=0,
                kind=type(error).__name__,
                state=self._state,
            )
            self._error.__cause__ = error
            return None
        except BaseException:
            self._end()
            raise
        if metrics is None:
            self._end()
        elif self._job.metrics_fn is not None:
            try:
                self._job.metrics_fn(metrics)
            except BaseException as error:
                self._end()
                self._error = error
        return metrics

    def _train(self) -> EpochMetrics | None:
        if self._epochs is None:
            self._rank = ManagedRank(
                self._job,
                environment=DistributedTrainConfig(),
                stop_when=self._stop.is_set,
                sinks=self._job.sinks,
            )
            self._epochs = self._rank.train()
        with OneInterrupt(self._stop.set) as interrupt:
            metrics = next(self._epochs, None)
            while interrupt.came and next(self._epochs, None) is not None:
                pass  # what is left of a run that stops
        if interrupt.came:
            raise KeyboardInterrupt
        return metrics

    def _end(self, error: Exception | None = None) -> None:
        self._done = True
        if self._rank is not None:
            self._rank.close(error)
            self._state = self._rank.state()
        self._rank = self._epochs = None

    def finish(self, timeout_s: float | None) -> bool:
        """Trains to the end."""
        while not self._done:
            self.next_metrics(wait=True)
        return True

    def stop(self) -> None:
        """Heard after each micro-batch."""
        self._stop.set()

    def abandon(self) -> bool:
        """Leaves the model as it is."""
        unheard = not self._done
        self._done = True
        if self._rank is not None:
            self._rank.close()
        self._rank = self._epochs = None
        return unheard

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done

    @property
    def state(self) -> TrainedState | None:
        """The model at the end."""
        return self._state

    @property
    def error(self) -> BaseException | None:
        """What ended the run early."""
        return self._error


@final
class WorkersRun(Run):
    """A run on several devices, each with a process of its own."""

    is_inline = False

    def __init__(self, job: Job) -> None:
        parts, sink = pack(job.parts()), open_sinks(job.sinks)
        self._team = WorkerTeam(parts, job.devices, job.metrics_fn, sink)
        try:
            self._team.start()
        except BaseException:  # a Ctrl-C: nobody would know of the workers
            self._team.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process of each rank."""
        return self._team.pids

    def next_metrics(self, *, wait: bool) -> EpochMetrics | None:
        """Takes what the workers have sent."""
        self._check_thread()
        metrics = None
        with suppress(queue.Empty):
            metrics = self._team.metrics.get(block=wait)
            if metrics is None:
                self._team.metrics.put(None)  # for whoever asks next
        return metrics

    def finish(self, timeout_s: float | None) -> bool:
        """Waits for all workers."""
        self._check_thread()
        return self._team.wait(timeout_s)

    def _check_thread(self) -> None:
        if self._team.is_own_thread:
            raise UsageError(
                "metrics_fn waits for the run that it is called by; call handle.stop() there, and "
                "join(), metrics() and poll_metrics() elsewhere"
            )

    def stop(self) -> None:
        """Tells every worker."""
        self._team.stop()

    def abandon(self) -> bool:
        """Kills the workers."""
        unheard = not self.is_done
        self._team.kill()
        self._team.wait(None)
        return unheard

    @property
    def is_done(self) -> bool:
        """Whether all workers have ended."""
        return self._team.wait(0) if not self._team.is_own_thread else False

    @property
    def state(self) -> TrainedState | None:
        """The model at the end."""
        return self._team.state

    @property
    def error(self) -> BaseException | None:
        """What ended the run early."""
        return self._team.error


@final
class DdpHandle:
    """A managed run that has been started by ``DdpBuilder.run``.

    With several devices it goes on in worker processes, whatever this process does. With one
    device nothing happens by itself: ``join``, ``metrics`` and ``poll_metrics`` train, in the
    thread that calls them. As a context manager, it stops and joins at the end of the block.

    A run must be joined. When its handle goes away before, or the script ends, its workers are
    ended and a line on standard error says so.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._heard = False
        self._finalizer = weakref.finalize(self, _abandon, run)

    def metrics(self) -> Iterator[EpochMetrics]:
        """Yields each epoch's metrics as they land; ends with the run.

        Epochs are handed out once, here or by ``poll_metrics``. A Ctrl-C stops the run.

        Raises:
            WorkerError: As ``join`` does.
        """
        while True:
            try:
                metrics = self._run.next_metrics(wait=True)
            except KeyboardInterrupt:
                self._interrupted()
                raise
            if metrics is None:
                self._check()
                return
            yield metrics

    def poll_metrics(self) -> list[EpochMetrics]:
        """The epochs that have landed since the last call, without waiting.

        With one device, where nothing happens in the background, it trains one epoch.
        """
        landed = []
        while (metrics := self._run.next_metrics(wait=False)) is not None:
            landed.append(metrics)
            if self._run.is_inline:
                break
        return landed

    def join(self, timeout_s: float | None = None) -> TrainedState:
        """Waits for the end of the run; a Ctrl-C stops it.

        Args:
            timeout_s: Longest wait, with several devices; ``None`` waits for the end.

        Returns:
            The trained model; that of a stopped run as far as it had got.

        Raises:
            WorkerError: A worker failed; its cause shows where. What is left of the model is its
                ``state``.
            TimeoutError: The run has not ended in time; it goes on.
        """
        try:
            ended = self._run.finish(timeout_s)
        except KeyboardInterrupt:
            self._interrupted()
            raise
        if not ended:
            raise TimeoutError(
                f"the run has not ended within {timeout_s:g} s; join again, or stop() it"
            )
        self._check()
        state = self._run.state
        assert state is not None  # a run without an error has one
        return state

    def stop(self) -> None:
        """Asks the run to stop; returns at once, ``join`` waits for it.

        Every rank leaves after the micro-batch that it is computing. The window of that moment is
        dropped, so that the model is that of whole optimizer steps.
        """
        self._run.stop()

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return self._run.is_done

    @property
    def state(self) -> TrainedState | None:
        """The model after the run; ``None`` before its end, and when nothing is left of it.

        After a failure or a Ctrl-C it is what a surviving rank held: the model after its last
        whole optimizer step. Where every rank failed, it is what one of them held when it did.
        """
        return self._run.state if self._run.is_done else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._heard:
            return
        self._run.stop()
        if error is None:
            self.join()
        else:
            self._interrupted()

    def _interrupted(self) -> None:
        """Ends the run on the way out of an exception, which must not be replaced by another."""
        self._run.stop()
        try:
            if not self._run.finish(_INTERRUPTED_S):
                self._run.abandon()
        except BaseException:
            self._run.abandon()
            raise
        finally:
            self._heard = True
            self._finalizer.detach()

    def _check(self) -> None:
        self._heard = True
        self._finalizer.detach()
        if self._run.error is not None:
            raise self._run.error


def _abandon(run: Run) -> None:
    if run.abandon():
        say(
            "evener: a managed run was not joined: it has been ended and its result is lost; call "
            "handle.join(), or use the handle as a context manager"
        )
    elif run.error is not None:
        say(f"evener: a managed run that was not joined had failed: {run.error}")
