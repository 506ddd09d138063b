"""Groups that the user has made."""

import pytest

from evener.comm.existing import device_of_group


@pytest.mark.parametrize(
    ("backend", "kinds", "device"),
    [
        ("gloo", ["cuda"], "cpu"),
        ("cpu:gloo,cuda:nccl", ["cuda"], "cpu"),
        ("nccl", ["cuda"], "cuda"),
        ("cuda:nccl", ["cuda"], "cuda"),
        ("xccl", ["xpu"], "xpu"),
        ("gloo", ["mps"], "cpu"),
        ("mpi", ["cuda"], "cpu"),
        ("hccl", ["npu"], "cpu"),
        ("nccl", [], "cpu"),
    ],
)
def test_tensors_lie_where_the_group_can_exchange_them(backend, kinds, device):
    assert device_of_group(backend, kinds) == device
