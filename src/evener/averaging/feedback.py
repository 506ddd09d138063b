"""Error feedback: what rounding takes from one exchange is added to the next."""

from collections.abc import MutableMapping
from typing import final

from torch import Tensor, float32, zeros_like
from torch.utils.weak import WeakTensorKeyDictionary

from evener.comm.base import Communicator
from evener.comm.rounding import WIRES


@final
class ErrorFeedback:
    """Keeps what was lost, for each buffer that is exchanged, at the same place.

    So a buffer may be cut into other pieces each time. Ranks of one generation keep it; others
    begin without any. If the result of an exchange is dropped, ``clear`` must follow: a gradient
    that is not finite may have other numbers that are huge, and rounding took much from these.

    Args:
        wire: What numbers travel in between hosts; see ``WIRES``.

    Attributes:
        bits: Those of a number on its way.
    """

    def __init__(self, wire: str = "float32") -> None:
        self.bits = WIRES[wire]
        self._comm: Communicator | None = None
        self._scale = 1.0
        self._lost: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def use(self, comm: Communicator) -> None:
        """Exchange over ``comm`` from now on; begin without anything if it is another one."""
        if comm is not self._comm:
            self._comm = comm
            self.clear()

    def clear(self) -> None:
        """Begin without anything, as with other parameters; all ranks must do it alike."""
        self._lost.clear()

    def rescale(self, scale: float) -> None:
        """Follow numbers that are divided by another power of two from now on."""
        for lost in self._lost.values():
            if scale != self._scale:
                lost.mul_(self._scale / scale).nan_to_num_(0.0, 0.0, 0.0)
        self._scale = scale

    def of(self, buffer: Tensor) -> Tensor | None:
        """Return what was lost of a buffer, in its shape; ``None`` if nothing is rounded."""
        rounds = self.bits < 32 and self._comm is not None and self._comm.can_round
        if not rounds or buffer.dtype is not float32:
            return None
        if buffer not in self._lost:
            self._lost[buffer] = zeros_like(buffer)
        return self._lost[buffer]
