"""The user's handle to a managed run: metrics, the trained model, stop."""

import queue
import signal
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import suppress
from html import escape
from typing import Self, final

from evener.errors import RunEndedError, WorkerError
from evener.managed.description import ManagedRun
from evener.managed.epoch_metrics import EpochMetrics
from evener.managed.rank import ManagedRank
from evener.managed.trained import TrainedState
from evener.team.environment import DistributedTrainConfig
from evener.team.signals import StopSignals
from evener.team.terminal import say

# Time for an interrupted run to stop and send its state; a second Ctrl-C ends it at once.
_INTERRUPTED_S = 30.0


class Run(ABC):
    """Executes a managed run: in this thread, or in separate processes.

    Args:
        job: What to do.

    Attributes:
        job: The same.
        state: The model at the end.
        error: What ended the run early.
    """

    state: TrainedState | None = None
    error: BaseException | None = None

    def __init__(self, job: ManagedRun) -> None:
        self.job = job
        #: Epochs that have ended; ``None`` at the end of the run.
        self._metrics: queue.SimpleQueue[EpochMetrics | None] = queue.SimpleQueue()

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank."""
        return self.job.device_names

    def next_metrics(self, timeout_s: float | None) -> EpochMetrics | None:
        """Wait for the next epoch; return ``None`` at the end.

        Raises:
            queue.Empty: No epoch has ended in time.
        """
        metrics = self._metrics.get(timeout=timeout_s)
        if metrics is None:
            self._metrics.put(None)  # for the next call
        return metrics

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the epochs that have ended since the last call."""
        landed = []
        with suppress(queue.Empty):
            while (metrics := self._metrics.get_nowait()) is not None:
                landed.append(metrics)
            self._metrics.put(None)
        return landed

    def _publish(self, metrics: EpochMetrics, *, is_main: bool = True) -> None:
        self._metrics.put(metrics)
        if is_main and self.job.metrics_fn is not None and self.error is None:
            try:
                self.job.metrics_fn(metrics)
            except BaseException as error:
                self.error = error  # of the user's function; ``join`` raises it
                self.stop()

    @abstractmethod
    def finish(self, timeout_s: float | None) -> bool:
        """Wait for the end; return whether the run has ended."""

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
    """A run of one rank, in the thread that asks for its results.

    A program that only polls would never train, so the first poll moves the run to a thread.

    Args:
        job: What to do.
        place: This process's place in a launched team, which it joins at once; ``None`` for a run
            on one device.

    Raises:
        ConfigError: The ranks of the team differ, or a function returned a wrong type.
        LaunchError: The ranks did not find one another.
    """

    def __init__(self, job: ManagedRun, place: DistributedTrainConfig | None = None) -> None:
        super().__init__(job)
        self._place = place or DistributedTrainConfig()
        self._epochs = self._train()
        self._stop = threading.Event()
        self._interrupt = StopSignals([signal.SIGINT])
        self._done = False
        self._thread: threading.Thread | None = None
        self._rank = None if place is None else self._join_team()

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank."""
        return super().devices if self._rank is None else self._rank.ddp.devices

    def next_metrics(self, timeout_s: float | None) -> EpochMetrics | None:
        """Train the next epoch in this thread, unless the metrics of one are waiting."""
        if self._thread is None and not self._done and self._metrics.empty():
            self._train_epoch()
        return super().next_metrics(timeout_s)

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the epochs that have ended; the rest of the run continues in a thread."""
        if self._thread is None and not self._done:
            self._thread = threading.Thread(target=self._train_all, name="evener-run", daemon=True)
            self._thread.start()
        return super().poll_metrics()

    def _train_all(self) -> None:
        while not self._done:
            self._train_epoch()

    def _train_epoch(self) -> None:
        # The first Ctrl-C is a request, so that it does not interrupt an optimizer step.
        with StopSignals([signal.SIGINT], max_interrupts=1) as self._interrupt:
            metrics = next(self._epochs, None)
            while self._interrupt.requested and next(self._epochs, None) is not None:
                pass  # run a stopping run to its end
        try:
            if self._interrupt.requested and self.error is None:
                raise KeyboardInterrupt
            if metrics is not None:
                self._publish(metrics, is_main=self._rank is None or self._rank.ddp.is_main_process)
                if self.error is not None:
                    self._epochs.close()
        finally:
            if self._done:
                self._metrics.put(None)

    def _join_team(self) -> ManagedRank:
        return ManagedRank(
            self.job,
            environment=self._place,
            stop_when=self._is_stopped,
            sinks=self.job.event_sinks,
        )

    def _train(self) -> Generator[EpochMetrics, None, None]:
        failure = None
        try:
            self._rank = self._rank or self._join_team()
            yield from self._rank.train()
        except RunEndedError:
            pass  # the other workers of an elastic team have finished the run
        except Exception as error:
            failure = error
        finally:
            self._done = True
            if self._rank is not None:
                self._rank.close(failure)
                self.state = self._rank.state()
        if failure is not None:
            kind, rank = type(failure).__name__, self._place.rank
            device = self._rank.ddp.device if self._rank else self.devices[0]
            text = f"rank {rank} ({device}) failed: {kind}: {failure}"
            self.error = WorkerError(text, rank=rank, kind=kind, state=self.state)
            self.error.__cause__ = failure

    def _is_stopped(self) -> bool:
        return self._stop.is_set() or self._interrupt.requested is not None

    def finish(self, timeout_s: float | None) -> bool:
        """Train to the end, or wait for the thread that does."""
        if self._thread is None:
            self._train_all()
        else:
            self._thread.join(timeout_s)
        return self._done

    def stop(self) -> None:
        """Stop after the micro-batch that is being computed."""
        self._stop.set()

    def abandon(self) -> bool:
        """Leave the model as it is."""
        unheard = not self._done
        if self._thread is not None:
            self.stop()
            self._thread.join()
        else:
            self._done = True
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
    device, and in a rank of a launched team, it happens in this process: ``join``, ``metrics`` and
    ``next_metrics`` train in the thread that calls them. ``poll_metrics`` never trains; from its
    first call on the run continues in a separate thread. As a context manager, the handle stops
    and joins at the end of the block.

    A run must be joined. If its handle is deleted before, or the script ends, its workers are
    ended, and a line on standard error reports it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._heard = False
        self._newest: EpochMetrics | None = None  # the last one returned to the user
        self._finalizer = weakref.finalize(self, _abandon, run)

    def metrics(self) -> Iterator[EpochMetrics]:
        """Yield each epoch's metrics when it has ended; end with the run.

        Each epoch is returned once, here, by ``next_metrics`` or by ``poll_metrics``. A Ctrl-C
        stops the run.

        Raises:
            WorkerError: As ``join`` does.
        """
        while (metrics := self.next_metrics()) is not None:
            yield metrics

    def next_metrics(self, timeout_s: float | None = None) -> EpochMetrics | None:
        """Wait for the next epoch's metrics; a Ctrl-C stops the run.

        Args:
            timeout_s: Longest wait for workers or a thread; ``None`` waits for the epoch's end.
                If this call itself trains, it ends with the epoch.

        Returns:
            The metrics; ``None`` at the end of the run.

        Raises:
            TimeoutError: No epoch has ended in time; the run continues.
            WorkerError: As ``join`` does.
        """
        try:
            metrics = self._run.next_metrics(timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"no epoch has ended within {timeout_s:g} s; the run continues: ask again, or "
                "stop() it"
            ) from None
        except KeyboardInterrupt:
            self._interrupted()
            raise
        if metrics is None:
            self._check()
        self._newest = metrics or self._newest
        return metrics

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the epochs that have ended since the last call; never wait, never train."""
        landed = self._run.poll_metrics()
        self._newest = landed[-1] if landed else self._newest
        return landed

    def join(self, timeout_s: float | None = None) -> TrainedState:
        """Wait for the end of the run; a Ctrl-C stops it.

        Args:
            timeout_s: Longest wait for workers or a thread; ``None`` waits for the end. If this
                call itself trains, it ends with the run.

        Returns:
            The trained model; of a stopped run, the model after its last step.

        Raises:
            WorkerError: A worker failed; its cause shows where. Its ``state`` is the model, if a
                rank survived.
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
        """Ask the run to stop; return at once. ``join`` waits for its end.

        Every rank leaves after its current micro-batch. The current window is dropped, so that the
        model is that after a whole optimizer step.
        """
        self._run.stop()

    @property
    def world_size(self) -> int:
        """Ranks of the run; in an elastic one, the most workers that it may have."""
        return len(self._run.devices)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank, such as ``("cuda:0", "cpu")``."""
        return self._run.devices

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return self._run.is_done

    @property
    def state(self) -> TrainedState | None:
        """The model after the run; ``None`` before its end, and if no rank could send it.

        After a failure or a Ctrl-C it is that of a surviving rank, after its last whole optimizer
        step. If every rank failed, it is that of one of them at that moment.
        """
        return self._run.state if self._run.is_done else None

    def __repr__(self) -> str:
        state = "running"
        if self._run.is_done:
            state = "ended" if self._run.error is None else f"failed ({self._run.error})"
        known = self._newest
        progress = f", epoch {known.epoch} with loss {known.avg_loss:.4g}" if known else ""
        return f"<DdpHandle: {state}{progress}>"

    def _repr_html_(self) -> str:
        """Return its state, and the epoch that was returned last."""
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
        """End the run while an exception is raised, which must not be replaced by another."""
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
