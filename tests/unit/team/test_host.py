"""Cores and devices that a host shows without torch."""

import sys
from pathlib import Path

import pytest

from evener.errors import LaunchError
from evener.team import host
from evener.team.host import (
    _count_by_torch,
    local_devices,
    threads_per_rank,
)


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(16, 2, 8), (16, 3, 5), (2, 2, 1), (1, 4, 1), (8, 1, 8)]
)
def test_threads_per_rank(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(host, "available_cores", lambda: cores)
    assert threads_per_rank(ranks) == threads


def test_devices_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert local_devices({}, root=tmp_path) == 2
    assert local_devices({"CUDA_VISIBLE_DEVICES": "1"}, root=tmp_path) == 1
    assert local_devices({"CUDA_VISIBLE_DEVICES": ""}, root=tmp_path) == 0
    assert local_devices({"CUDA_VISIBLE_DEVICES": "-1"}, root=tmp_path) == 0
    assert local_devices({}, root=tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("dri/renderD128",), 0),  # torch would not be asked: one rank either way
        (("dri/renderD128", "dri/renderD129"), 7),
        (("accel/accel0", "accel/accel1"), 7),
        (("davinci0", "davinci1", "davinci_manager"), 7),
        (("nvidia0", "dri/renderD128", "dri/renderD129"), 1),
    ],
)
def test_torch_is_asked_about_several_files_of_other_vendors(tmp_path, files, expected):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert local_devices({}, root=tmp_path, ask_torch=lambda: 7) == expected


def test_torch_may_take_forever_and_what_loads_with_it_may_print(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr("evener.team.host._ASK_TORCH", "echo a line of a plugin; echo 3")
    assert _count_by_torch() == 3
    monkeypatch.setattr("evener.team.host._ASK_TORCH", "exec sleep 600")
    with pytest.raises(LaunchError, match=r"did not report within 0\.1 s how many accelerators"):
        _count_by_torch(timeout_s=0.1)
