"""The speed of this machine's devices, for ``evener plan --calibrate``; loads torch."""

import torch

from evener.devices import count_accelerators, kind_of
from evener.engine.calibration import time_slices
from evener.engine.emulate import Slowdown
from evener.team.placement import devices_of_host


def time_devices() -> dict[str, float]:
    """Return floating-point operations per second by device, timed one after another.

    Each computes in the precision that ``auto`` takes for it.
    """
    precisions = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    speeds = {}
    for name in devices_of_host("auto", count_accelerators()):
        device = torch.device(name)
        kind = kind_of(device)
        model, _ = kind.describe(device)
        dtype = precisions[kind.half(device)]
        speeds[f"{name}, {model}"] = time_slices(device, dtype, Slowdown(1.0))
    return speeds
