"""The generators that augmentation draws from: seeding them, and noticing that nothing draws.

They belong to the process, so threads that load samples at the same time wait for one another.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

import torch

from evener.data.cursor import derive_seed

generators_lock: Final = threading.RLock()
"""Held from seeding the generators to the last draw that shall follow from the seed."""

_KNOWN_SEED: Final = 0x6576656E


def seed_generators(seed: int) -> None:
    """Seeds Python's ``random``, NumPy's global generator if imported, and torch's CPU generator.

    ``torch.manual_seed`` would also seed the accelerators' generators, which belong to training.
    """
    with generators_lock:
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed & 0xFFFF_FFFF)
        torch.default_generator.manual_seed(seed)


#: Readies the generators for what is drawn inside the block, from what it belongs to.
Generators = Callable[..., AbstractContextManager[None]]


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seeds the generators from ``key``."""
    seed_generators(derive_seed(*key))
    yield


def as_they_are(*_key: int | str) -> AbstractContextManager[None]:
    """Leaves the generators alone."""
    return nullcontext()


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leaves the generators that ``seed_generators`` seeds as they were before the block."""
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
    closely, sample by sample; later ones with two cheap looks a batch.

    Attributes:
        draws: Whether anything was ever drawn; ``None`` before the first batch.
    """

    def __init__(self) -> None:
        self.draws: bool | None = None
        self._drawn = False
        self._torch_state = torch.empty(0)

    @contextmanager
    def closely(self, *key: int | str) -> Iterator[None]:
        """Seeds from ``key`` and compares whole states; ``settle`` then knows the answer."""
        seed_generators(derive_seed(*key))
        before = _states()
        yield
        after = _states()
        self._drawn |= before[0] != after[0] or not torch.equal(before[1], after[1])
        self._drawn |= str(before[2]) != str(after[2])

    def settle(self) -> None:
        """Ends the close watch."""
        self.draws = self._drawn

    def start(self, seed: int) -> None:
        """Puts the generators where ``look`` can tell whether they have moved."""
        random.seed(_KNOWN_SEED)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(_KNOWN_SEED)
        # Not a constant: torch.initial_seed(), which one reads without drawing, should differ.
        torch.default_generator.manual_seed(seed)
        self._torch_state = torch.default_generator.get_state()

    def look(self) -> bool:
        """Whether anything was drawn or seeded since ``start``; leaves the generators moved on."""
        # The next number tells where they are, in a hundredth of the time to read their states.
        drawn = random.getrandbits(64) != _first_of_python()
        if (numpy := sys.modules.get("numpy")) is not None:
            drawn |= float(numpy.random.random()) != _first_of_numpy()
        drawn |= not torch.equal(torch.default_generator.get_state(), self._torch_state)
        self.draws = self.draws or drawn
        return drawn


def _states() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        torch.default_generator.get_state(),
        None if numpy is None else numpy.random.get_state(),
    )


@cache
def _first_of_python() -> int:
    return random.Random(_KNOWN_SEED).getrandbits(64)


@cache
def _first_of_numpy() -> float:
    return float(sys.modules["numpy"].random.RandomState(_KNOWN_SEED).random())
