"""Data sets that worker processes can import."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Augmented(Dataset[Any]):
    """Draws from every generator that augmentation usually draws from."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"index": torch.tensor(index), "draws": torch.tensor(draws, dtype=torch.float64)}


class Squares(Dataset[Any]):
    """Raises for the indices in ``broken``."""

    def __init__(self, *, broken: tuple[int, ...] = (), length: int = 4) -> None:
        self.broken, self.length = broken, length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.broken:
            raise KeyError(f"no row {index}")
        return torch.full((self.length,), index * index)


class Texts(Dataset[Any]):
    """A sample of plain data, ``size`` characters long."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": chr(97 + index % 26) * self.size, "index": index}


class Unreadable:
    """Can be sent, but not received."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def unreadable_collate(samples: list[torch.Tensor]) -> Any:
    """The first number of each sample; the batch of the sample 9 cannot be received."""
    numbers = [int(sample[0]) for sample in samples]
    return Unreadable() if 9 in numbers else numbers


class Stuck(Dataset[Any]):
    """Says that it was reached, then never returns."""

    def __init__(self, reached: Path) -> None:
        self.reached = reached

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reached.touch()
        threading.Event().wait()
        raise AssertionError("unreachable")


class Suicidal(Dataset[Any]):
    """Dies by a signal (or by ``sys.exit`` for 0) when sample 2 is asked for."""

    def __init__(self, number: int = signal.SIGKILL) -> None:
        self.number = number

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            if self.number == 0:
                sys.exit(3)
            os.kill(os.getpid(), self.number)
            time.sleep(30)
        return torch.tensor(index)


class Unpicklable(Dataset[Any]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        return index


def keep_list(samples: list[Any]) -> list[Any]:
    return samples


def masking_collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = torch.utils.data.default_collate(samples)
    batch["mask"] = torch.rand(len(samples))
    return batch
