"""A managed run as its user holds it: metrics as they land, the trained model, stop."""

import signal
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from html import escape
from typing import Self, final

from evener.errors import WorkerError
from evener.managed.description import ManagedRun
from evener.managed.epoch_metrics import EpochMetrics
from evener.managed.rank import ManagedRank
from evener.managed.trained import TrainedState
from evener.team.environment import DistributedTrainConfig
from evener.team.signals import StopSignals
from evener.team.terminal import say

# An interrupted run gets so long to stop and hand over its state; a second Ctrl-C ends it at once.
_INTERRUPTED_S = 30.0


class Run(ABC):
    """Where a managed run happens: in this thread, or in processes of its own.

    Attributes:
        state: The model at the end.
        error: What ended the run early.
    """

    state: TrainedState | None = None
    error: BaseException | None = None

    @abstractmethod
    def next_metrics(self) -> EpochMetrics | None:
        """Wait for the next epoch; return ``None`` at the end."""

    @abstractmethod
    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the epochs that have landed since the last call."""

    @abstractmethod
    def finish(self, timeout_s: float | None) -> bool:
        """Wait for the end; return whether it has come."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the run to stop after the micro-batches that are being computed."""

    @abstractmethod
    def abandon(self) -> bool:
        """End the run at once, without its result; return whether it was still running."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether it has ended."""


@final
class InlineRun(Run):
    """A run on one device, in the thread that asks for its results."""

    def __init__(self, job: ManagedRun) -> None:
        self._job = job
        self._epochs = self._train()
        self._stop = threading.Event()
        self._interrupt = StopSignals([signal.SIGINT])
        self._done = False

    def next_metrics(self) -> EpochMetrics | None:
        """Train the next epoch: nobody else would."""
        if self._done:
            return None
        # The first Ctrl-C is a request, so that it breaks off no optimizer step.
        with StopSignals([signal.SIGINT], max_interrupts=1) as self._interrupt:
            metrics = next(self._epochs, None)
            while self._interrupt.requested and next(self._epochs, None) is not None:
                pass  # what is left of a run that stops
        if self._interrupt.requested and self.error is None:
            raise KeyboardInterrupt
        try:
            if metrics is not None and self._job.metrics_fn is not None:
                self._job.metrics_fn(metrics)
        except BaseException as error:
            self._epochs.close()
            self.error = error
        return metrics

    def _train(self) -> Generator[EpochMetrics, None, None]:
        rank, failure = None, None
        try:
            rank = ManagedRank(
                self._job,
                environment=DistributedTrainConfig(),
                stop_when=self._is_stopped,
                sinks=self._job.sinks,
            )
            yield from rank.train()
        except Exception as error:
            failure = error
        finally:
            self._done = True
            if rank is not None:
                rank.close(failure)
                self.state = rank.state()
        if failure is not None:
            kind = type(failure).__name__
            text = f"rank 0 ({self._job.device_names[0]}) failed: {kind}: {failure}"
            self.error = WorkerError(text, rank=0, kind=kind, state=self.state)
            self.error.__cause__ = failure

    def _is_stopped(self) -> bool:
        return self._stop.is_set() or self._interrupt.requested is not None

    def poll_metrics(self) -> list[EpochMetrics]:
        """Train one epoch."""
        metrics = self.next_metrics()
        return [] if metrics is None else [metrics]

    def finish(self, timeout_s: float | None) -> bool:
        """Train to the end."""
        while not self._done:
            self.next_metrics()
        return True

    def stop(self) -> None:
        """Stop after the micro-batch that is being computed."""
        self._stop.set()

    def abandon(self) -> bool:
        """Leave the model as it is."""
        unheard, self._done = not self._done, True
        self._epochs.close()
        return unheard

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done


@final
class DdpHandle:
    """A managed run that has been started by ``DdpBuilder.run``.

    With several devices it continues in worker processes, whatever this process does. With one
    device nothing happens by itself: ``join``, ``metrics`` and ``poll_metrics`` train, in the
    thread that calls them. As a context manager, it stops and joins at the end of the block.

    A run must be joined. When its handle goes away before, or the script ends, its workers are
    ended and a line on standard error says so.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._heard = False
        self._newest: EpochMetrics | None = None  # that was handed out
        self._finalizer = weakref.finalize(self, _abandon, run)

    def metrics(self) -> Iterator[EpochMetrics]:
        """Yield each epoch's metrics as they land; end with the run.

        Epochs are handed out once, here or by ``poll_metrics``. A Ctrl-C stops the run.

        Raises:
            WorkerError: As ``join`` does.
        """
        while True:
            try:
                metrics = self._run.next_metrics()
            except KeyboardInterrupt:
                self._interrupted()
                raise
            if metrics is None:
                self._check()
                return
            self._newest = metrics
            yield metrics

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the epochs that have landed since the last call, without waiting.

        With one device, where nothing happens in the background, it trains one epoch.
        """
        landed = self._run.poll_metrics()
        self._newest = landed[-1] if landed else self._newest
        return landed

    def join(self, timeout_s: float | None = None) -> TrainedState:
        """Wait for the end of the run; a Ctrl-C stops it.

        Args:
            timeout_s: Longest wait, with several devices; ``None`` waits for the end.

        Returns:
            The trained model; that of a stopped run as far as it had got.

        Raises:
            WorkerError: A worker failed; its cause shows where. What is left of the model is its
                ``state``.
            TimeoutError: The run has not ended in time; it continues.
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
        """Ask the run to stop; return at once, ``join`` waits for it.

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

    def __repr__(self) -> str:
        state = "running"
        if self._run.is_done:
            state = "ended" if self._run.error is None else f"failed ({self._run.error})"
        known = self._newest
        told = f", epoch {known.epoch} with loss {known.avg_loss:.4g}" if known else ""
        return f"<DdpHandle: {state}{told}>"

    def _repr_html_(self) -> str:
        """Return its state, and the epoch that was handed out last."""
        table = self._newest._repr_html_() if self._newest else ""
        return f"<p>{escape(repr(self))}</p>{table}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._heard:
            return
        self._run.stop()
        if error is None:
            self.join()
        else:
            self._interrupted()

    def _interrupted(self) -> None:
        """End the run on the way out of an exception, which must not be replaced by another."""
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
