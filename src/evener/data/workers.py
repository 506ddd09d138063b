"""Worker processes: a fetcher that loads elsewhere, and what runs at the other end.

``start_method.py`` decides whether they are spawned or forked.
Tensors come back through shared memory that loses its name as soon as it is there, so that nothing
stays behind on ``/dev/shm``; what a worker was killed over in that moment is swept up after it.
"""

import itertools
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import loads
from typing import Any, Final, final

import torch
import torch.multiprocessing  # how tensors travel through shared memory
from torch.utils.data import default_collate

from evener.comm.forks import NotInherited, leave_behind_in_children
from evener.data.fetching import Fetcher, MapDataset, Pending, Recipe, describe
from evener.data.randomness import generators_lock
from evener.data.start_method import choose_context, hidden_script, is_by_value
from evener.errors import DataError, UsageError

_GRACE_S: Final = 1.0
"""How long a worker that was asked to end may take before it is killed."""

_MAX_UNREAD_BYTES: Final = 32 * 1024
"""Tasks that may lie unread in a worker's socket: less than its buffer holds, so that sending
does not wait for a worker which is still importing."""


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker process, as text.

    It stands as the cause of the ``DataError``, for exceptions themselves need not pickle.
    """

    def __str__(self) -> str:
        """Show the worker's traceback below the line that names this exception."""
        return "\n" + "".join(str(part) for part in self.args)


class Deferred:
    """Carries a value to a worker process and, where it is spawned, unpickles it only when asked.

    Then a class that the worker cannot import is an error that can be reported, instead of a
    traceback on stderr and a process that is gone. Pickled while the process is being spawned, so
    that tensors go through shared memory.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getstate__(self) -> bytes:
        """Pickle the value; called by the spawn machinery."""
        return bytes(ForkingPickler.dumps(self._value))

    def __setstate__(self, state: bytes) -> None:
        """Keep the bytes as they came."""
        self._value = state

    def load(self) -> Any:
        """Return the value, in the worker; a forked one has it already."""
        if not isinstance(self._value, bytes):
            return self._value
        return loads(self._value)  # noqa: S301  from the process that started this one


def worker_main(connection: Connection, recipe: Deferred) -> None:
    """Turn tasks into batches, in a worker process, until the parent hangs up.

    Args:
        connection: Receives (epoch, indices), or None to stop; answers in the order of the tasks
            with (error message or None, batch or traceback).
        recipe: The ``Recipe``.
    """
    _reset_signals()
    torch.set_num_threads(1)
    tasks: queue.SimpleQueue[tuple[int, list[int]]] = queue.SimpleQueue()
    threading.Thread(target=_read_tasks, args=(connection, tasks), daemon=True).start()
    unusable = None
    try:
        loaded: Recipe = recipe.load()
    except Exception as error:
        text = (
            f"{current_process().name} could not load the data set: {describe(error)}. Define it "
            f"in a module that can be imported (not in a notebook or an interactive session), or "
            f"use num_workers=0"
        )
        unusable = ForkingPickler.dumps((text, traceback.format_exc()))
    while True:
        epoch, indices = tasks.get()
        message = _answer(loaded, epoch, indices) if unusable is None else unusable
        try:
            connection.send_bytes(message)
        except OSError:  # the parent has hung up
            os._exit(0)


def _answer(recipe: Recipe, epoch: int, indices: list[int]) -> memoryview:
    try:
        # Pickled here: a batch that does not pickle is this task's error.
        return ForkingPickler.dumps((None, recipe.batch(epoch, indices)))
    except DataError as error:
        return ForkingPickler.dumps((str(error), traceback.format_exc()))
    except Exception as error:
        text = (
            f"the batch of samples {indices[:8]} of epoch {epoch} from {recipe.dataset_name} "
            f"cannot be sent by its worker process: {describe(error)}. Return plain data and "
            f"tensors without gradient, or use num_workers=0"
        )
        return ForkingPickler.dumps((text, traceback.format_exc()))


def _reset_signals() -> None:
    """Make a forked worker die of signals as a spawned one does; Ctrl-C does nothing in either."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # the rank's own handler
            signal.signal(number, signal.SIG_DFL)
    # The parent decides what Ctrl-C means; it arrives at the whole foreground group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _read_tasks(connection: Connection, tasks: "queue.SimpleQueue[tuple[int, list[int]]]") -> None:
    """Drain tasks, so that the parent's send never waits for a sample; end with the parent.

    End-of-file means that the parent is gone, however it went: no orphan continues to read data.
    """
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            task = None
        if task is None:
            os._exit(0)
        tasks.put(task)


class _ProcessPending(Pending):
    """A batch that a worker has been asked for."""

    def __init__(self, worker: "_Worker", epoch: int, indices: list[int]) -> None:
        super().__init__(epoch, indices)
        self._worker = worker

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_settled:
            if not self._worker.receive(deadline):
                raise self._late(timeout_s, self._worker.name)


class _Worker(NotInherited):
    """A worker process as its parent sees it."""

    def __init__(self, number: int, recipe: Recipe, context: BaseContext) -> None:
        self._connection, theirs = Pipe()
        # Answers come in the order of the tasks. Weak: a batch that nobody waits for is not kept.
        self._asked: deque[weakref.ref[Pending]] = deque()
        self._backlog: deque[bytes] = deque()
        self._unread: deque[int] = deque()  # sizes of the tasks that were sent and not answered
        self._end: Exception | None = None
        # Or a worker that is forked later would keep this one from seeing the end of the parent.
        leave_behind_in_children(self)
        self.process = context.Process(  # type: ignore[attr-defined]  # every context has it
            target=worker_main,
            args=(theirs, Deferred(recipe)),
            name=f"data worker {number}",
            daemon=True,
        )
        try:
            script = hidden_script() if is_by_value(_parts_of(recipe)) else nullcontext()
            # A forked worker owns the lock from the start: it would wait for a thread that only
            # the parent has.
            with generators_lock, _sigint_blocked(), script, warnings.catch_warnings():
                # Python 3.12 and later warn of every fork beside threads.
                warnings.filterwarnings("ignore", ".* multi-threaded", DeprecationWarning)
                self.process.start()
        except Exception as error:
            self._connection.close()
            raise DataError(
                f"{self.process.name} for {recipe.dataset_name} could not be started: "
                f"{type(error).__name__}: {error}. Use fewer workers, or num_workers=0"
            ) from error
        finally:
            theirs.close()  # or this end would not see the worker's death

    def leave_behind(self) -> None:
        """Close the copy that a forked child has of this end; see ``NotInherited``."""
        self._connection.close()

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.process.name} (pid {self.process.pid})"

    def ask(self, epoch: int, indices: list[int]) -> Pending:
        pending = _ProcessPending(self, epoch, indices)
        self._asked.append(weakref.ref(pending))
        self._backlog.append(bytes(ForkingPickler.dumps((epoch, indices))))
        self._send_backlog()
        return pending

    def _send_backlog(self) -> None:
        while self._backlog and self._end is None:
            size = len(self._backlog[0])
            if self._unread and sum(self._unread) + size > _MAX_UNREAD_BYTES:
                return
            self._unread.append(size)
            with suppress(OSError):  # it is dead: what it still answered is read first
                self._connection.send_bytes(self._backlog.popleft())

    def receive(self, deadline: float) -> bool:
        """Take one answer for its pending batch; false when none has come by ``deadline``.

        Raises:
            DataError: The worker is dead.
            UsageError: The fetcher was closed.
        """
        if self._end is not None:
            raise self._end
        if not wait([self._connection], max(0.0, deadline - time.monotonic())):
            return False
        try:
            message = self._connection.recv_bytes()
            # Before it is unpickled: answers are told apart by their order alone.
            self._unread.popleft()
            pending = self._asked.popleft()()
            # Unpickling fetches tensors from the worker, so its death shows here as well.
            error, payload = loads(message)  # noqa: S301  from our own child process
        except (EOFError, OSError) as broken:
            self._end = self._obituary()
            raise self._end from broken
        except Exception as broken:
            error, payload = f"a batch of {self.name} cannot be unpickled: {describe(broken)}", ""
            error += ". Return plain data and tensors, or use num_workers=0"
        if pending is not None:
            failure = None if error is None else DataError(error)
            if failure is not None:
                failure.__cause__ = RemoteTraceback(payload)
            pending.settle(failure, payload)
        self._send_backlog()
        return True

    def _obituary(self) -> DataError:
        self.process.join(_GRACE_S)
        code = self.process.exitcode
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        remedy = "its own output above may say why; num_workers=0 shows the error in place"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            remedy = "the system may be out of memory: use fewer workers or smaller batches"
            if how.endswith("SIGBUS"):
                remedy = "/dev/shm may be full: enlarge it (docker: --shm-size), or num_workers=0"
        return DataError(f"{self.name} {how}: {remedy}")

    def hang_up(self) -> None:
        """Ask the worker to end at once, even in the middle of a sample."""
        self._end = UsageError("the fetcher was closed before this batch was loaded")
        self._backlog.clear()
        # End-of-file alone would not do: a process forked from this one may hold the socket open.
        # A worker that has much unread is not told, for that send could wait.
        if sum(self._unread) <= _MAX_UNREAD_BYTES:
            with suppress(OSError):
                self._connection.send_bytes(ForkingPickler.dumps(None))
        self._connection.close()

    def bury(self, deadline: float) -> None:
        """Wait for the end of the process until ``deadline``, then kill it."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(_GRACE_S)
        if (code := self.process.exitcode) is not None:
            if code < 0:
                _sweep_up_after(self.process.pid)
            self.process.close()


@final
class ProcessFetcher(Fetcher):
    """Loads in worker processes, one batch per worker at a time, in turn.

    The processes start with the fetcher; spawned ones are ready after their imports (seconds). Each
    gets one torch thread. They end with ``close()``, and when their parent ends, however it does.
    Batches that a dying worker had ready are lost with it.

    Args:
        dataset: Map-style data set; each worker gets its own copy.
        collate_fn: Makes one batch of a list of samples, in the worker.
        seed: Seed of the run; with epoch and index it fixes the randomness of each sample.
        num_workers: Processes, at least one.
        context: How they start, if the user has named it; see ``choose_context``.

    Raises:
        DataError: The data set or ``collate_fn`` does not pickle, and workers cannot be forked.
        ConfigError: The running script is not guarded, so that workers would run it again, and
            they cannot be forked.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        *,
        num_workers: int = 1,
        context: BaseContext | None = None,
    ) -> None:
        super().__init__(dataset, collate_fn, seed)
        context = choose_context(_parts_of(self._recipe), num_workers, context)
        self._workers: list[_Worker] = []
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(number, self._recipe, context))
        except BaseException:
            self.close()
            raise
        self._turns = itertools.cycle(self._workers)

    @property
    def worker_pids(self) -> tuple[int | None, ...]:
        """Process ids of the workers; empty once closed."""
        return () if self._closed else tuple(worker.process.pid for worker in self._workers)

    def _submit(self, epoch: int, indices: list[int]) -> Pending:
        return next(self._turns).ask(epoch, indices)

    def close(self) -> None:
        """End the workers, at the latest by killing them after a second."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.hang_up()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            worker.bury(deadline)


def _sweep_up_after(pid: int | None) -> None:
    """Remove shared memory that a killed process had made and not yet taken the name from."""
    with suppress(OSError):
        for segment in Path("/dev/shm").glob(f"torch_{pid}_*"):
            segment.unlink(missing_ok=True)


def _parts_of(recipe: Recipe) -> list[object]:
    """Return what of the user's a worker is given."""
    parts: list[object] = [recipe.dataset]
    return parts if recipe.collate_fn is default_collate else [*parts, recipe.collate_fn]


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """A process started inside ignores Ctrl-C while it imports, and so prints no traceback."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
