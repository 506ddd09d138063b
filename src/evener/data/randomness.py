"""The generators that augmentation draws from: seeding them, and noticing that nothing draws.

They belong to the process, so threads that load samples at the same time wait for one another.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

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
    seed, and does not learn that its data set has drawn.
    """
    with generators_lock:
        # Not torch.manual_seed: for each kind of accelerator that is not in use it formats a
        # traceback, half a millisecond in all.
        torch.default_generator.manual_seed(seed)


class DrawWatch:
    """Detects whether random numbers are drawn, without the cost of seeding the generators.

    Twins of Python's and of NumPy's generator draw what those would draw next: while they agree,
    no other code has drawn.
    """

    def __init__(self) -> None:
        self._python = random.Random()
        self._numpy: Any = None
        self._torch_state = torch.empty(0)

    def start(self, seed: int) -> None:
        """Put the generators where ``has_drawn`` can tell whether they have moved."""
        if self._has_moved():
            seed_generators(seed)
            self._python.seed(seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                self._numpy = numpy.random.RandomState(seed & 0xFFFF_FFFF)
        # Not left alone: torch.initial_seed(), which one reads without drawing, should differ.
        torch.default_generator.manual_seed(seed)
        self._torch_state = torch.default_generator.get_state()

    def has_drawn(self) -> bool:
        """Return whether anything was drawn or seeded since ``start``."""
        torch_state = torch.default_generator.get_state()
        return self._has_moved() or not torch.equal(torch_state, self._torch_state)

    def _has_moved(self) -> bool:
        numpy = sys.modules.get("numpy")
        moved = random.getrandbits(64) != self._python.getrandbits(64)
        if numpy is not None:
            twin = self._numpy
            moved |= twin is None or numpy.random.random_sample() != twin.random_sample()
        return moved


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the generators that ``seed_generators`` seeds as they were before the block."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state = numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
