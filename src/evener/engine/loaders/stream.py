"""A loader over what has no indices: every rank reads for itself, and contributes once a window."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Sampler

from evener.data.fetching import start_context
from evener.devices import pins_memory
from evener.engine.changing import ElasticEngine
from evener.engine.loaders.facts import LikeDataLoader
from evener.engine.loaders.loops import UserLoop, closed_at_exit
from evener.engine.team_change import cannot_join
from evener.errors import CheckpointError, ConfigError
from evener.parsing import Fields
from evener.planning.shares import apportion

_REMARK = (
    "{what}: each rank reads it by itself and contributes one batch to each window, so "
    "that an optimizer step has as many batches as there are ranks. Not "
    "guaranteed: that a sample is seen once an epoch (let the data set give each rank a part of "
    "its own, by ddp.rank and ddp.world_size), shares that follow speed, and resuming in "
    "mid-epoch, which starts the epoch's data over"
)


@final
class StreamLoader(LikeDataLoader):
    """Iterates over an ``IterableDataset``, or over a ``DataLoader`` with batches of its own.

    Made by ``Ddp.loader``. Every ``ddp.step()`` closes a window, to which each rank contributes a
    batch, by weight. A rank that runs out of data takes part in the others' windows, with nothing,
    until all have run out.
    """

    def __init__(
        self,
        engine: ElasticEngine,
        batches: DataLoader[Any],
        *,
        seed: int,
        max_steps: int | None,
    ) -> None:
        super().__init__(batches)
        self.batch_size = batches.batch_size  # of this rank
        self._engine = engine
        self._batches = batches
        self._seed = seed
        self._max_steps = max_steps
        self.loop = UserLoop()
        self._epoch = 0
        self._next = 0
        iterable = isinstance(batches.dataset, IterableDataset)
        what = batches.dataset if iterable else batches.batch_sampler
        engine.habits.tell_once(_REMARK.format(what=type(what).__name__))

    def __len__(self) -> int:
        """Return this rank's batches of an epoch; ``TypeError`` if the data set has no length."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield the next epoch; see ``epoch``."""
        return self.epoch(self._next)

    @closed_at_exit
    def epoch(self, epoch: int) -> Generator[Any, None, None]:
        """Yield this rank's batches of an epoch; all ranks call it with the same number.

        An epoch that was finished before a restart yields nothing.

        Args:
            epoch: Number of the epoch, from 0.

        Yields:
            Batches.

        Raises:
            UsageError: ``ddp.step()`` was not called for the batch before, or an elastic team began
                before this rank came.
        """
        engine = self._engine
        if engine.is_joining:
            raise cannot_join("a stream")
        self._next = epoch + 1
        loop = self.loop = UserLoop.here()
        loop.skip("the team had stopped, or finished this epoch, before")
        if self._finished or epoch < self._epoch:
            return
        loop.skip("its data set gave this rank no batch")
        engine.check_start(epoch)
        engine.begin_stream(epoch)
        self._epoch = epoch
        try:
            yield from self._rounds(epoch)
            engine.end_epoch()
            if not engine.stopping:
                self._epoch = epoch + 1
        except BaseException:  # GeneratorExit, after `break`; or an error, which others may not see
            engine.leave()
            raise

    @property
    def cursor(self) -> None:
        """Return ``None``: no window of a stream is planned."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return how many epochs are finished."""
        return {"stream_epoch": self._epoch}

    def restore(self, state: Mapping[str, Any], *, allow_new_data: bool = False) -> None:
        """Continue from ``state``; with ``allow_new_data``, from the first epoch of other data.

        Raises:
            CheckpointError: It is that of a map-style data set.
        """
        if "stream_epoch" not in state and allow_new_data:
            return
        if "stream_epoch" not in state:
            raise CheckpointError(
                "the checkpoint was written with a map-style data set, this run has a stream; "
                "resume with the same kind of data"
            )
        self._epoch = Fields(dict(state)).whole("stream_epoch")

    def close(self) -> None:
        """Do nothing: worker processes end with the iterator."""

    @property
    def _finished(self) -> bool:
        done = self._max_steps is not None and self._engine.turns >= self._max_steps
        return self._engine.stopping or done

    def _rounds(self, epoch: int) -> Iterator[Any]:
        engine = self._engine
        asked_s = time.perf_counter()
        for batch in self._batches:
            engine.spans.receive(asked_s)
            engine.seed_draws(self._seed, epoch, engine.window, engine.rank)
            share = engine.open_share(1)
            share.start_micro_batch(count_samples(batch))
            self.loop.skip("")
            yield batch
            if share.in_micro_batch:
                raise share.not_ended()
            if self._finished:
                return
            asked_s = time.perf_counter()
        going_on = True
        while going_on and not self._finished:
            going_on = engine.join_unplanned() is not None


def stream_of(
    given: IterableDataset[Any] | DataLoader[Any],
    *,
    rank: int,
    world_size: int,
    batch_size: int | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int | None,
) -> DataLoader[Any]:
    """Return the batches that one rank reads.

    A ``batch_size`` is that of the whole team: each rank reads an equal part. Of a ``DataLoader``
    with batches of its own, each rank takes every ``world_size``-th.

    Raises:
        ConfigError: There is no batch size, or it is smaller than the team.
    """
    if not isinstance(given, DataLoader):
        if batch_size is None:
            raise ConfigError(
                "batch_size is not given; pass the samples of one optimizer step of the whole team"
            )
        given = DataLoader(given, batch_size)
    settings: dict[str, Any] = {
        "collate_fn": collate_fn or given.collate_fn,
        "num_workers": given.num_workers if num_workers is None else num_workers,
        "pin_memory": given.pin_memory and pins_memory(),
        "timeout": given.timeout,
        "worker_init_fn": given.worker_init_fn,
        "generator": given.generator,
    }
    if settings["num_workers"]:
        settings |= {
            "multiprocessing_context": start_context(given.multiprocessing_context),
            "prefetch_factor": given.prefetch_factor,
            "persistent_workers": given.persistent_workers,
        }
    if given.batch_size is None and given.batch_sampler is not None:
        taken = EveryNth(given.batch_sampler, rank, world_size)
        return DataLoader(given.dataset, batch_sampler=taken, **settings)
    size = batch_size or given.batch_size
    if size is not None:
        if size < world_size:
            raise ConfigError(
                f"batch_size is {size} for a team of {world_size}: every rank reads a part of "
                "each batch; give at least one sample for each"
            )
        size = apportion(size, [1.0] * world_size)[rank]
    return DataLoader(given.dataset, batch_size=size, drop_last=given.drop_last, **settings)


@final
class EveryNth(Sampler[list[int]]):
    """Every ``world_size``-th batch of a batch sampler, beginning with the rank's own."""

    def __init__(self, batches: Any, rank: int, world_size: int) -> None:
        self._batches, self._rank, self._world_size = batches, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rank's batches."""
        yield from islice(self._batches, self._rank, None, self._world_size)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(range(self._rank, len(self._batches), self._world_size))


def count_samples(batch: Any) -> int:
    """Return a batch's samples: the first dimension of its first tensor that has one, or 1."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return 1
