"""A loader over what has no indices: every rank reads for itself, and contributes once a window."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Sampler

from evener.data.cursor import Cursor
from evener.data.fetching import start_context
from evener.devices import pins_memory
from evener.engine.loaders.dataset_arguments import Collate, Given, as_data_loader
from evener.engine.loaders.training import TrainingLoader
from evener.engine.sync import SyncEngine
from evener.errors import ConfigError
from evener.planning.shares import apportion

_REMARK = (
    "{what}: each rank reads it by itself and contributes one batch to each window, so "
    "that an optimizer step has as many batches as there are ranks. Not "
    "guaranteed: that a sample is seen once an epoch (let the data set give each rank a part of "
    "its own, by ddp.rank and ddp.world_size), shares that follow speed, and resuming in "
    "mid-epoch, which starts the epoch's data over"
)


@final
class StreamLoader(TrainingLoader):
    """Iterates over an ``IterableDataset``, or over a ``DataLoader`` with batches of its own.

    Made by ``Ddp.loader``. Every ``ddp.step()`` closes a window, to which each rank contributes a
    batch, by weight. A rank that runs out of data takes part in the others' windows, with nothing,
    until all have run out.
    """

    def __init__(
        self,
        engine: SyncEngine,
        given: Given,
        *,
        batch_size: int | None,
        collate_fn: Collate | None,
        num_workers: int | None,
        seed: int,
        max_steps: int | None,
    ) -> None:
        given = as_data_loader(given, batch_size)
        workers = given.num_workers if num_workers is None else num_workers
        settings = _own_part(given, batch_size, engine.rounds.rank, engine.team.world_size)
        if workers:
            settings |= {
                "multiprocessing_context": start_context(given.multiprocessing_context),
                "prefetch_factor": given.prefetch_factor,
                "persistent_workers": given.persistent_workers,
            }
        self._given: DataLoader[Any] = DataLoader(
            given.dataset,
            collate_fn=collate_fn or given.collate_fn,
            num_workers=workers,
            pin_memory=given.pin_memory and pins_memory(),
            timeout=given.timeout,
            worker_init_fn=given.worker_init_fn,
            generator=given.generator,
            **settings,
        )
        super().__init__(engine, self._given, max_steps)
        self._engine: SyncEngine = engine
        self.cursor = Cursor(1, 0)  # only the number of the epoch is known: each is one piece
        self._seed = seed
        iterable = isinstance(given.dataset, IterableDataset)
        what = given.dataset if iterable else given.batch_sampler
        engine.options.guards.warn_once(_REMARK.format(what=type(what).__name__))

    def __len__(self) -> int:
        """Return this rank's batches of an epoch; ``TypeError`` if the data set has no length."""
        return len(self._given)

    def close(self) -> None:
        """Do nothing: worker processes end with the iterator."""

    def _begin(self, epoch: int) -> AbstractContextManager[None]:
        self._engine.begin_stream(epoch)
        self.cursor.begin(epoch)
        return nullcontext()

    def _batches(self, epoch: int) -> Iterator[Any]:
        engine = self._engine
        asked_s = time.perf_counter()
        for batch in self._given:
            engine.spans.receive(asked_s)
            place = self._seed, epoch, engine.window, engine.rounds.rank
            yield from self._compute(batch, engine.open_share(1), count_samples(batch), *place)
            if self._is_over:
                break
            asked_s = time.perf_counter()
        others_have_data = True
        while others_have_data and not self._is_over:
            others_have_data = engine.join_unplanned() is not None
        engine.end_epoch()
        if not engine.rounds.stopping:
            self.cursor.begin(epoch + 1)


def _own_part(
    given: DataLoader[Any], size: int | None, rank: int, world_size: int
) -> dict[str, Any]:
    """Return which batches a rank reads, as arguments of a ``DataLoader``.

    A batch size is that of the whole team: each rank reads an equal part. Of batches of the user's
    own, each rank takes every ``world_size``-th.

    Raises:
        ConfigError: The batch size is smaller than the team.
    """
    if given.batch_size is None and given.batch_sampler is not None:
        return {"batch_sampler": EveryNth(given.batch_sampler, rank, world_size)}
    size = size or given.batch_size
    if size is not None:
        if size < world_size:
            raise ConfigError(
                f"batch_size is {size} for a team of {world_size}: every rank reads a part of "
                "each batch; give at least one sample for each"
            )
        size = apportion(size, [1.0] * world_size)[rank]
    return {"batch_size": size, "drop_last": given.drop_last}


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
