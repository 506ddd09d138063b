"""How one micro-batch is loaded, and what a fetcher promises.

Randomness is derived, not stored: before each ``dataset[index]`` the generators that augmentation
usually draws from are seeded from (seed, epoch, index). A sample is then the same whoever loads it,
whatever was loaded before it, and after a resume. Data sets that draw nothing are not seeded; one
that draws for the first time in a later batch has that batch loaded once more, seeded.
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from evener.closing import Closing
from evener.data.cursor import derive_seed
from evener.data.randomness import (
    DrawWatch,
    Generators,
    as_they_are,
    generators_lock,
    seeded,
)
from evener.errors import DataError, UsageError

DEFAULT_TIMEOUT_S: Final = 600.0
"""How long ``Pending.result`` waits for a batch unless told otherwise."""


class MapDataset(Protocol):
    """A map-style data set: a sample for each index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample of ``index``."""
        ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is needed to turn (epoch, indices) into a batch.

    Attributes:
        dataset: Map-style data set.
        collate_fn: Makes one batch of a list of samples.
        seed: Seed of the run.
        watch: Whether the data set or ``collate_fn`` draws random numbers.
    """

    dataset: MapDataset
    collate_fn: Callable[[list[Any]], Any]
    seed: int
    watch: DrawWatch = field(default_factory=DrawWatch)

    @property
    def dataset_name(self) -> str:
        """Type of the data set, for messages."""
        return type(self.dataset).__qualname__

    def batch(self, epoch: int, indices: Sequence[int]) -> Any:
        """Load the samples of ``indices`` and collate them.

        The process's generators are left wherever loading has moved them.
        """
        with generators_lock:
            if self.watch.draws is None:
                return self.assemble(epoch, indices, self.watch.closely)
            if not self.watch.draws:
                self.watch.start(derive_seed(self.seed, epoch, indices[0]))
                batch = self.assemble(epoch, indices, as_they_are)
                if not self.watch.look():
                    return batch
            return self.assemble(epoch, indices, seeded)

    def assemble(self, epoch: int, indices: Sequence[int], generators: Generators) -> Any:
        """Load and collate a batch, with its generators as told; see ``batch``.

        Raises:
            DataError: The data set or ``collate_fn`` raised; names the index or the indices, and
                where it happened.
        """
        dataset, samples, only_reads = self.dataset, [], generators is as_they_are
        for index in indices:
            try:
                if only_reads:
                    samples.append(dataset[index])
                    continue
                with generators(self.seed, epoch, index):
                    samples.append(dataset[index])
            except Exception as error:
                raise DataError(
                    f"sample {index} of epoch {epoch} could not be loaded from "
                    f"{self.dataset_name}: {describe(error)}. Mend or leave out this sample; "
                    f"dataset[{index}] alone reproduces the error"
                ) from error
        try:
            # ``collate_fn`` may draw random numbers (masking), so it is seeded too.
            with generators(self.seed, epoch, indices[0], "collate"):
                if self.collate_fn is default_collate and type(samples[0]) is Tensor:
                    return torch.stack(samples)  # the same, without the search for what they are
                return self.collate_fn(samples)
        except Exception as error:
            raise DataError(
                f"{name_samples(epoch, indices)} from {self.dataset_name} could not be "
                f"collated: {describe(error)}. Samples of one batch need equal shapes, or pass a "
                f"collate_fn that pads them"
            ) from error


def describe(error: Exception) -> str:
    """Return an exception in one line, with its place: user errors come without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


class Pending(ABC):
    """A batch that has been submitted.

    Attributes:
        epoch: Epoch of its samples.
        indices: Their indices in the data set.
    """

    def __init__(self, epoch: int, indices: list[int]) -> None:
        self.epoch = epoch
        self.indices = indices
        self._outcome: tuple[Exception | None, Any] | None = None

    def result(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Wait for the batch; asking again returns the same object or raises the same error.

        Args:
            timeout_s: Longest wait, in seconds. A load in the calling thread cannot be cut short.

        Raises:
            DataError: A sample could not be loaded (named by index), the worker died, or the
                deadline has passed.
        """
        if self._outcome is None:
            self._wait(timeout_s)
        assert self._outcome is not None
        error, batch = self._outcome
        if error is not None:
            raise error
        return batch

    def settle(self, error: Exception | None, batch: Any = None) -> None:
        """Keep what has come of it."""
        self._outcome = error, batch

    @property
    def is_settled(self) -> bool:
        """Whether ``result`` returns at once."""
        return self._outcome is not None

    @abstractmethod
    def _wait(self, timeout_s: float) -> None:
        """Return once it is settled, or raise."""

    def _late(self, timeout_s: float, who: str) -> DataError:
        """Return the error that says who did not deliver it in time."""
        return DataError(
            f"{name_samples(self.epoch, self.indices)} did not arrive from {who} within "
            f"{timeout_s:g} s. Storage may hang, or loading is slow: time dataset[index] alone, "
            f"or use more workers"
        )


class Fetcher(Closing):
    """Loads micro-batches ahead of need, in the order in which they are submitted.

    Each submitted batch stays in memory until its ``Pending`` is dropped: the *caller* bounds the
    number of submissions that are outstanding. One thread at a time may use a fetcher.

    Args:
        dataset: Map-style data set.
        collate_fn: Makes one batch of a list of samples; torch's ``default_collate`` if None.
        seed: Seed of the run; with epoch and index it fixes the randomness of each sample.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._recipe = Recipe(dataset, collate_fn or default_collate, seed)
        self._closed = False

    def submit(self, epoch: int, indices: Sequence[int]) -> Pending:
        """Start to load the samples of ``indices`` as one batch and return at once.

        Args:
            epoch: Epoch, for the randomness of augmentation.
            indices: Indices into the data set, at least one.

        Raises:
            UsageError: The fetcher is closed, or ``indices`` is empty.
        """
        if self._closed:
            raise UsageError("this fetcher is closed: submit before close()")
        if not indices:
            raise UsageError("a batch needs at least one index: do not submit an empty share")
        return self._submit(epoch, [int(index) for index in indices])

    @abstractmethod
    def close(self) -> None:
        """End threads and processes, also while loads are outstanding; idempotent."""

    @abstractmethod
    def _submit(self, epoch: int, indices: list[int]) -> Pending:
        """Start a load."""


def name_samples(epoch: int, indices: Sequence[int]) -> str:
    """Name samples for a message; the first eight if there are more."""
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"samples [{shown}] of epoch {epoch}"
