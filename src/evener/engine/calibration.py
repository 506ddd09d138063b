"""The speed of a rank's device, timed on matrix products before the first window.

It never touches the user's model, loop or data: batch statistics, contrastive losses, compiled
models and optimizers that alternate depend on what they are given. So it only compares ranks, and
does not predict the time of the user's micro-batches. The first windows replace it.
"""

from typing import Final

import torch

from evener.devices import kind_of
from evener.engine.emulate import Slowdown
from evener.engine.share import Stopwatch

NUM_SLICES: Final = 4
"""Timed slices, of which the best counts: what else a machine does makes a slice longer."""

_SLICE_S: Final = 0.01
"""What a slice is meant to take, the emulation of a slow rank included."""

_MOST_REPEATS: Final = 100

_WIDTH: Final = {"cpu": 256}
_USUAL_WIDTH: Final = 1024
"""Width of the matrices: large enough to keep a device busy, small enough for a slow one."""


@torch.no_grad()
def time_slices(device: torch.device, dtype: torch.dtype, slowdown: Slowdown) -> float:
    """Return this rank's floating-point operations per second; all ranks call it at the same time.

    Takes less than 0.1 s, memory for three small matrices, and no random numbers.

    Args:
        device: What the rank computes on.
        dtype: What its forward computes in.
        slowdown: Stretches the slices of a rank that is emulated slower.

    Returns:
        The speed; 0.0 where the clock did not move.
    """
    width = _WIDTH.get(device.type, _USUAL_WIDTH)
    left, right = (torch.full((width, width), 0.5**n, device=device, dtype=dtype) for n in (1, 2))
    result = torch.empty_like(left)

    def seconds(repeats: int) -> float:
        watch = Stopwatch(slowdown)
        for _ in range(repeats):
            torch.mm(left, right, out=result).relu_()
        kind_of(device).finish(device)
        return watch.stop().seconds

    seconds(1)  # includes one-time work
    one_s = seconds(1)
    repeats = max(1, min(int(_SLICE_S / one_s), _MOST_REPEATS)) if one_s > 0 else 1
    best_s = min(seconds(repeats) for _ in range(NUM_SLICES))
    return 2.0 * width**3 * repeats / best_s if best_s > 0 else 0.0
