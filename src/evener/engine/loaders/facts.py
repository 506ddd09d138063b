"""What scripts read on a ``DataLoader``, on evener's loaders, too."""

from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from evener.data.fetching import Pending
from evener.engine.loaders.intake import Collate, Intake

#: What says how data is loaded.
Described = DataLoader[Any] | Intake


class LikeDataLoader:
    """The attributes of a ``DataLoader`` that scripts read, such as ``len(loader.dataset)``."""

    def __init__(self, given: Described) -> None:
        self.dataset: Any = given.dataset
        self.collate_fn: Collate = given.collate_fn
        self.num_workers = given.num_workers
        self.drop_last = given.drop_last
        self.pin_memory = given.pin_memory

    def _received(self, pending: Pending) -> Any:
        """Return a batch, in page-locked memory where the user's ``DataLoader`` asked for it."""
        batch = pending.result()
        return tree_map_only(Tensor, Tensor.pin_memory, batch) if self.pin_memory else batch

    @property
    def sampler(self) -> NoReturn:
        """Raise the error that says why this loader has no sampler."""
        raise AttributeError(
            "evener's loaders have no sampler: each epoch has an order of its own, which follows "
            "from its number and the seed. Leave sampler.set_epoch(epoch) out, and iterate over "
            "loader.epoch(epoch)"
        )
