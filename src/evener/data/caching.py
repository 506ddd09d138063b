"""A cache in front of a fetcher: a sample is fetched once, and then taken from memory or disk.

It is in the process that trains, so worker processes are asked only for what is missing. It holds
samples before they are collated: batches differ from epoch to epoch, samples must not.
"""

import json
import mmap
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evener.data.fetching import Fetcher, Load, Pending
from evener.data.holdings import Holdings
from evener.data.signature import show_contents
from evener.devices import kind_of
from evener.errors import ConfigError

#: So many samples are fetched twice. If one fetch in ten changes something, 99.8 % are found.
_NUM_CHECKED: Final = 32
#: How often free memory is measured while nothing has to be fetched.
_WATCH_S: Final = 1.0
_PLAIN: Final = (bool, int, float, str, type(None))


class Item(NamedTuple):
    """A sample, taken apart.

    Attributes:
        leaves: Its tensors, which nothing else refers to, and its plain values.
        spec: How they are nested.
        arrays: Positions of tensors that were NumPy's arrays or numbers.
    """

    leaves: list[Any]
    spec: TreeSpec
    arrays: tuple[int, ...]


# ── where items are held ─────────────────────────────────────────────────────────────────────────


class ItemStore(ABC):
    """Where items are held; by default as they are.

    Attributes:
        name: For messages.
        device: Where their tensors are when they are handed out.
    """

    name: str
    device = torch.device("cpu")

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how much is free."""

    def write(self, item: Item) -> Any:
        """Store an item, and return what it is found by."""
        return item

    def read(self, place: Any) -> Item:
        """Return an item that was stored."""
        item: Item = place
        return item

    @abstractmethod
    def free(self, place: Any) -> None:
        """Release what is not released with ``place`` itself."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent."""


@final
class MemoryStore(ItemStore):
    """The memory of a device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.name, self.device = f"in the memory of {device}", device

    def free_bytes(self) -> int:
        """Return how much memory is free."""
        return kind_of(self.device).free_bytes(self.device)

    def free(self, place: Any) -> None:
        """Nothing else."""

    def close(self) -> None:
        """Nothing is held here."""


@final
class DiskStore(ItemStore):
    """A file without a name, which the system removes when this process ends.

    An item is a line of JSON with its plain values, and its tensors as safetensors.

    Args:
        folder: Where the file is; the temporary directory if empty.

    Raises:
        ConfigError: It cannot be written there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder or tempfile.gettempdir())
        self.name = f"in {self._folder}"
        try:
            self._file: Any = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # see close
        except OSError as error:
            raise ConfigError(
                f"cache={f'disk:{folder}' if folder else 'disk'!r} cannot write to "
                f"{self._folder}: {error}; give a folder on a disk of this host, as in "
                "cache='disk:/scratch'"
            ) from error
        self._end = 0

    def free_bytes(self) -> int:
        """Return how much of the disk is free."""
        return shutil.disk_usage(self._folder).free

    def write(self, item: Item) -> tuple[int, int, Item]:
        """Append an item to the file; return its offset and size, and the rest of it."""
        leaves = {str(k): leaf for k, leaf in enumerate(item.leaves)}
        tensors = {k: leaf for k, leaf in leaves.items() if isinstance(leaf, Tensor)}
        plain = {k: leaf for k, leaf in leaves.items() if k not in tensors}
        data = json.dumps(plain).encode() + b"\n" + safetensors.torch.save(tensors)
        start = self._file.seek(self._end)
        self._file.write(data)
        self._end += len(data)
        return start, len(data), item._replace(leaves=[])

    def read(self, place: tuple[int, int, Item]) -> Item:
        """Read an item."""
        start, size, item = place
        self._file.seek(start)
        plain, _, tensors = self._file.read(size).partition(b"\n")
        leaves = json.loads(plain) | safetensors.torch.load(tensors)
        return item._replace(leaves=[leaves[str(k)] for k in range(len(leaves))])

    def free(self, place: tuple[int, int, Item]) -> None:
        """Take the pages that an item fills out of the file, where the system can do that."""
        start, size, _ = place
        self._file.flush()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            with (
                suppress(AttributeError, OSError),
                mmap.mmap(self._file.fileno(), length, offset=first) as pages,
            ):
                pages.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def find_store(cache: str, device: torch.device) -> ItemStore:
    """Return the store that a user has named.

    Args:
        cache: As ``Ddp.loader`` takes it.
        device: The rank's.

    Raises:
        ConfigError: It is none, or cannot be used.
    """
    kind, _, folder = str(cache).partition(":")
    if kind == "disk":
        return DiskStore(folder)
    if cache == "device":
        return MemoryStore(device)
    if cache == "memory":
        return MemoryStore(torch.device("cpu"))
    raise ConfigError(
        f"cache={cache!r} is not known; give 'device', 'memory', 'disk' (in the "
        "temporary directory) or 'disk:FOLDER', or leave it out"
    )


# ── the cache ────────────────────────────────────────────────────────────────────────────────────


@final
class Cache:
    """Samples by index: those that are held, and those that were fetched for the present batch.

    Args:
        store: Where they are held.
        name: The data set's, for messages.
        option: The user's ``cache``, for messages.
        copies: Whether tensors are handed out as copies, for a ``collate_fn`` that may change them.

    Attributes:
        held: Which samples are held.
    """

    def __init__(self, store: ItemStore, name: str, option: str, *, copies: bool) -> None:
        self.held = Holdings()
        self._store, self._name, self._option, self._copies = store, name, option, copies
        self._fresh: dict[int, Item] = {}
        #: What the store has returned for those that are held.
        self._places: dict[int, Any] = {}
        self._spec: TreeSpec | None = None
        self._unchecked = _NUM_CHECKED
        self._remark = ""

    def __getitem__(self, index: int) -> Any:
        """Return a sample, in containers of its own."""
        item = self._fresh.get(index)
        if item is None:
            self.held.use(index)
            item = self._store.read(self._places[index])
        leaves = list(item.leaves)
        if self._copies:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for k in item.arrays:
            leaves[k] = leaves[k].numpy()[()]
        return tree_unflatten(leaves, item.spec)

    def add(self, samples: Mapping[int, Any], fetch_again: Callable[[list[int]], Any]) -> None:
        """Keep samples until ``forget``, and from then on where there is room.

        Args:
            samples: By index.
            fetch_again: Fetches samples with other random numbers; called for the first few.

        Raises:
            ConfigError: They are random, or contain what cannot be held.
        """
        chosen = list(samples)[: self._unchecked]
        self._unchecked -= len(chosen)
        for index, again in zip(chosen, fetch_again(chosen) if chosen else (), strict=True):
            if show_contents(samples[index]) != show_contents(again):
                raise ConfigError(
                    f"sample {index} of {self._name} differs when it is fetched again, and "
                    f"cache={self._option!r} would repeat it as it was at first; move what is "
                    "random into collate_fn, which is called for every batch, or leave cache out"
                )
        for index, sample in samples.items():
            item = self._fresh[index] = self._take_apart(index, sample)
            size = sum(getattr(leaf, "nbytes", sys.getsizeof(leaf)) for leaf in item.leaves)
            if index not in self.held and self.held.admit(index, size):
                self._places[index] = self._store.write(item)

    def forget(self) -> None:
        """Forget samples that were added and are not held."""
        self._fresh.clear()

    def fit(self) -> None:
        """Drop samples if other programs need the memory."""
        for index in self.held.fit(self._store.free_bytes()):
            self._store.free(self._places.pop(index))

    @property
    def remark(self) -> str:
        """How much is held, from when that has stopped growing; always the same text."""
        if self.held.is_full and not self._remark:
            self._remark = (
                f"cache={self._option!r} holds {len(self.held):,} samples "
                f"({self.held.num_bytes / 2**30:.2f} GiB) {self._store.name} of this rank, and no "
                "more: what it leaves free is never less. The others are fetched in every epoch"
            )
        return self._remark

    def close(self) -> None:
        """Drop all samples; idempotent."""
        self._places.clear()
        self._store.close()

    def _take_apart(self, index: int, sample: Any) -> Item:
        leaves, spec = tree_flatten(sample)
        if spec == self._spec:
            spec = self._spec  # one for all: it is larger than many a sample
        self._spec = spec
        arrays = tuple(k for k, leaf in enumerate(leaves) if _is_array(leaf))
        keeps_arrays = self._option != "device"
        return Item([self._own(leaf, index) for leaf in leaves], spec, arrays * keeps_arrays)

    def _own(self, leaf: Any, index: int) -> Any:
        if type(leaf) in _PLAIN:
            return leaf
        with suppress(TypeError, ValueError):  # arrays of texts or objects, bytes in odd order
            tensor = torch.from_numpy(np.array(leaf, order="C")) if _is_array(leaf) else leaf
            if type(tensor) is Tensor and tensor.layout == torch.strided:
                form = torch.contiguous_format
                return tensor.detach().to(self._store.device, copy=True, memory_format=form)
        raise ConfigError(
            f"sample {index} of {self._name} contains a {type(leaf).__name__}, which "
            f"cache={self._option!r} cannot hold; return dicts, lists and tuples of dense tensors, "
            "NumPy arrays of numbers, numbers and strings, or leave cache out"
        )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


@final
class CachedFetcher(Fetcher):
    """Loads micro-batches from a cache, and what that lacks by another fetcher.

    Args:
        fetcher: Loads lists of samples.
        cache: Holds them.
        collate: Makes a batch of what the cache has, in the thread that asks for it.
    """

    def __init__(self, fetcher: Fetcher, cache: Cache, collate: Load) -> None:
        self._fetcher, self._cache, self._collate = fetcher, cache, collate
        self._measured_s = 0.0

    @property
    def remark(self) -> str:
        """What the user should know."""
        return self._cache.remark

    def submit(self, epoch: int, indices: Sequence[int]) -> Pending:
        """Start to load what is missing; see ``Fetcher``."""
        wanted = [int(index) for index in indices]
        missing = self._missing(wanted)
        coming = self._fetcher.submit(epoch, missing) if missing else None
        return Pending(self, epoch, wanted, partial(self._load, missing, coming))

    def close(self) -> None:
        """End the other fetcher, and drop all samples; idempotent."""
        self._fetcher.close()
        self._cache.close()

    def _load(
        self, missing: list[int], coming: Pending | None, epoch: int, indices: list[int]
    ) -> Any:
        fetched = dict(zip(missing, coming.result(), strict=True)) if coming else {}
        if fetched or time.monotonic() > self._measured_s + _WATCH_S:
            self._cache.fit()
            self._measured_s = time.monotonic()
        if gone := [index for index in self._missing(indices) if index not in fetched]:
            again = self._fetcher.submit(epoch, gone).result()
            fetched |= zip(gone, again, strict=True)
        try:
            self._cache.add(fetched, lambda few: self._fetcher.submit(epoch + 1, few).result())
            return self._collate(epoch, indices)
        finally:
            self._cache.forget()

    def _missing(self, indices: Sequence[int]) -> list[int]:
        return [index for index in dict.fromkeys(indices) if index not in self._cache.held]
