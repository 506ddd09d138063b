"""Fetchers: where and when the samples of a micro-batch are loaded.

The training loop plans ahead and submits what it will need. A fetcher loads it in the calling
thread, in a background thread, or in worker processes, as torch's ``DataLoader`` does.

Randomness is derived, not stored: before each ``dataset[index]`` the generators that augmentation
usually draws from are seeded from (seed, epoch, index). A sample is then the same anywhere,
whatever was loaded before it, and after a resume. Data sets that draw nothing are not seeded; the
first batch that draws is loaded once more, seeded.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, final

import torch
import torch.multiprocessing  # how tensors travel through shared memory
from torch import Tensor
from torch.utils.data import default_collate

from evener.closing import Closing
from evener.data.cursor import derive_seed
from evener.data.randomness import DrawWatch, generators_lock, seed_generators
from evener.errors import ConfigError, DataError, UsageError

Prefetch = Literal["auto", "inline", "thread", "process"]

#: Loads the samples of an epoch with these indices as a batch.
Load = Callable[[int, list[int]], Any]

DEFAULT_TIMEOUT_S: Final = 600.0
"""How long ``Pending.result`` waits for a batch by default."""

_ORPHAN_CHECK_S: Final = 1.0
"""How often a worker looks whether its parent still exists."""

_PLAIN_DATA: Final = "Return plain data and tensors without gradient, or use num_workers=0"


@dataclass(slots=True)
class Recipe:
    """What is needed to turn (epoch, indices) into a batch.

    Attributes:
        dataset: Map-style data set.
        collate_fn: Makes one batch of a list of samples.
        seed: Seed of the run; with epoch and index it fixes the randomness of each sample.
        name: The data set's, for messages.
        draws: Whether the data set or ``collate_fn`` has drawn random numbers.
        watch: Detects that.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] = default_collate
    seed: int = 0
    name: str = ""
    draws: bool = False
    watch: DrawWatch = field(default_factory=DrawWatch)

    def batch(self, epoch: int, indices: Sequence[int]) -> Any:
        """Load the samples of ``indices`` and collate them.

        The process's generators are left wherever loading has moved them.
        """
        with generators_lock:
            if not self.draws:
                # Seeding them for each sample takes as long as reading a small one.
                self.watch.start(derive_seed(self.seed, epoch, indices[0]))
                batch = self.assemble(epoch, indices)
                self.draws = self.watch.has_drawn()
                if not self.draws:
                    return batch
            return self.assemble(epoch, indices, seeded=True)

    def assemble(self, epoch: int, indices: Sequence[int], *, seeded: bool = False) -> Any:
        """Load and collate a batch; ``seeded`` says whether its random numbers are derived.

        Raises:
            DataError: The data set or ``collate_fn`` raised; names the index or the indices, and
                where it happened.
        """
        samples = []
        for index in indices:
            try:
                if seeded:
                    seed_generators(derive_seed(self.seed, epoch, index))
                samples.append(self.dataset[index])
            except Exception as error:
                raise DataError(
                    f"sample {index} of epoch {epoch} could not be loaded from {self.name}: "
                    f"{describe(error)}. Mend or leave out this sample; dataset[{index}] alone "
                    "reproduces the error"
                ) from error
        try:
            if seeded:  # ``collate_fn`` may draw, too, as for masks
                seed_generators(derive_seed(self.seed, epoch, indices[0], "collate"))
            if self.collate_fn is default_collate and type(samples[0]) is Tensor:
                return torch.stack(samples)  # the same, without the search for what they are
            return self.collate_fn(samples)
        except Exception as error:
            raise DataError(
                f"{name_samples(epoch, indices)} from {self.name} could not be collated: "
                f"{describe(error)}. Samples of one batch need equal shapes, or pass a collate_fn "
                "that pads them"
            ) from error


def describe(error: Exception) -> str:
    """Return an exception in one line, with its place: user errors come without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text: exceptions need not pickle."""

    def __str__(self) -> str:
        """Show the worker's traceback below the line that names this exception."""
        return "\n" + "".join(str(part) for part in self.args)


# ── what all fetchers share ──────────────────────────────────────────────────────────────────────


@final
class Pending(Future[Any]):
    """A batch that has been submitted.

    Args:
        fetcher: Loads it, and is kept as long as this.
        epoch: Epoch of its samples.
        indices: Their indices in the data set.
        inline: What the calling thread loads it with, when it is asked for, if no other does.
    """

    def __init__(
        self, fetcher: "Fetcher", epoch: int, indices: list[int], inline: Load | None
    ) -> None:
        super().__init__()
        self._fetcher = fetcher
        self._epoch = epoch
        self._indices = indices
        self._inline = inline

    def load(self, load: Load) -> None:
        """Load the batch, or keep the error for ``result``."""
        try:
            self.set_result(load(self._epoch, self._indices))
        except BaseException as error:  # libraries in Rust panic with one; `result` raises it
            self.set_exception(error)

    def result(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> Any:
        """Wait for the batch; asking again returns the same object or raises the same error.

        Args:
            timeout: Longest wait, in seconds. A load in the calling thread cannot be cut short.

        Raises:
            DataError: A sample could not be loaded (named by index), a worker died, or the
                deadline has passed.
            CancelledError: The fetcher was closed before it was begun.
        """
        if self._inline is not None and not self.done():
            self.load(self._inline)
        try:
            return super().result(timeout)
        except TimeoutError:
            raise DataError(
                f"{name_samples(self._epoch, self._indices)} did not arrive within "
                f"{timeout:g} s. Storage may hang, or loading is slow: time dataset[index] alone, "
                "or use more workers"
            ) from None


class Fetcher(Closing):
    """Loads micro-batches ahead of need, in the order in which they are submitted.

    Each submitted batch stays in memory until its ``Pending`` is dropped: the *caller* bounds the
    number of submissions that are outstanding. One thread at a time may use a fetcher.
    """

    @property
    def remark(self) -> str:
        """What the user should know; empty while there is nothing."""
        return ""

    @abstractmethod
    def submit(self, epoch: int, indices: Sequence[int]) -> Pending:
        """Start to load the samples of ``indices`` as one batch and return at once.

        Args:
            epoch: Epoch, for the randomness of augmentation.
            indices: Indices into the data set, at least one.

        Raises:
            UsageError: The fetcher is closed.
        """


#: What threads load, until ``None`` comes.
Tasks = SimpleQueue[Pending | None]


@final
class PlainFetcher(Fetcher):
    """Loads each sample from its data set.

    Args:
        loads: What each of its threads loads with.
        workers: The processes that they ask, if they do.
        inline: Without threads: what the calling thread loads with, when a result is asked for.
    """

    def __init__(
        self, loads: Sequence[Load], workers: Sequence["Worker"] = (), inline: Load | None = None
    ) -> None:
        self.workers = workers
        self._inline = inline
        self._tasks: Tasks = SimpleQueue()
        # Also for one that is forgotten, and where the interpreter ends.
        self._end = weakref.finalize(self, _end, os.getpid(), self._tasks, workers)
        for load in loads:
            # Daemons: the end of the interpreter waits for no sample.
            threading.Thread(
                target=_load_all, args=(self._tasks, load), name="evener-fetcher", daemon=True
            ).start()

    def submit(self, epoch: int, indices: Sequence[int]) -> Pending:
        """Start to load a batch; see ``Fetcher``."""
        if not self._end.alive:
            raise UsageError("this fetcher is closed: submit before close()")
        pending = Pending(self, epoch, [int(index) for index in indices], self._inline)
        if self._inline is None:
            self._tasks.put(pending)
        return pending

    def close(self) -> None:
        """End threads and processes, also while loads are outstanding; idempotent."""
        self._end()


def _load_all(tasks: Tasks, load: Load) -> None:
    while (pending := tasks.get()) is not None:
        pending.load(load)
        del pending  # or its batch would stay until the next one comes
    tasks.put(None)  # for the next thread


def _end(owner: int, tasks: Tasks, workers: Sequence["Worker"]) -> None:
    if os.getpid() != owner:  # a forked child has copies
        return
    with suppress(Empty):
        while (pending := tasks.get_nowait()) is not None:
            pending.cancel()
    tasks.put(None)
    for worker in workers:
        worker.end()


# ── worker processes ─────────────────────────────────────────────────────────────────────────────


def start_context(named: BaseContext | None) -> BaseContext:
    """Return how worker processes start: as the user has named, else as ``DataLoader``'s.

    On Linux that is ``fork``, named because from Python 3.14 on the default would import the
    user's script again. Elsewhere it is the platform's default.
    """
    return named or multiprocessing.get_context("fork" if sys.platform == "linux" else None)


@final
class Worker:
    """A worker process, for the thread that asks it. It gets one torch thread.

    It ends when its parent does, however that ends.

    Args:
        name: For messages.
        recipe: Says how to load; the process gets a copy of its data set.
        context: How it starts.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, name: str, recipe: Recipe, context: BaseContext) -> None:
        self._connection, theirs = context.Pipe()
        self._in_use = threading.Lock()
        self._process: Any = context.Process(  # type: ignore[attr-defined]  # every context has it
            target=_serve, args=(recipe, theirs, os.getpid()), name=name, daemon=True
        )
        # A forked worker owns the lock from the start: otherwise it could wait for a thread that
        # only the parent has.
        with generators_lock, warnings.catch_warnings():
            # Python 3.12 and later warn of every fork beside threads.
            warnings.filterwarnings("ignore", ".* multi-threaded", DeprecationWarning)
            self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def load(self, epoch: int, indices: list[int]) -> Any:
        """Let the process load a batch.

        Raises:
            DataError: It could not, or has died.
        """
        with self._in_use:
            try:
                self._connection.send((epoch, indices))
                # Unpickling fetches tensors from the worker, so its death shows here as well.
                batch, failure, trace = self._connection.recv()
            except Exception as error:
                self._process.join(1.0)
                raise DataError(
                    f"{self._process.name} (pid {self.pid}, exit code {self._process.exitcode}) "
                    f"does not answer: {describe(error)}. Its own output above may show why. Where "
                    "memory or /dev/shm is full, use fewer workers or smaller batches. "
                    f"{_PLAIN_DATA}"
                ) from error
        if failure:
            raise DataError(failure) from RemoteTraceback(trace)
        return batch

    def end(self) -> None:
        """Kill the process, also in the middle of a sample."""
        self._process.kill()
        # Its death ends `load`, unless something that the data set has started holds the other end.
        if self._in_use.acquire(timeout=1.0):
            self._connection.close()
        self._process.join()
        # Shared memory that still has a name because the process was killed.
        for segment in Path("/dev/shm").glob(f"torch_{self.pid}_*"):
            segment.unlink(missing_ok=True)
        self._process.close()


def _serve(recipe: Recipe, connection: Connection, parent: int) -> None:
    """Answer a parent's requests, in a worker process, until it is killed or the parent is gone."""
    # The parent decides what Ctrl-C means; it arrives at the whole foreground group. Handlers of
    # a forked rank are not this process's.
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with suppress(EOFError, OSError):  # the parent is gone, or closes
        while True:
            epoch, indices = connection.recv()
            try:
                # Pickled before it is sent: a batch that does not pickle is this request's error.
                connection.send((recipe.batch(epoch, indices), "", ""))
            except Exception as error:
                if not isinstance(error, DataError):
                    what = f"{name_samples(epoch, indices)} cannot be sent by their worker process"
                    error = DataError(f"{what}: {describe(error)}. {_PLAIN_DATA}")
                connection.send((None, str(error), traceback.format_exc()))


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: no one reads what it loads."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os._exit(0)


def make_fetcher(
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    num_workers: int = 0,
    prefetch: Prefetch = "auto",
    context: BaseContext | None = None,
) -> PlainFetcher:
    """Choose a fetcher.

    Args:
        dataset: Map-style data set.
        collate_fn: Makes one batch of a list of samples; torch's ``default_collate`` if None.
        seed: Seed of the run.
        num_workers: Worker processes per rank; 0 loads in this process.
        prefetch: ``"auto"`` is ``"process"`` with workers and ``"inline"`` without; ``"thread"``
            loads in a background thread and is for data sets that draw no random numbers.
        context: How worker processes start, if the user has named it; see ``start_context``.

    Raises:
        ConfigError: ``prefetch`` has no such value, or does not go with ``num_workers``.
    """
    recipe = Recipe(dataset, collate_fn or default_collate, seed, type(dataset).__qualname__)
    if num_workers == 0 and prefetch in ("auto", "inline"):
        # The process's generators move: training seeds them after loading.
        return PlainFetcher([], inline=recipe.batch)
    if num_workers == 0 and prefetch == "thread":
        # Nothing is seeded: threads share the process's generators with training.
        return PlainFetcher([recipe.assemble])
    if num_workers > 0 and prefetch in ("auto", "process"):
        context = start_context(context)
        workers = [Worker(f"data worker {k}", recipe, context) for k in range(num_workers)]
        return PlainFetcher([worker.load for worker in workers], workers)
    raise ConfigError(
        f"prefetch={prefetch!r} contradicts num_workers={num_workers}: give 'process' with "
        "num_workers >= 1, 'inline' or 'thread' with num_workers=0, or 'auto' with either"
    )


def name_samples(epoch: int, indices: Sequence[int]) -> str:
    """Name samples for a message; the first eight if there are more."""
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"samples [{shown}] of epoch {epoch}"
