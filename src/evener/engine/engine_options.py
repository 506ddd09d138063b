"""Options of an engine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from evener.averaging.outer import OuterFactory
from evener.engine.emulate import Slowdown
from evener.engine.guards import OptimizerGuards
from evener.engine.loss_scale import LossScale


@dataclass(slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine; see ``DdpConfig`` for the meaning.

    ``outer`` is ``None`` if differences are only averaged.
    """

    max_grad_norm: float | None
    non_finite: str
    verify_every: int
    lr_factor: float
    unlike_devices: bool
    avoid_ones: bool
    dtype: torch.dtype
    loss_scale: LossScale
    slowdown: Slowdown
    stop_requested: Callable[[], bool] | None
    guards: OptimizerGuards
    say: Callable[[str], None]
    wire: str = "float32"
    overlap: str = "off"
    outer: OuterFactory | None = None
