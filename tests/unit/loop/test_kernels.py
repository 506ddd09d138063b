"""A GPU that this build of torch has no kernels for is refused before anything is moved to it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evener import Ddp
from evener.errors import ConfigError


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=6, minor=1, name="GTX 1060", total_memory=6 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_90"])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"cuda:0 needs kernels for sm_61.*sm_75, sm_80"):
        Ddp.setup(model, optimizer, devices="cuda:0", precision="fp32", quiet=True)
