"""What a user's data set or ``DataLoader`` asks for, in evener's terms."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, final

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from evener.data.cursor import derive_seed
from evener.data.fetching import Fetcher, Prefetch, make_fetcher
from evener.data.order import Draws, EpochOrder
from evener.data.randomness import generators_lock, preserved_generators, seed_generators
from evener.devices import pins_memory
from evener.errors import ConfigError, UsageError

#: Makes a batch of a list of samples.
Collate = Callable[[list[Any]], Any]
#: Indices into the data set, by position in the epoch.
Indices = Sequence[int] | EpochOrder | Draws
#: What data may be given as.
Given = Dataset[Any] | DataLoader[Any]


class Order:
    """In which order an epoch goes through the data set.

    Args:
        num_samples: Positions of an epoch.
        seed: Gives each epoch another permutation; ``None`` goes from first to last.
        drawn_from: Each position draws any of so many samples, instead of a permutation; 0 if not.
    """

    def __init__(self, num_samples: int, seed: int | None = None, *, drawn_from: int = 0) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._drawn_from = drawn_from

    def of(self, epoch: int) -> Indices:
        """Return the order of an epoch, the same on every rank."""
        if self._seed is None:
            return range(self.num_samples)
        if self._drawn_from:
            return Draws(self.num_samples, self._drawn_from, self._seed, epoch)
        return EpochOrder(self.num_samples, self._seed, epoch)

    def fingerprint(self, indices: Indices) -> int:
        """Return what ranks compare, below 2**53; 0 where the order cannot differ."""
        return 0


@final
class Drawn(Order):
    """As a sampler of the user draws it, from generators that are seeded by the epoch."""

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        super().__init__(len(sampler))  # type: ignore[arg-type]
        self._sampler = sampler
        self._sampler_seed = seed

    def of(self, epoch: int) -> Indices:
        """Draw the epoch's indices.

        Raises:
            UsageError: The sampler does not give as many as its length says.
        """
        with generators_lock, preserved_generators():
            seed_generators(derive_seed(self._sampler_seed, "sampler", epoch))
            indices = array("q", map(int, self._sampler))
        if len(indices) != self.num_samples:
            raise UsageError(
                f"{type(self._sampler).__name__} gave {len(indices)} indices in epoch {epoch}, its "
                f"length is {self.num_samples}; let __len__ say how many it gives"
            )
        return indices

    def fingerprint(self, indices: Indices) -> int:
        """Return a hash of the indices, formed of their 8 bytes each as they lie in memory."""
        assert isinstance(indices, array)
        return int.from_bytes(hashlib.blake2b(indices, digest_size=6).digest())


def compare_orders(fingerprints: Mapping[int, int], own: int) -> None:
    """Compare the orders of all ranks.

    Args:
        fingerprints: Of the ranks' orders, by rank.
        own: This rank.

    Raises:
        UsageError: A sampler draws other samples on another rank.
    """
    for rank, fingerprint in fingerprints.items():
        if fingerprint != fingerprints[own]:
            raise UsageError(
                f"the sampler draws other samples on rank {rank} than on rank {own}; it must draw "
                "from torch's, NumPy's or Python's global generators, or be seeded alike, and not "
                "split the data by rank"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A map-style data set and how to go through it.

    Attributes:
        dataset: Map-style data set, as given.
        samples: What is read by index: the data set, or a part of it.
        order: Which sample comes when.
        seed: Of the permutations and of the random numbers that samples draw.
        batch_size: Samples of an optimizer step, or of a batch of an evaluation.
        drop_last: Leave out the samples that fill no whole batch.
        collate_fn: Makes a batch.
        num_workers: Worker processes.
        context: How they start, where the user has named it.
        pin_memory: Copy batches to page-locked memory.
        remarks: What cannot be kept or guaranteed, for the user.
    """

    dataset: Any
    samples: Any
    order: Order
    seed: int
    batch_size: int
    drop_last: bool
    collate_fn: Collate
    num_workers: int
    context: BaseContext | None
    pin_memory: bool
    remarks: list[str]

    def fetcher(self, prefetch: Prefetch = "auto") -> Fetcher:
        """Return what loads the samples."""
        return make_fetcher(
            self.samples, self.collate_fn, self.seed, self.num_workers, prefetch, self.context
        )

    def count_trained(self) -> int:
        """Return how many samples an epoch trains on.

        Raises:
            ConfigError: There is none.
        """
        count = self.order.num_samples
        if count < 1:
            raise ConfigError("the data set is empty; give at least one sample")
        left_out = count % self.batch_size if self.drop_last else 0
        if left_out == count:
            raise ConfigError(
                f"drop_last leaves nothing of {count} samples in batches of {self.batch_size}; "
                "use a smaller batch_size, or no drop_last"
            )
        return count - left_out


def is_stream(given: Given) -> bool:
    """Return whether samples have no index, or batches are the user's own business."""
    if not isinstance(given, DataLoader):
        return isinstance(given, IterableDataset)
    # A plain batch sampler only cuts what its sampler draws, as ``batch_size`` does.
    own_batches = given.batch_size is None and given.batch_sampler is not None
    own_batches &= type(given.batch_sampler) is not BatchSampler
    return own_batches or isinstance(given.dataset, IterableDataset)


def read(
    given: Given,
    *,
    batch_size: int | None,
    collate_fn: Collate | None,
    num_workers: int | None,
    shuffle: bool | None = False,
    seed: int = 0,
) -> Intake:
    """Read a map-style data set, or a ``DataLoader`` over one, which is not a stream.

    Args:
        given: A bare data set is shuffled unless the user has said otherwise.
        batch_size: What the user says beside it, here and below; ``None`` says nothing.
        collate_fn: Makes a batch.
        num_workers: Worker processes.
        shuffle: Another order in each epoch.
        seed: Of these orders.

    Raises:
        ConfigError: There is no batch size, the data set cannot be split, or the sampler splits it
            itself.
    """
    if not isinstance(given, DataLoader):
        if batch_size is None:
            raise ConfigError(
                "batch_size is not given; pass batch_size=32, or a DataLoader that has one"
            )
        given, shuffle = DataLoader(given, batch_size), shuffle is not False
    sampler, size, drop_last = given.sampler, given.batch_size, given.drop_last
    if size is None and isinstance(batches := given.batch_sampler, BatchSampler):
        sampler, size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    if size is None:
        raise ConfigError(
            "the DataLoader has batch_size=None, so its samples are batches of an unknown size; "
            "give it a batch_size, or pass the data set to ddp.loader with one"
        )
    samples, order, remarks = _put_in_order(given.dataset, sampler, shuffle, seed)
    if given.worker_init_fn is not None and given.num_workers:
        remarks.append(
            "worker_init_fn is not called: each sample is loaded with generators seeded by (seed, "
            "epoch, index); open resources in the data set, when the first sample is read"
        )
    return Intake(
        dataset=given.dataset,
        samples=samples,
        order=order,
        seed=seed,
        batch_size=batch_size or size,
        drop_last=drop_last,
        collate_fn=collate_fn or given.collate_fn,
        num_workers=given.num_workers if num_workers is None else num_workers,
        context=given.multiprocessing_context,
        pin_memory=given.pin_memory and pins_memory(),
        remarks=remarks,
    )


def _put_in_order(
    dataset: Any, sampler: Any, shuffle: bool | None, seed: int
) -> tuple[Any, Order, list[str]]:
    """Return what a sampler picks of a data set, its order, and what cannot be guaranteed."""
    kind = type(dataset)
    if getattr(kind, "__len__", None) is None or getattr(kind, "__getitem__", None) is None:
        raise ConfigError(
            f"the data set is a {kind.__name__}, which has no length or cannot be asked for a "
            "sample by index, so it cannot be split; give a data set with len and [index] (a list "
            "does: list(generator)), or wrap it in a torch.utils.data.IterableDataset"
        )
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "the DataLoader has a DistributedSampler, but ddp.loader splits the data itself, by "
            "speed; leave the sampler out, pass shuffle=True, and give batch_size for the whole "
            "team (a DistributedSampler's loader has it for each rank)"
        )
    count = len(sampler)
    whole = count == len(dataset)
    if isinstance(sampler, SequentialSampler) and whole:
        return dataset, Order(count, seed if shuffle else None), []
    mixed = Order(count, None if shuffle is False else seed)
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(dataset, list(sampler.indices)), mixed, []
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return dataset, Order(count, seed, drawn_from=len(dataset)), []
    if isinstance(sampler, RandomSampler) and whole:
        return dataset, mixed, []
    remark = (
        f"the order of samples comes from {type(sampler).__name__}: each position of what it draws "
        "is trained on once an epoch. It must draw from torch's, NumPy's or Python's global "
        "generators (which are seeded by the epoch) or be the same on every rank; otherwise going "
        "on in mid-epoch may repeat or miss samples"
    )
    return dataset, Drawn(sampler, seed), [remark]
