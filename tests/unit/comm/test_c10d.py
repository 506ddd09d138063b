"""NCCL's groups have deadlines that NCCL itself has not; a stand-in hangs in their place."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.comm import c10d
from evener.comm.c10d import HashStore, end_nccl, form_nccl
from helpers.elastic_ranks import wait_until
from helpers.limits import PATIENCE_S


class Group:
    """Stands for torch's ProcessGroupNCCL; ``hangs`` says in which call."""

    hangs = ""
    wrong = 0.0
    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, world_size: int, options: Any) -> None:
        self.options = options
        self.calls: list[str] = []
        self.released = threading.Event()
        made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._call(f"connect {device}")

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        """As if rank 1 had done the same: its numbers are twice those of rank 0."""
        self._call("sum")
        tensors[0].mul_(3)
        tensors[0][-1] += self.wrong
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        self._call("abort")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.hangs and name.startswith(self.hangs):
            self.released.wait()


made: list[Group] = []


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    made.clear()
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _device: tensor)  # there is none
    yield
    for group in made:
        group.released.set()


@pytest.mark.usefixtures("pretended")
def test_a_group_connects_at_once_and_its_errors_end_no_process() -> None:
    group = form_nccl(HashStore(), 0, 2, 5.0, PATIENCE_S)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert group.options._timeout.total_seconds() > 5.0, "after the caller's own deadline"
    end_nccl(group, HashStore())
    assert group.calls == ["connect cuda:1", "sum", "abort"]


@pytest.mark.usefixtures("pretended")
def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "wrong", 1.0)
    with pytest.raises(RuntimeError, match="1 of 262144 numbers are wrong in an all_reduce"):
        form_nccl(HashStore(), 0, 2, 5.0, PATIENCE_S)
    assert made[0].calls == ["connect cuda:1", "sum", "abort"]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("hangs", ["connect", "sum", "abort"])
def test_a_call_that_hangs_ends_with_its_deadline(
    monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    monkeypatch.setattr(Group, "hangs", hangs)
    monkeypatch.setattr(c10d, "ABORT_S", 0.05 if hangs == "abort" else PATIENCE_S)
    if hangs != "abort":
        with pytest.raises(RuntimeError, match=r"NCCL has not answered within 0\.05 s"):
            form_nccl(HashStore(), 0, 2, 5.0, 0.05)
    else:
        end_nccl(form_nccl(HashStore(), 0, 2, 5.0, PATIENCE_S), HashStore())
    # On a loaded machine a thread may call later than its deadline.
    wait_until(lambda: {"connect cuda:1", "abort"} <= {*made[0].calls})


@pytest.mark.usefixtures("pretended")
def test_whatever_connecting_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_group: Group, _device: torch.device) -> None:
        raise ValueError("no such device")

    monkeypatch.setattr(Group, "eager_connect_single_device", fail)
    with pytest.raises(RuntimeError, match="no such device"):
        form_nccl(HashStore(), 0, 2, 5.0, 5.0)
