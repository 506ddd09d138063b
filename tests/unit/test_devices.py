"""What torch can compute on: kinds, by what torch says of them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evener.devices import copied, count_accelerators, float64_device, kind_of, move
from evener.loop.precision import choose_precision

CPU = torch.device("cpu")


def test_there_may_be_no_accelerator(monkeypatch):
    for module in (torch.cuda, torch.xpu, torch.mps):
        monkeypatch.setattr(module, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert count_accelerators() == {}


@pytest.mark.parametrize(("module", "kind"), [(torch.xpu, "xpu"), (torch.mps, "mps")])
def test_each_kind_is_counted(monkeypatch, module, kind):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    assert count_accelerators() == {kind: 1}


def test_the_first_kind_is_the_one_that_auto_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    assert list(count_accelerators().items()) == [("cuda", 2), ("xpu", 1)]


def test_a_backend_from_elsewhere_is_asked_for_its_devices(monkeypatch):
    backend = SimpleNamespace(device_count=lambda: 3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda name: backend)
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "device_count", lambda: 0)
    monkeypatch.setattr("evener.devices._BUILT_IN", ())
    assert count_accelerators() == {"hpu": 3}


def test_not_every_backend_from_elsewhere_can_give_memory_back(monkeypatch):
    given_back = []
    backend = SimpleNamespace(empty_cache=lambda: given_back.append(True))
    monkeypatch.setattr(torch, "get_device_module", lambda name: backend)
    kind_of(torch.device("hpu", 0)).free_cache()
    assert given_back == [True]
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace())
    kind_of(torch.device("hpu", 0)).free_cache()


def test_float64_is_looked_for_where_it_exists():
    assert float64_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert float64_device(torch.device("mps", 0)) == CPU
    assert float64_device(torch.device("hpu", 0)) == CPU  # nothing is known of it
    assert float64_device(CPU) == CPU


@pytest.mark.parametrize(("has_fp64", "place"), [(True, torch.device("xpu", 0)), (False, CPU)])
def test_not_every_intel_gpu_has_float64(monkeypatch, has_fp64, place):
    capability = {"has_fp64": has_fp64}
    monkeypatch.setattr(torch.xpu, "get_device_capability", lambda device: capability)
    assert float64_device(torch.device("xpu", 0)) == place


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp32")])
def test_an_intel_gpu_computes_in_bf16_where_it_has_that(monkeypatch, has_bf16, precision):
    capability = {"has_bfloat16_conversions": has_bf16}
    monkeypatch.setattr(torch.xpu, "get_device_capability", lambda device: capability)
    assert choose_precision("auto", torch.device("xpu", 0)) == precision


def test_an_apple_gpu_computes_in_what_is_asked_for_and_else_in_fp32():
    there = torch.device("mps", 0)
    assert choose_precision("auto", there) == "fp32"
    assert choose_precision("bf16", there) == "bf16"


def test_devices_are_described_for_people(monkeypatch):
    card = SimpleNamespace(name="Arc A770", total_memory=16 * 2**30)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 2**30)
    assert kind_of(torch.device("xpu", 0)).describe(torch.device("xpu", 0)) == (
        "Arc A770",
        16 * 2**30,
    )
    assert kind_of(torch.device("mps", 0)).describe(torch.device("mps", 0)) == (
        "Apple GPU",
        12 * 2**30,
    )
    assert kind_of(torch.device("hpu", 0)).describe(torch.device("hpu", 0)) == ("hpu", 0)
    name, memory = kind_of(CPU).describe(CPU)
    assert name
    assert memory > 2**20


# ── modules ──────────────────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight
        self.norm = nn.BatchNorm1d(3)


def test_a_copy_has_memory_of_its_own_and_ties_as_the_module_has():
    module = Tied()
    module.norm.weight.requires_grad_(False)
    other = copied(module, CPU)
    assert other.head.weight is other.words.weight
    assert not other.norm.weight.requires_grad
    for (name, mine), theirs in zip(
        module.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
        assert mine.data_ptr() != theirs.data_ptr(), name
    with torch.no_grad():
        other.words.weight.zero_()
    assert module.words.weight.abs().sum() > 0


def test_a_copy_may_share_what_it_is_told_to():
    module = Tied()
    frozen = module.norm.weight
    other = copied(module, CPU, {id(frozen): frozen})
    assert other.norm.weight is frozen
    assert other.norm.bias is not module.norm.bias


def test_a_module_that_is_moved_keeps_its_parameters():
    module = Tied()
    before = [id(p) for p in module.parameters()]
    move(module, CPU)
    assert [id(p) for p in module.parameters()] == before
