"""Fetchers: where and when the samples of a micro-batch are loaded.

The training loop plans one window ahead and submits what it will need; a ``Fetcher`` loads it in
the calling thread, in a background thread, or in worker processes. Batches are the same in the
calling thread and in worker processes, for any number of workers, because every sample's
randomness derives from (seed, epoch, index).
"""

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any, Final, Literal, final, get_args

from torch.utils.data import IterableDataset

from evener.data.fetching import Fetcher, MapDataset, Pending, Recipe
from evener.data.randomness import as_they_are
from evener.data.workers import ProcessFetcher as ProcessFetcher
from evener.errors import ConfigError, DataError, UsageError

Prefetch = Literal["auto", "inline", "thread", "process"]

_THREAD_GRACE_S: Final = 5.0


class _InlinePending(Pending):
    def __init__(self, recipe: Recipe, epoch: int, indices: list[int]) -> None:
        super().__init__(epoch, indices)
        self._recipe = recipe

    def _wait(self, timeout_s: float) -> None:
        try:
            self.settle(None, self._recipe.batch(self.epoch, self.indices))
        except Exception as error:
            self.settle(error)


@final
class InlineFetcher(Fetcher):
    """Loads in the calling thread, when the result is asked for (``num_workers=0``).

    Augmentation is seeded as in worker processes. The generators of the process move: whoever
    trains seeds them after loading, as ``TeamLoader`` does.
    """

    def _submit(self, epoch: int, indices: list[int]) -> Pending:
        return _InlinePending(self._recipe, epoch, indices)

    def close(self) -> None:
        """Have nothing to end; later submissions are refused."""
        self._closed = True


class _ThreadPending(Pending):
    def __init__(self, epoch: int, indices: list[int]) -> None:
        super().__init__(epoch, indices)
        self._done = threading.Event()

    def settle(self, error: Exception | None, batch: Any = None) -> None:
        super().settle(error, batch)
        self._done.set()

    def _wait(self, timeout_s: float) -> None:
        if not self._done.wait(timeout_s):
            raise self._late(timeout_s, "the loader's thread")


_Jobs = queue.SimpleQueue[_ThreadPending | None]


@final
class ThreadFetcher(Fetcher):
    """Loads in one background thread, for data sets that draw no random numbers.

    Nothing is seeded: threads share their process's generators with training.

    Args:
        dataset: Map-style data set; read by the background thread only.
        collate_fn: Makes one batch of a list of samples; torch's ``default_collate`` if None.
        seed: Seed of the run; not used by this leaf.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, collate_fn, seed)
        self._jobs: _Jobs = queue.SimpleQueue()
        # The thread does not know the fetcher: one that is forgotten is collected, and ends it.
        work = (self._jobs, self._recipe)
        self._thread = threading.Thread(
            target=_run_jobs, args=work, name="evener-fetcher", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def _submit(self, epoch: int, indices: list[int]) -> Pending:
        pending = _ThreadPending(epoch, indices)
        self._jobs.put(pending)
        return pending

    def close(self) -> None:
        """Drop what is queued and wait, at most 5 s, for the batch that is being loaded."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job.settle(UsageError("the fetcher was closed before this batch was loaded"))
        self._jobs.put(None)
        self._thread.join(_THREAD_GRACE_S)


def _run_jobs(jobs: _Jobs, recipe: Recipe) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.settle(None, recipe.assemble(job.epoch, job.indices, as_they_are))
        except Exception as error:
            job.settle(error)
        del job  # or the last batch would stay in memory until the next one


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
        context: How worker processes start, if the user has named it; see ``choose_context``.

    Raises:
        ConfigError: A bad value, or ``prefetch`` and ``num_workers`` contradict one another.
        DataError: The data set is not map-style, or cannot be sent to worker processes.
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
    if prefetch == "process":
        return ProcessFetcher(dataset, collate_fn, seed, num_workers=num_workers, context=context)
    leaf = ThreadFetcher if prefetch == "thread" else InlineFetcher
    return leaf(dataset, collate_fn, seed)
