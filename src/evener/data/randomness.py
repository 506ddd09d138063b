"""The generators that augmentation draws from: seeding them, and noticing that nothing draws.

They belong to the process, so threads that load samples at the same time wait for one another.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from evener.data.cursor import derive_seed

generators_lock: Final = threading.RLock()
"""Held from seeding the generators to the last draw that shall follow from the seed."""


def seed_generators(seed: int) -> None:
    """Seed Python's ``random``, NumPy's global generator if imported, and torch's CPU generator.

    ``torch.manual_seed`` would also seed the accelerators' generators, which belong to training.
    """
    with generators_lock:
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed & 0xFFFF_FFFF)
        torch.default_generator.manual_seed(seed)


def seed_training(seed: int) -> None:
    """Seed torch's CPU generator for what a model draws, such as dropout.

    Where ranks are threads, another one may be loading samples: it draws what follows from its own
    seed, and is not told that its data set has drawn.
    """
    with generators_lock:
        # Not torch.manual_seed: for each kind of accelerator that is not in use it formats a
        # traceback, half a millisecond in all.
        torch.default_generator.manual_seed(seed)


#: Readies the generators for what is drawn inside the block, from what it belongs to.
Generators = Callable[..., AbstractContextManager[None]]


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed the generators from ``key``."""
    seed_generators(derive_seed(*key))
    yield


def as_they_are(*_key: int | str) -> AbstractContextManager[None]:
    """Leave the generators alone."""
    return nullcontext()


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the generators that ``seed_generators`` seeds as they were before the block."""
    python_state, torch_state, numpy_state = _states()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)


class DrawWatch:
    """Tells whether a data set draws random numbers: if not, it needs no seeding.

    Seeding three generators takes as long as reading a small sample. So the first batch is watched
    closely, sample by sample. Later, twins of Python's and of NumPy's generator draw what those
    would draw next: while they agree, nobody else has drawn.

    Attributes:
        draws: Whether the data set was ever seen to draw; ``None`` before the first batch.
    """

    def __init__(self) -> None:
        self.draws: bool | None = None
        self._python = random.Random()
        self._numpy: Any = None
        self._torch_state = torch.empty(0)

    @contextmanager
    def closely(self, *key: int | str) -> Iterator[None]:
        """Seed from ``key``, and see by whole states whether anything is drawn."""
        seed_generators(derive_seed(*key))
        before = _states()
        yield
        after = _states()
        moved = before[0] != after[0] or not torch.equal(before[1], after[1])
        self.draws = self.draws or moved or str(before[2]) != str(after[2])

    def start(self, seed: int) -> None:
        """Put the generators where ``look`` can tell whether they have moved."""
        if self._python_moved():
            random.seed(seed)
            self._python.seed(seed)
        if self._numpy_moved():
            numpy = sys.modules["numpy"]
            numpy.random.seed(seed & 0xFFFF_FFFF)
            self._numpy = numpy.random.RandomState(seed & 0xFFFF_FFFF)
        # Not left alone: torch.initial_seed(), which one reads without drawing, should differ.
        torch.default_generator.manual_seed(seed)
        self._torch_state = torch.default_generator.get_state()

    def look(self) -> bool:
        """Return whether anything was drawn or seeded since ``start``."""
        drawn = self._python_moved()
        drawn |= self._numpy_moved()
        drawn |= not torch.equal(torch.default_generator.get_state(), self._torch_state)
        self.draws = self.draws or drawn
        return drawn

    def _python_moved(self) -> bool:
        return random.getrandbits(64) != self._python.getrandbits(64)

    def _numpy_moved(self) -> bool:
        if (numpy := sys.modules.get("numpy")) is None:
            return False
        if self._numpy is None:
            return True
        return bool(numpy.random.random() != self._numpy.random_sample())


def _states() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        torch.default_generator.get_state(),
        None if numpy is None else numpy.random.get_state(),
    )
