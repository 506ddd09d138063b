"""Runs a model's forward pass in the precision that its device is good at."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evener.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16"]


def choose_precision(precision: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """Resolves ``auto``: bf16 on a GPU that has it, fp32 elsewhere.

    Raises:
        ConfigError: The name is unknown.
    """
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if has_bf16 else "fp32"
    if precision == "fp32":
        return "fp32"
    if precision == "bf16":
        return "bf16"
    raise ConfigError(f"precision is {precision!r}; choose one of auto, fp32, bf16")


class AutocastForward:
    """Puts a model's own ``forward`` under autocast and returns float32 outputs.

    The user's loop stays as it is: losses are computed on float32 outputs, outside autocast. It
    takes the place of the instance's ``forward`` rather than hooking it: a block around the call is
    what ``torch.compile`` can trace, and it goes along with ``copy.deepcopy`` and ``pickle``.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device_type = device.type
        self._model = model
        self._forward = model.forward
        functools.update_wrapper(self, model.forward)  # libraries look at its signature
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, under autocast."""
        with torch.autocast(device_type=self._device_type, dtype=torch.bfloat16):
            output = self._forward(*args, **kwargs)
        return tree_map(_to_float32, output)

    def remove(self) -> None:
        """Gives the model its own forward back, unless somebody has replaced it since."""
        if self._model.__dict__.get("forward") is self:
            del self._model.forward


def _to_float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value
