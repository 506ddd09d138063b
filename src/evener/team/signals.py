"""Signals as data: a flag that a rank reads between windows, a queue that the launcher waits on."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self, final

from evener.closing import Closing

#: Ctrl-C, a scheduler's request, and the warning that SLURM sends before the time limit.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Records signals that ask a loop to stop, instead of ending the process, while it is entered.

    The loop finishes its window, writes a checkpoint and ends with ``exit_code()``; a further
    Ctrl-C interrupts that. The former handlers are restored on exit. Handlers that the program has
    set are not replaced, and outside the main thread, where Python allows none, it does nothing.

    Args:
        signals: The signals.
        max_interrupts: Number of Ctrl-C that count as requests. With torchrun one comes twice, from
            terminal and agent.

    Attributes:
        requested: The first such signal that arrived; ``None`` while none has.
    """

    def __init__(
        self, signals: Sequence[signal.Signals] = STOPPING, max_interrupts: int = 2
    ) -> None:
        self.requested: signal.Signals | None = None
        self._signals = signals
        self._interrupts_left = max_interrupts
        self._previous: dict[signal.Signals, Any] = {}

    def take_interrupts(self, number: int) -> None:
        """Count the next ``number`` Ctrl-C as requests; a further one raises KeyboardInterrupt."""
        self._interrupts_left = number

    def exit_code(self, *, stopped: bool) -> int:
        """Return 128 + number of the signal, as shells expect; 0 if none stopped the run.

        Args:
            stopped: Whether the run has stopped early. If another rank got the signal, this one
                does not know which, and ends as by SIGTERM.
        """
        requested = self.requested or (signal.SIGTERM if stopped else None)
        return 0 if requested is None else 128 + requested

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                # Ignored signals stay ignored, as with `nohup` and background jobs of scripts.
                if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        self._previous.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        # Without a launcher only the user can end a process that waits, for example for space on a
        # full disk.
        if signum == signal.SIGINT and not self._interrupts_left:
            signal.default_int_handler(signum, frame)
        self._interrupts_left -= signum == signal.SIGINT
        self.requested = self.requested or signal.Signals(signum)


class Requests(Closing):
    """Requests to an agent, in the form of signals; any thread may add one."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._lock = threading.Lock()
        self._is_open = True

    def fileno(self) -> int:
        """Return the descriptor, to wait on."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """Return the requests so far, the oldest first, without signals of ended children."""
        try:
            arrived = [signal.Signals(number) for number in os.read(self._reader, 4096)]
        except BlockingIOError:
            return []
        return [signum for signum in arrived if signum != signal.SIGCHLD]

    def put(self, signum: signal.Signals) -> None:
        """Add a request; without effect if the agent has ended."""
        with self._lock:
            if self._is_open:
                os.write(self._writer, bytes([signum]))

    def close(self) -> None:
        """Close the queue; idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._reader)
                os.close(self._writer)


@final
class SignalQueue(Requests):
    """The signals that this process receives while it is entered, in order; for a launcher.

    Meanwhile, requests to stop, a closed terminal and ends of child processes only wake waits on
    ``fileno``. Main thread only.
    """

    _RECEIVED = (*STOPPING, signal.SIGHUP, signal.SIGCHLD)

    def __enter__(self) -> Self:
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in self._RECEIVED:
            previous = signal.getsignal(signum)
            # Signals that the parent ignores, as with `nohup`, stay ignored, except SIGCHLD.
            if previous is not signal.SIG_IGN or signum == signal.SIGCHLD:
                self._previous[signum] = previous
                signal.signal(signum, _do_nothing)
        return self

    def close(self) -> None:
        """Restore the handlers."""
        for signum, previous in self._previous.items():
            signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        signal.set_wakeup_fd(self._previous_writer)
        super().close()


def _do_nothing(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: the number was already written to the wake-up descriptor."""


@contextmanager
def start_in_silence() -> Iterator[None]:
    """Block SIGINT in processes that are started inside the block until ``run_child`` runs.

    Otherwise Python would print a traceback if Ctrl-C comes during its start. A blocked signal is
    kept; processes inherit the mask, and ``run_child`` unblocks it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_in_silence() -> None:
    """Let Ctrl-C end this process without a message from now on: it is ending already."""
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
