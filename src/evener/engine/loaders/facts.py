"""What scripts read on a ``DataLoader``, on evener's loaders, too."""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from evener.data.loader import Pending

#: Makes a batch of a list of samples.
Collate = Callable[[list[Any]], Any]


class Described(Protocol):
    """A ``DataLoader``, or what else says how data is loaded."""

    @property
    def dataset(self) -> Any:
        """The data set that was given, or that of the ``DataLoader`` that was."""
        ...

    @property
    def collate_fn(self) -> Collate | None:
        """Makes a batch; torch's default for ``None``."""
        ...

    @property
    def num_workers(self) -> int:
        """Worker processes of this rank."""
        ...

    @property
    def drop_last(self) -> bool:
        """Whether the samples that fill no whole batch are left out."""
        ...

    @property
    def pin_memory(self) -> bool:
        """Whether batches are copied to page-locked memory."""
        ...


class LikeDataLoader:
    """The attributes of a ``DataLoader`` that scripts read, such as ``len(loader.dataset)``."""

    def __init__(self, given: Described) -> None:
        self.dataset: Any = given.dataset
        self.collate_fn: Collate = given.collate_fn or default_collate
        self.num_workers = given.num_workers
        self.drop_last = given.drop_last
        self.pin_memory = given.pin_memory

    def _received(self, pending: Pending) -> Any:
        """A batch, in page-locked memory where the user's ``DataLoader`` asked for it."""
        batch = pending.result()
        return tree_map(_pinned, batch) if self.pin_memory else batch

    @property
    def sampler(self) -> NoReturn:
        """Not there; the error says why."""
        raise AttributeError(
            "evener's loaders have no sampler: each epoch has an order of its own, which follows "
            "from its number and the seed. Leave sampler.set_epoch(epoch) out, and iterate over "
            "loader.epoch(epoch)"
        )


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf
