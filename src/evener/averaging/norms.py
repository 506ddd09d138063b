"""2-norms of gradients, and numbers that devices compute."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from evener.devices import DeviceQueue, float64_device

_LONG, _PIECE = 2**20, 2**16
"""From how many elements on a norm is taken piece by piece, and a piece's. On a CPU, one sum of
squares in float32 over 50 million elements is 0.8 % too small."""

_HALF = (torch.float16, torch.bfloat16)


class Reading:
    """Numbers that devices compute, to be read by the host when they are due.

    Args:
        parts: Tensors of at most one dimension.
        queue: The queue of the device on which all of them are, if it has milestones. The copy into
            host memory is queued at once. So reading waits for what was queued before, and not for
            what comes after.
    """

    def __init__(self, parts: Sequence[torch.Tensor], queue: DeviceQueue | None = None) -> None:
        self._sizes = [part.numel() for part in parts]
        devices = {part.device for part in parts}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        own = [part.reshape(-1).to(device) for part in parts]
        self._numbers = torch.cat(own) if own else torch.empty(0)
        self._arrival = None
        if queue is not None:
            self._numbers = queue.fetch(self._numbers)
            self._arrival = queue.mark()

    def read(self) -> list[list[float]]:
        """Return the numbers of each part; wait until they are there."""
        if self._arrival is not None:
            self._arrival.wait()
        numbers = iter(self._numbers.tolist())
        return [list(islice(numbers, size)) for size in self._sizes]


def clip(factor: float, norm: float, max_norm: float | None) -> float:
    """Return ``factor``, made smaller so that a gradient of 2-norm ``norm`` gets ``max_norm``."""
    return factor if max_norm is None else factor * min(1.0, max_norm / (norm + 1e-6))


def norm_of(groups: Sequence[list[torch.Tensor]]) -> float:
    """Return the 2-norm of groups of tensors of one device and dtype; finite whenever they are."""
    norm = 0.0
    for dtype in (None, torch.float64):  # whose sums do not overflow
        norm = root(Reading([norms_of(tensors, dtype) for tensors in groups if tensors]).read())
        if math.isfinite(norm):
            break
    return norm


def norms_of(
    tensors: list[torch.Tensor], dtype: torch.dtype | None = None, *, each: bool = False
) -> torch.Tensor:
    """Return the 2-norm of tensors of one device and dtype, or that of each; half in float32."""
    own = tensors[0].dtype
    if dtype is torch.float64:
        tensors = [t.to(float64_device(t.device)) for t in tensors]
    wide = dtype or (torch.float32 if own in _HALF else own)
    if each:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide))
    pieces: list[torch.Tensor] = []
    for t in tensors:
        is_long = t.is_cpu and t.numel() >= _LONG and t.is_contiguous()
        pieces += torch.split(t.detach().view(-1), _PIECE) if is_long else [t]
    norms = torch._foreach_norm(pieces, 2, dtype=wide)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def root(norms: Iterable[Iterable[float]]) -> float:
    """Return the 2-norm of all together; NaN if one of them is."""
    squares = 0.0
    for values in norms:
        for norm in values:
            squares += norm * norm
    return math.sqrt(squares)
