"""Run a model's forward pass in the precision that is fast on its device."""

import functools
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from evener.devices import kind_of
from evener.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]


def choose_precision(precision: str, device: torch.device) -> Precision:
    """Resolve ``auto`` for a device.

    bf16 on a CUDA or XPU device that has it; fp16 on a CUDA device with tensor cores but without
    bf16 (Volta, Turing); fp32 elsewhere: older cards, such as a GTX 1060, compute in fp16 more
    slowly than in fp32, and CPUs without bf16 or fp16 units emulate them.

    Args:
        precision: What the user asked for.
        device: This rank's device.

    Raises:
        ConfigError: The name is unknown.
    """
    if precision in ("fp32", "bf16", "fp16"):
        return precision  # type: ignore[return-value]  # narrowed by the test above
    if precision != "auto":
        raise ConfigError(f"precision is {precision!r}; choose one of auto, fp32, bf16, fp16")
    return kind_of(device).half(device)


#: The dtype that autocast computes in, by precision.
HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class AutocastForward:
    """Runs a model's own ``forward`` under autocast and returns float32 outputs.

    The user's loop stays as it is: losses are computed on float32 outputs, outside autocast. It
    replaces the instance's ``forward`` instead of using hooks, because ``torch.compile`` can trace
    a block around the call, and ``copy.deepcopy`` and ``pickle`` can copy it.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._device_type = device.type
        self._dtype = dtype
        self._model = model
        self._forward = model.forward
        functools.update_wrapper(self, model.forward)  # libraries look at its signature
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's forward, under autocast."""
        with torch.autocast(device_type=self._device_type, dtype=self._dtype):
            output = self._forward(*args, **kwargs)
        return tree_map_only(Tensor, _to_float32, output)

    def remove(self) -> None:
        """Restore the model's own forward, unless it was replaced since."""
        if self._model.__dict__.get("forward") is self:
            del self._model.forward


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in HALF.values() else value
