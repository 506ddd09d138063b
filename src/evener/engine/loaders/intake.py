"""What a user's data set or ``DataLoader`` asks for, in evener's terms."""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any, Protocol, Self, final

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
from evener.data.order import EpochOrder
from evener.data.randomness import generators_lock, preserved_generators, seed_generators
from evener.devices import pins_memory
from evener.errors import ConfigError, UsageError


class Indices(Protocol):
    """Indices into the data set, by position in the epoch."""

    def __getitem__(self, position: int, /) -> int:
        """The index at a position."""
        ...


class Order(ABC):
    """In which order an epoch goes through the data set.

    Attributes:
        num_samples: Positions of an epoch.
    """

    num_samples: int

    @abstractmethod
    def of(self, epoch: int) -> Indices:
        """The order of an epoch, the same on every rank."""

    def fingerprint(self, indices: Indices) -> int:
        """What ranks compare, below 2**53; 0 where the order cannot differ."""
        return 0


@final
class Shuffled(Order):
    """Another permutation in each epoch, from the seed."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed

    def of(self, epoch: int) -> Indices:
        """The permutation of the epoch."""
        return EpochOrder(self.num_samples, self._seed, epoch)


@final
class InOrder(Order):
    """From first to last, in every epoch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def of(self, epoch: int) -> Indices:
        """The positions themselves."""
        return range(self.num_samples)


@final
class Drawn(Order):
    """As a sampler of the user draws it, from generators that are seeded by the epoch."""

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self.num_samples = len(sampler)  # type: ignore[arg-type]
        self._sampler = sampler
        self._seed = seed

    def of(self, epoch: int) -> Indices:
        """Draws the epoch's indices.

        Raises:
            UsageError: The sampler does not give as many as its length says.
        """
        with generators_lock, preserved_generators():
            seed_generators(derive_seed(self._seed, "sampler", epoch))
            indices = array("q", map(int, self._sampler))
        if len(indices) != self.num_samples:
            raise UsageError(
                f"{type(self._sampler).__name__} gave {len(indices)} indices in epoch {epoch}, its "
                f"length is {self.num_samples}; let __len__ say how many it gives"
            )
        return indices

    def fingerprint(self, indices: Indices) -> int:
        """A hash of the indices, formed of their 8 bytes each as they lie in memory."""
        assert isinstance(indices, array)
        return int.from_bytes(hashlib.blake2b(indices, digest_size=6).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A map-style data set and how to go through it.

    Attributes:
        dataset: Map-style data set, as given.
        samples: What is read by index: the data set, or a part of it.
        order: Which sample comes when.
        batch_size: Samples of an optimizer step, if the user has said so.
        drop_last: Leave out the samples that fill no whole batch.
        collate_fn: Makes a batch; torch's default for ``None``.
        num_workers: Worker processes.
        context: How they start, where the user has named it.
        pin_memory: Copy batches to page-locked memory.
        remarks: What cannot be kept or guaranteed, for the user.
    """

    dataset: Any
    samples: Any
    order: Order
    batch_size: int | None
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    context: BaseContext | None = None
    pin_memory: bool = False
    remarks: list[str] = field(default_factory=list)

    def override(
        self,
        batch_size: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int | None,
    ) -> Self:
        """The same with what the user says beside it; ``None`` says nothing."""
        return replace(
            self,
            batch_size=self.batch_size if batch_size is None else batch_size,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            num_workers=self.num_workers if num_workers is None else num_workers,
        )


def is_stream(given: Dataset[Any] | DataLoader[Any]) -> bool:
    """Whether samples cannot be asked for by index, or batches are the user's own business."""
    if isinstance(given, DataLoader):
        own_batches = given.batch_size is None and given.batch_sampler is not None
        own_batches &= not _is_plain_batches(given.batch_sampler)
        return own_batches or isinstance(given.dataset, IterableDataset)
    return isinstance(given, IterableDataset)


def read_dataset(dataset: Any, *, shuffle: bool, seed: int) -> Intake:
    """A bare map-style data set."""
    num_samples = _count(dataset)
    order = Shuffled(num_samples, seed) if shuffle else InOrder(num_samples)
    return Intake(dataset=dataset, samples=dataset, order=order, batch_size=None)


def read_loader(loader: DataLoader[Any], *, shuffle: bool | None, seed: int) -> Intake:
    """A ``DataLoader`` over a map-style data set.

    Raises:
        ConfigError: Its sampler splits the data among ranks itself.
    """
    sampler, batch_size, drop_last = loader.sampler, loader.batch_size, loader.drop_last
    batches = loader.batch_sampler
    if batch_size is None and isinstance(batches, BatchSampler):
        sampler, batch_size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    if batch_size is None:
        raise ConfigError(
            "the DataLoader has batch_size=None, so its samples are batches of an unknown size; "
            "give it a batch_size, or pass the data set to ddp.loader with one"
        )
    samples, remarks = loader.dataset, []
    num_samples = _count(samples)
    order: Order
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "the DataLoader has a DistributedSampler, but ddp.loader splits the data itself, by "
            "speed; leave the sampler out, pass shuffle=True, and give batch_size for the whole "
            "team (a DistributedSampler's loader has it for each rank)"
        )
    if isinstance(sampler, SequentialSampler) and len(sampler) == num_samples:
        order = Shuffled(num_samples, seed) if shuffle else InOrder(num_samples)
    elif isinstance(sampler, RandomSampler) and _is_plain(sampler, num_samples):
        order = InOrder(num_samples) if shuffle is False else Shuffled(num_samples, seed)
    elif isinstance(sampler, SubsetRandomSampler):
        samples = Subset(samples, list(sampler.indices))
        order = InOrder(len(sampler)) if shuffle is False else Shuffled(len(sampler), seed)
    else:
        order = Drawn(sampler, seed)
        remarks.append(
            f"the order of samples comes from {type(sampler).__name__}: each position of what it "
            "draws is trained on once an epoch. It must draw from torch's, NumPy's or Python's "
            "global generators (which are seeded by the epoch) or be the same on every rank; "
            "otherwise going on in mid-epoch may repeat or miss samples"
        )
    if loader.worker_init_fn is not None and loader.num_workers:
        remarks.append(
            "worker_init_fn is not called: each sample is loaded with generators seeded by (seed, "
            "epoch, index); open resources in the data set, when the first sample is read"
        )
    return Intake(
        dataset=loader.dataset,
        samples=samples,
        order=order,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        context=loader.multiprocessing_context,
        pin_memory=loader.pin_memory and pins_memory(),
        remarks=remarks,
    )


def _is_plain(sampler: RandomSampler, num_samples: int) -> bool:
    return not sampler.replacement and sampler.num_samples == num_samples


def _is_plain_batches(batches: object) -> bool:
    """Whether a batch sampler only cuts what its sampler draws, as ``batch_size`` does."""
    return type(batches) is BatchSampler


def _count(dataset: Any) -> int:
    """Samples of a map-style data set.

    Raises:
        ConfigError: It is none.
    """
    kind = type(dataset)
    if getattr(kind, "__len__", None) is None or getattr(kind, "__getitem__", None) is None:
        raise ConfigError(
            f"the data set is a {kind.__name__}, which has no length or cannot be asked for a "
            "sample by index, so it cannot be split; give a data set with len and [index] (a list "
            "does: list(generator)), or wrap it in a torch.utils.data.IterableDataset"
        )
    return len(dataset)
