"""What a user's data set or ``DataLoader`` asks for, in evener's terms."""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from evener.data.caching import Cache, CachedFetcher, find_store
from evener.data.cursor import derive_seed
from evener.data.fetching import Fetcher, Pending, Prefetch, Recipe, make_fetcher
from evener.data.order import Draws, Permutation
from evener.data.randomness import generators_lock, preserved_generators, seed_generators
from evener.devices import pins_memory
from evener.errors import ConfigError, UsageError

#: Makes a batch of a list of samples.
Collate = Callable[[list[Any]], Any]
#: Indices into the data set, by position in the epoch.
Indices = Sequence[int] | Permutation | Draws
#: What data may be given as.
Given = Dataset[Any] | DataLoader[Any]

_DRAWN = (
    "the order of samples comes from {}: each position of what it draws is trained on once an "
    "epoch. It must draw from torch's, NumPy's or Python's global generators (which are seeded by "
    "the epoch) or be the same on every rank; otherwise resuming in mid-epoch may repeat or miss "
    "samples"
)
_NOT_INITIALISED = (
    "worker_init_fn is not called: each sample is loaded with generators seeded by (seed, epoch, "
    "index); open resources in the data set, when the first sample is read"
)


def fingerprint(indices: Indices) -> int:
    """Return what ranks compare, below 2**53; 0 if the order cannot differ."""
    if not isinstance(indices, array):
        return 0
    return int.from_bytes(hashlib.blake2b(indices, digest_size=6).digest())


def compare_orders(orders: Mapping[int, Sequence[int]], own: int) -> None:
    """Compare what ranks go through.

    Args:
        orders: Number of samples and fingerprint of their order, by rank.
        own: This rank.

    Raises:
        UsageError: A rank has other samples, or draws others.
    """
    for rank, order in orders.items():
        if order != orders[own]:
            raise UsageError(
                f"rank {rank} has {order[0]} samples in order {order[1]:x}, rank {own} has "
                f"{orders[own][0]} in order {orders[own][1]:x}; give every rank the whole data "
                "set, which evener splits. A sampler must draw from torch's, NumPy's or Python's "
                "global generators, or be seeded alike. Leave a DistributedSampler out, and give "
                "batch_size for the whole team"
            )


def is_stream(given: Given) -> bool:
    """Return whether samples have no index, or batches are the user's own business."""
    if not isinstance(given, DataLoader):
        return isinstance(given, IterableDataset)
    # A plain batch sampler only cuts what its sampler draws, as ``batch_size`` does.
    own_batches = given.batch_size is None and given.batch_sampler is not None
    own_batches &= type(given.batch_sampler) is not BatchSampler
    return own_batches or isinstance(given.dataset, IterableDataset)


def as_data_loader(given: Given, batch_size: int | None) -> DataLoader[Any]:
    """Return a ``DataLoader`` over a data set, or the one that was given.

    Raises:
        ConfigError: A data set without a batch size.
    """
    if isinstance(given, DataLoader):
        return given
    if batch_size is None:
        raise ConfigError(
            "batch_size is not given; pass batch_size=32, or a DataLoader that has one"
        )
    return DataLoader(given, batch_size)


class DatasetArguments:
    """A map-style data set, or a ``DataLoader`` over one, and how to go through it.

    Args:
        given: The data set. A bare one is shuffled unless the user has said otherwise.
        batch_size: What the user says beside it, here and below; ``None`` says nothing.
        collate_fn: Makes a batch.
        num_workers: Worker processes.
        shuffle: Another order in each epoch.
        seed: Of these orders, and of the random numbers that samples draw.

    Attributes:
        dataset: Map-style data set, as given.
        samples: What is read by index: the data set, or a part of it.
        num_samples: Positions of an epoch.
        batch_size: Samples of an optimizer step, or of a batch of an evaluation.
        drop_last: Leave out the samples that fill no whole batch.
        pin_memory: Copy batches to page-locked memory.
        remarks: What cannot be kept or guaranteed, for the user.

    Raises:
        ConfigError: There is no batch size, or the data set cannot be split.
    """

    def __init__(
        self,
        given: Given,
        *,
        batch_size: int | None,
        collate_fn: Collate | None,
        num_workers: int | None,
        shuffle: bool | None = False,
        seed: int = 0,
    ) -> None:
        loader = as_data_loader(given, batch_size)
        kind = type(loader.dataset)
        if getattr(kind, "__len__", None) is None or getattr(kind, "__getitem__", None) is None:
            raise ConfigError(
                f"the data set is a {kind.__name__}, which has no length or cannot be asked for a "
                "sample by index, so it cannot be split; give a data set with len and [index] (a "
                "list does: list(generator)). ddp.loader also takes a torch.utils.data."
                "IterableDataset"
            )
        # A plain batch sampler only cuts what its sampler draws, as ``batch_size`` does.
        cut: Any = loader.batch_sampler if type(loader.batch_sampler) is BatchSampler else loader
        sampler, size, self.drop_last = cut.sampler, cut.batch_size, cut.drop_last
        if size is None:
            raise ConfigError(
                "the DataLoader has batch_size=None, so its samples are batches of an unknown "
                "size; give it a batch_size, or pass the data set to ddp.loader with one"
            )
        if shuffle is None:
            shuffle = given is not loader or not isinstance(sampler, SequentialSampler)
        dataset: Any = loader.dataset
        self.dataset, self.samples, self.num_samples = dataset, dataset, len(sampler)
        self.seed, self._shuffles = seed, shuffle
        self._drawn_from, self._sampler = 0, None
        self.remarks = []
        is_plain = isinstance(sampler, SequentialSampler | RandomSampler)
        if isinstance(sampler, RandomSampler) and sampler.replacement:
            self._drawn_from = len(dataset)
        elif isinstance(sampler, SubsetRandomSampler):
            self.samples = Subset(dataset, list(sampler.indices))
        elif not is_plain or self.num_samples != len(dataset):
            self._sampler = sampler
            if not getattr(sampler, "is_seeded", False):  # evener's own samplers are
                self.remarks.append(_DRAWN.format(type(sampler).__name__))
        self.batch_size = batch_size or size
        self.collate_fn: Collate = collate_fn or loader.collate_fn
        self.num_workers = loader.num_workers if num_workers is None else num_workers
        self.pin_memory = loader.pin_memory and pins_memory()
        self._context = loader.multiprocessing_context
        if loader.worker_init_fn is not None and loader.num_workers:
            self.remarks.append(_NOT_INITIALISED)

    def order(self, epoch: int) -> Indices:
        """Return the order of an epoch, the same on every rank.

        Raises:
            UsageError: The sampler does not give as many indices as its length says.
        """
        if self._drawn_from:
            return Draws(self.num_samples, self._drawn_from, self.seed, epoch)
        if self._sampler is None:
            count = self.num_samples
            return Permutation(count, self.seed, epoch) if self._shuffles else range(count)
        with generators_lock, preserved_generators():
            seed_generators(derive_seed(self.seed, "sampler", epoch))
            indices = array("q", map(int, self._sampler))
        if len(indices) != self.num_samples:
            raise UsageError(
                f"{type(self._sampler).__name__} gave {len(indices)} indices in epoch {epoch}, its "
                f"length is {self.num_samples}; let __len__ say how many it gives"
            )
        return indices

    def fetcher(self, prefetch: Prefetch = "auto") -> Fetcher:
        """Return what loads the samples."""
        return self._fetcher_of(self.collate_fn, prefetch)

    def cached_fetcher(self, prefetch: Prefetch, cache: str, device: torch.device) -> Fetcher:
        """Return what loads the samples and keeps them; see ``Ddp.loader``.

        Raises:
            ConfigError: They cannot be kept there.
        """
        name = type(self.samples).__qualname__
        # torch's own function changes nothing, and hands nothing on.
        copies = self.collate_fn is not default_collate
        kept = Cache(find_store(cache, device), name, cache, copies=copies)
        recipe = Recipe(kept, self.collate_fn, self.seed, name)
        collate = recipe.assemble if prefetch == "thread" else recipe.batch
        return CachedFetcher(self._fetcher_of(list, prefetch), kept, collate)

    def _fetcher_of(self, collate_fn: Collate, prefetch: Prefetch) -> Fetcher:
        samples, workers = self.samples, self.num_workers
        return make_fetcher(samples, collate_fn, self.seed, workers, prefetch, self._context)

    def count_trained(self) -> int:
        """Return how many samples an epoch trains on.

        Raises:
            ConfigError: There is none, or none fills a batch.
        """
        count = self.num_samples
        trained = count - count % self.batch_size if self.drop_last else count
        if not trained:
            raise ConfigError(
                f"an epoch has no batch: {count} samples, batch_size={self.batch_size} and "
                f"drop_last={self.drop_last}; give at least one sample, and use a smaller "
                "batch_size or no drop_last"
            )
        return trained


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


#: What says how data is loaded.
Described = DataLoader[Any] | DatasetArguments


class LikeDataLoader:
    """The attributes of a ``DataLoader`` that scripts read, such as ``len(loader.dataset)``."""

    def __init__(self, given: Described) -> None:
        self.dataset: Any = given.dataset
        self.collate_fn: Collate = given.collate_fn
        self.num_workers = given.num_workers
        self.batch_size = given.batch_size
        self.drop_last = given.drop_last
        self.pin_memory = given.pin_memory

    def _received(self, pending: Pending) -> Any:
        """Return a batch, in page-locked memory if the user's ``DataLoader`` asked for it."""
        batch = pending.result()
        return tree_map_only(Tensor, _pin, batch) if self.pin_memory else batch

    @property
    def sampler(self) -> NoReturn:
        """Raise the error that says why this loader has no sampler."""
        raise AttributeError(
            "evener's loaders have no sampler: each epoch has an order of its own, which follows "
            "from its number and the seed. Leave sampler.set_epoch(epoch) out, and iterate over "
            "loader.epoch(epoch)"
        )
