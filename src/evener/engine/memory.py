"""Errors of a device without memory left, and the micro-batch sizes that fit on each rank."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

_WORDS: Final = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or this computer, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def explain(error: BaseException, samples: int) -> None:
    """Add the remedy to an out-of-memory error of a micro-batch; leave other errors alone."""
    if not is_out_of_memory(error) or samples < 1 or getattr(error, "__notes__", None):
        return
    if samples == 1:
        error.add_note("evener: not even a micro-batch of one sample fits; use a smaller model")
        return
    error.add_note(
        f"evener: a micro-batch of {samples} samples does not fit into the memory of this rank, "
        "and a batch that has been handed out cannot be repeated. Give "
        f"ddp.loader(micro_batch_size=...) a smaller number on this rank, such as {samples // 2}; "
        "other ranks may keep theirs"
    )


class MicroBatchTooLarge(Exception):
    """Thrown into a loader's generator: its last micro-batch did not fit into memory.

    Args:
        samples: Samples of that micro-batch, if the loader raises it again because it has no
            smaller one.
    """

    def __init__(self, samples: int = 0) -> None:
        super().__init__(samples)
        self.samples = samples


class MicroBatchLimits:
    """The largest micro-batch that fits, for each rank where memory has run out.

    Each rank finds its own; the team learns them when a window is closed, as the cost of a share
    depends on them.

    Attributes:
        base: Largest micro-batch where memory sets no limit.
        own: This rank's limit; 0 while none is known.
        known: What the team knows, by rank; 0 for no limit.
    """

    def __init__(self, world_size: int) -> None:
        self.base: int | None = None
        self.own = 0
        self.known = [0] * world_size

    @property
    def sizes(self) -> list[int | None]:
        """Return the largest micro-batch by rank; ``None`` where nothing sets a limit."""
        limits = [[size for size in (self.base, limit) if size] for limit in self.known]
        return [min(sizes, default=None) for sizes in limits]

    def start_with(self, size: int) -> None:
        """Take the largest micro-batch where memory sets no limit."""
        self.base = size

    def shrink(self, samples: int) -> None:
        """Take half of ``samples``, which did not fit, as this rank's new limit."""
        self.own = max(1, samples // 2)

    def learn(self, limits: Mapping[int, int]) -> bool:
        """Take what ranks report in a round; return whether something is new."""
        before = self.known
        self.known = [limits.get(rank, limit) for rank, limit in enumerate(before)]
        return self.known != before

    def state_dict(self, members: Sequence[str]) -> dict[str, int]:
        """Return the limits by member, where there are any."""
        return {m: limit for m, limit in zip(members, self.known, strict=True) if limit}

    def load_state_dict(self, state: Mapping[str, int], members: Sequence[str], rank: int) -> None:
        """Take over limits of members that are here."""
        self.known = [int(state.get(member, 0)) for member in members]
        self.own = self.known[rank]
