"""evener's loop as one plain PyTorch process: what a script's result is compared with.

A script that imports this under the name ``evener`` trains without it: a ``DataLoader``,
``loss.backward()`` and ``optimizer.step()`` on whole batches. Only the order of samples is evener's
own, so that both see the same batches.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from evener.data.order import Permutation


@dataclass
class DdpConfig:
    max_grad_norm: float | None = None


@dataclass
class WindowResult:
    loss: float
    lr: float
    window: int


class Loader:
    def __init__(self, given: Any, batch_size: int | None, max_steps: int | None) -> None:
        if not isinstance(given, DataLoader):
            given = DataLoader(given, batch_size=batch_size, shuffle=has_indices(given))
        self.dataset, self.batch_size = given.dataset, given.batch_size
        self._given, self._next_epoch, self._max_steps = given, 0, max_steps
        self._shuffles = has_indices(given.dataset) and not isinstance(
            given.sampler, SequentialSampler
        )

    def __len__(self) -> int:
        return len(self._given)

    def epoch(self, epoch: int) -> Iterator[Any]:
        options = {"batch_size": self.batch_size, "collate_fn": self._given.collate_fn}
        if self._shuffles:
            size = len(self.dataset)
            order = Permutation(size, 0, epoch)
            options["sampler"] = [order[position] for position in range(size)]
        yield from islice(DataLoader(self.dataset, **options), self._max_steps)

    def __iter__(self) -> Iterator[Any]:
        self._next_epoch += 1
        return self.epoch(self._next_epoch - 1)


def has_indices(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset)


class Ddp:
    rank, world_size, is_main_process, window = 0, 1, True, 0
    device = torch.device("cpu")

    def __init__(
        self, models: list[nn.Module], optimizers: list[Any], scheduler: Any, config: DdpConfig
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._scheduler, self._config = scheduler, config
        self._listeners: list[Callable[[WindowResult], None]] = []
        self._loss = 0.0

    @classmethod
    def setup(
        cls, model: Any, optimizer: Any, scheduler: Any = None, *, config: DdpConfig | None = None
    ) -> Self:
        models = model if isinstance(model, list) else [model]
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        return cls(models, optimizers, scheduler, config or DdpConfig())

    def loader(
        self, given: Any, batch_size: int | None = None, max_steps: int | None = None, **_: Any
    ) -> Loader:
        return Loader(given, batch_size, max_steps)

    def eval_loader(self, dataset: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=batch_size)

    def backward(self, loss: Tensor, optimizer: Any = None) -> None:
        for one in [optimizer] if optimizer else self._optimizers:
            one.zero_grad()
        loss.backward()
        self._loss = loss.item()

    def step(self, optimizer: Any = None) -> WindowResult:
        if self._config.max_grad_norm is not None:
            for model in self._models:
                nn.utils.clip_grad_norm_(model.parameters(), self._config.max_grad_norm)
        result = WindowResult(self._loss, self._optimizers[0].param_groups[0]["lr"], self.window)
        for one in [optimizer] if optimizer else self._optimizers:
            one.step()
        if self._scheduler is not None:
            self._scheduler.step()
        if optimizer in (None, self._optimizers[0]):
            self.window += 1
            for listener in self._listeners:
                listener(result)
        return result

    def on_commit(self, listener: Callable[[WindowResult], None]) -> None:
        self._listeners.append(listener)

    def weighted_mean(self, value: float, weight: float = 1.0) -> float:
        return float(value)

    def gather(self, value: Any) -> Any:
        return value

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
