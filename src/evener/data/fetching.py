"""Fetchers: where and when the samples of a micro-batch are loaded.

The training loop plans ahead and submits what it will need. A fetcher loads it in the calling
thread, in a background thread, or in worker processes, as torch's ``DataLoader`` does.

Randomness is derived, not stored: before each ``dataset[index]`` the generators that augmentation
usually draws from are seeded from (seed, epoch, index). A sample is then the same whoever loads it,
whatever was loaded before it, and after a resume. Data sets that draw nothing are not seeded; one
that draws for the first time in a later batch has that batch loaded once more, seeded.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final, Literal, Protocol, final, get_args

import torch
import torch.multiprocessing  # how tensors travel through shared memory
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from evener.closing import Closing
from evener.data.cursor import derive_seed
from evener.data.randomness import (
    DrawWatch,
    Generators,
    as_they_are,
    generators_lock,
    seeded,
)
from evener.errors import ConfigError, DataError, UsageError

Prefetch = Literal["auto", "inline", "thread", "process"]

DEFAULT_TIMEOUT_S: Final = 600.0
"""How long ``Pending.result`` waits for a batch by default."""

_ORPHAN_CHECK_S: Final = 1.0
"""How often a worker looks whether its parent still exists."""

_PLAIN_DATA: Final = "Return plain data and tensors without gradient, or use num_workers=0"


class MapDataset(Protocol):
    """A map-style data set: a sample for each index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample of ``index``."""
        ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is needed to turn (epoch, indices) into a batch.

    Attributes:
        dataset: Map-style data set.
        collate_fn: Makes one batch of a list of samples.
        seed: Seed of the run; with epoch and index it fixes the randomness of each sample.
        watch: Whether the data set or ``collate_fn`` draws random numbers.
    """

    dataset: MapDataset
    collate_fn: Callable[[list[Any]], Any] = default_collate
    seed: int = 0
    watch: DrawWatch = field(default_factory=DrawWatch)

    @property
    def dataset_name(self) -> str:
        """Type of the data set, for messages."""
        return type(self.dataset).__qualname__

    def batch(self, epoch: int, indices: Sequence[int]) -> Any:
        """Load the samples of ``indices`` and collate them.

        The process's generators are left wherever loading has moved them.
        """
        with generators_lock:
            if self.watch.draws is None:
                return self.assemble(epoch, indices, self.watch.closely)
            if not self.watch.draws:
                self.watch.start(derive_seed(self.seed, epoch, indices[0]))
                batch = self.assemble(epoch, indices, as_they_are)
                if not self.watch.look():
                    return batch
            return self.assemble(epoch, indices, seeded)

    def assemble(self, epoch: int, indices: Sequence[int], generators: Generators) -> Any:
        """Load and collate a batch, with its generators readied by ``generators``; see ``batch``.

        Raises:
            DataError: The data set or ``collate_fn`` raised; names the index or the indices, and
                where it happened.
        """
        dataset, samples, only_reads = self.dataset, [], generators is as_they_are
        for index in indices:
            try:
                if only_reads:
                    samples.append(dataset[index])
                    continue
                with generators(self.seed, epoch, index):
                    samples.append(dataset[index])
            except Exception as error:
                raise DataError(
                    f"sample {index} of epoch {epoch} could not be loaded from "
                    f"{self.dataset_name}: {describe(error)}. Mend or leave out this sample; "
                    f"dataset[{index}] alone reproduces the error"
                ) from error
        try:
            # ``collate_fn`` may draw random numbers (masking), so it is seeded too.
            with generators(self.seed, epoch, indices[0], "collate"):
                if self.collate_fn is default_collate and type(samples[0]) is Tensor:
                    return torch.stack(samples)  # the same, without the search for what they are
                return self.collate_fn(samples)
        except Exception as error:
            raise DataError(
                f"{name_samples(epoch, indices)} from {self.dataset_name} could not be "
                f"collated: {describe(error)}. Samples of one batch need equal shapes, or pass a "
                f"collate_fn that pads them"
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
class Pending:
    """A batch that has been submitted.

    Attributes:
        epoch: Epoch of its samples.
        indices: Their indices in the data set.
    """

    def __init__(self, fetcher: "Fetcher", epoch: int, indices: list[int]) -> None:
        self.epoch = epoch
        self.indices = indices
        self._fetcher = fetcher
        self._future = fetcher._submit(epoch, indices)

    def result(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Wait for the batch; asking again returns the same object or raises the same error.

        Args:
            timeout_s: Longest wait, in seconds. A load in the calling thread cannot be cut short.

        Raises:
            DataError: A sample could not be loaded (named by index), a worker died, or the
                deadline has passed.
            UsageError: The fetcher was closed.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._fetcher._advance(self._future, deadline)
            return self._future.result(max(0.0, deadline - time.monotonic()))
        except CancelledError:
            text = "the fetcher was closed before this batch was loaded"
            raise UsageError(text) from None
        except TimeoutError:
            raise DataError(
                f"{name_samples(self.epoch, self.indices)} did not arrive from "
                f"{self._fetcher.place} within {timeout_s:g} s. Storage may hang, or loading is "
                f"slow: time dataset[index] alone, or use more workers"
            ) from None


class Fetcher(Closing, ABC):
    """Loads micro-batches ahead of need, in the order in which they are submitted.

    Each submitted batch stays in memory until its ``Pending`` is dropped: the *caller* bounds the
    number of submissions that are outstanding. One thread at a time may use a fetcher.

    Args:
        recipe: Says how.
    """

    place: str
    """Where it loads, for messages."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._closed = False

    def submit(self, epoch: int, indices: Sequence[int]) -> Pending:
        """Start to load the samples of ``indices`` as one batch and return at once.

        Args:
            epoch: Epoch, for the randomness of augmentation.
            indices: Indices into the data set, at least one.

        Raises:
            UsageError: The fetcher is closed, or ``indices`` is empty.
        """
        if self._closed:
            raise UsageError("this fetcher is closed: submit before close()")
        if not indices:
            raise UsageError("a batch needs at least one index: do not submit an empty share")
        return Pending(self, epoch, [int(index) for index in indices])

    def close(self) -> None:
        """End threads and processes, also while loads are outstanding; idempotent."""
        self._closed = True

    @abstractmethod
    def _submit(self, epoch: int, indices: list[int]) -> Future[Any]:
        """Start a load."""

    def _advance(self, future: Future[Any], deadline: float) -> None:
        """Do what the caller's thread must do for ``future``, until ``deadline``."""


@final
class InlineFetcher(Fetcher):
    """Loads in the calling thread, when the result is asked for (``num_workers=0``).

    Augmentation is seeded as in worker processes. The generators of the process move: whoever
    trains seeds them after loading, as ``TeamLoader`` does.
    """

    place = "the calling thread"

    def _submit(self, epoch: int, indices: list[int]) -> Future[Any]:
        return _Deferred(partial(self._recipe.batch, epoch, indices))


class _Deferred(Future[Any]):
    def __init__(self, load: Callable[[], Any]) -> None:
        super().__init__()
        self._load = load

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            try:
                self.set_result(self._load())
            except Exception as error:
                self.set_exception(error)
        return super().result()


@final
class ThreadFetcher(Fetcher):
    """Loads in one background thread, for data sets that draw no random numbers.

    Nothing is seeded: threads share their process's generators with training.
    """

    place = "the loader's thread"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="evener-fetcher")

    def _submit(self, epoch: int, indices: list[int]) -> Future[Any]:
        return self._pool.submit(self._recipe.assemble, epoch, indices, as_they_are)

    def close(self) -> None:
        """Drop what is queued; the batch that is being loaded is the last."""
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)


# ── worker processes ─────────────────────────────────────────────────────────────────────────────


def start_context(named: BaseContext | None) -> BaseContext:
    """Return how worker processes start: as the user has named, else as ``DataLoader``'s.

    On Linux that is ``fork``, named because from Python 3.14 on the default would import the
    user's script again. Elsewhere it is the platform's default.
    """
    return named or multiprocessing.get_context("fork" if sys.platform == "linux" else None)


@final
class ProcessFetcher(Fetcher):
    """Loads in worker processes, which take batches in the order of their submission.

    Each gets one torch thread. They end with ``close()``, and when their parent ends, however it
    does. One that dies ends the fetcher: its batches are lost.

    Args:
        recipe: Says how; each worker gets a copy of its data set.
        num_workers: Processes, at least one.
        context: How they start, if the user has named it.

    Raises:
        DataError: A process could not be started.
    """

    def __init__(
        self, recipe: Recipe, num_workers: int = 1, context: BaseContext | None = None
    ) -> None:
        super().__init__(recipe)
        self.place = f"{num_workers} data worker(s)"
        context = start_context(context)
        # Its thread sends: submitting never waits for a worker that is busy.
        self._tasks: Any = context.Queue()
        self._answers: dict[Connection, Any] = {}
        # Also for one that is forgotten, and where the interpreter ends.
        self._end = weakref.finalize(self, _end_workers, os.getpid(), self._answers, self._tasks)
        self._futures: dict[int, Future[Any]] = {}
        self._num_submitted = 0
        self._death: DataError | None = None
        try:
            for number in range(num_workers):
                self._start_worker(f"data worker {number}", context)
        except Exception as error:
            self.close()
            raise DataError(
                f"a data worker for {self._recipe.dataset_name} could not be started: "
                f"{type(error).__name__}: {error}. Use fewer workers, or num_workers=0"
            ) from error

    def _start_worker(self, name: str, context: BaseContext) -> None:
        ours, theirs = Pipe(duplex=False)
        process = context.Process(  # type: ignore[attr-defined]  # every context has it
            target=_serve,
            args=(self._recipe, self._tasks, theirs, os.getpid()),
            name=name,
            daemon=True,
        )
        # A forked worker owns the lock from the start: otherwise it could wait for a thread that
        # only the parent has.
        with generators_lock, warnings.catch_warnings():
            # Python 3.12 and later warn of every fork beside threads.
            warnings.filterwarnings("ignore", ".* multi-threaded", DeprecationWarning)
            process.start()
        theirs.close()
        self._answers[ours] = process

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers; empty once closed."""
        return tuple(process.pid for process in self._answers.values())

    def _submit(self, epoch: int, indices: list[int]) -> Future[Any]:
        number, future = self._num_submitted, Future[Any]()
        self._num_submitted += 1
        self._futures[number] = future
        self._tasks.put((number, epoch, indices))
        return future

    def _advance(self, future: Future[Any], deadline: float) -> None:
        while not future.done():
            if self._death is not None:
                raise self._death
            ready = wait([*self._answers], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for connection in ready:
                assert isinstance(connection, Connection)
                self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            # Unpickling fetches tensors from the worker, so its death shows here as well.
            number, batch, text, trace = ForkingPickler.loads(connection.recv_bytes())
        except Exception as error:
            process = self._answers[connection]
            process.join(1.0)
            self._death = DataError(
                f"{process.name} (pid {process.pid}, exit code {process.exitcode}) does not "
                f"answer: {describe(error)}. Its own output above may say why. Where memory or "
                f"/dev/shm is full, use fewer workers or smaller batches. {_PLAIN_DATA}"
            )
            self._death.__cause__ = error
            return
        future = self._futures.pop(number)
        if text is None:
            future.set_result(batch)
        else:
            failure = DataError(text)
            failure.__cause__ = RemoteTraceback(trace)
            future.set_exception(failure)

    def close(self) -> None:
        """End the workers, also in the middle of a sample."""
        super().close()
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()
        self._end()


def _end_workers(owner: int, answers: dict[Connection, Any], tasks: Any) -> None:
    if os.getpid() != owner:  # a forked child has copies
        return
    for connection, process in answers.items():
        connection.close()
        process.kill()
        process.join()
        # What it was killed over before its shared memory lost its name.
        for segment in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
            segment.unlink(missing_ok=True)
        process.close()
    answers.clear()
    tasks.close()
    tasks.join_thread()


def _serve(recipe: Recipe, tasks: Any, answers: Connection, parent: int) -> None:
    """Turn tasks into batches, in a worker process, until it is killed or its parent is gone."""
    # The parent decides what Ctrl-C means; it arrives at the whole foreground group. Handlers of
    # a forked rank are not this process's.
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        number, epoch, indices = tasks.get()
        try:
            # Pickled here: a batch that does not pickle is this task's error.
            answer = ForkingPickler.dumps((number, recipe.batch(epoch, indices), None, ""))
        except Exception as error:
            text = str(error)
            if not isinstance(error, DataError):
                text = (
                    f"{name_samples(epoch, indices)} from {recipe.dataset_name} cannot be sent by "
                    f"their worker process: {describe(error)}. {_PLAIN_DATA}"
                )
            answer = ForkingPickler.dumps((number, None, text, traceback.format_exc()))
        with suppress(BrokenPipeError):  # the parent is gone, or closes
            answers.send_bytes(answer)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: nobody reads what it loads."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os._exit(0)


def make_fetcher(
    dataset: MapDataset,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    num_workers: int = 0,
    prefetch: Prefetch = "auto",
    context: BaseContext | None = None,
) -> Fetcher:
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
        ConfigError: A bad value, or ``prefetch`` and ``num_workers`` contradict one another.
        DataError: The data set is not map-style, or a worker process could not be started.
    """
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{type(dataset).__qualname__} is an IterableDataset: it has no samples to ask for by "
            f"index, so they cannot be shared out. Use a map-style data set (__getitem__, __len__)"
        )
    if num_workers < 0:
        raise ConfigError(f"num_workers={num_workers}: must be 0 or more")
    if prefetch not in get_args(Prefetch):
        raise ConfigError(f"prefetch={prefetch!r}: must be one of {', '.join(get_args(Prefetch))}")
    if prefetch == "auto":
        prefetch = "process" if num_workers else "inline"
    if (prefetch == "process") != (num_workers > 0):
        raise ConfigError(
            f"prefetch={prefetch!r} contradicts num_workers={num_workers}: worker processes need "
            f"num_workers >= 1 and prefetch='process' or 'auto'; the others need num_workers=0"
        )
    recipe = Recipe(dataset, collate_fn or default_collate, seed)
    if prefetch == "process":
        return ProcessFetcher(recipe, num_workers, context)
    return ThreadFetcher(recipe) if prefetch == "thread" else InlineFetcher(recipe)


def name_samples(epoch: int, indices: Sequence[int]) -> str:
    """Name samples for a message; the first eight if there are more."""
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"samples [{shown}] of epoch {epoch}"
