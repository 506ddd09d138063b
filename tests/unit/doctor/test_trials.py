"""Ways to exchange, tried on this host."""

import sys
from pathlib import Path

import psutil
import pytest
import torch

from evener.doctor.host_facts import ExchangeTrials
from evener.doctor.trials import try_exchange
from helpers.limits import PATIENCE_S

CPUS = [torch.device("cpu")] * 2


def test_an_interface_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert "GLOO_SOCKET_IFNAME is 'none0'" in try_exchange(CPUS, timeout_s=PATIENCE_S).gloo_failure


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
def test_a_sandbox_that_forbids_shared_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "def refuse(*_): raise PermissionError(1, 'Operation not permitted')\n"
        "os.memfd_create = refuse\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    trials = try_exchange(CPUS, timeout_s=PATIENCE_S)
    assert trials.gloo_failure == ""
    assert "Operation not permitted" in trials.memory_failure


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_nccl_is_tried_in_processes_and_what_fails_there_is_reported() -> None:
    trials = try_exchange([torch.device("cuda", n) for n in range(2)], timeout_s=PATIENCE_S)
    assert trials.nccl_tried
    assert trials.nccl_failure
    assert trials.gloo_failure == ""


def test_processes_that_do_not_answer_are_ended() -> None:
    before = psutil.Process().children()
    # They take longer to load torch.
    trials = try_exchange(CPUS, timeout_s=0.05)
    expected = "the ranks have not answered within 0.05 s"
    assert trials == ExchangeTrials(gloo_failure=expected)
    assert psutil.Process().children() == before
