"""Devices by name, number and list; commands that can be given again."""

import sys
from types import ModuleType

import pytest
import torch

from evener.errors import ConfigError
from evener.team.environment import DistributedTrainConfig
from evener.team.placement import choose_device, devices_of_host
from evener.team.starting import how_started

CUDA, MIXED = {"cuda": 2}, {"cuda": 2, "npu": 1}


@pytest.mark.parametrize(
    ("devices", "counts", "expected"),
    [
        ("auto", {}, ("cpu",)),
        ("auto", CUDA, ("cuda:0", "cuda:1")),
        ("auto", {"mps": 1}, ("mps:0",)),
        ("xpu", {"xpu": 3}, ("xpu:0", "xpu:1", "xpu:2")),
        ("accelerator", {"npu": 2}, ("npu:0", "npu:1")),
        ("accelerator", MIXED, ("cuda:0", "cuda:1")),
        ("npu", MIXED, ("npu:0",)),
        ("cpu", CUDA, ("cpu",)),
        (torch.device("xpu", 1), {"xpu": 2}, ("xpu:1",)),
        (3, {}, ("cpu", "cpu", "cpu")),
        (2, {"cuda": 4}, ("cuda:0", "cuda:1")),
        (1, {"mps": 1}, ("mps:0",)),
        (["cuda:0", "cpu"], {"cuda": 1}, ("cuda:0", "cpu")),
    ],
)
def test_a_device_for_each_rank(devices, counts, expected):
    assert devices_of_host(devices, counts) == expected


@pytest.mark.parametrize(
    ("devices", "counts", "named"),
    [
        ("cuda", {}, "devices is 'cuda', but torch finds no accelerator here"),
        ("xpu", {"cuda": 1}, "devices is 'xpu', but torch finds 1 cuda device here"),
        ("accelerator", {}, "devices is 'accelerator', but torch finds no accelerator here"),
        ("npu", {}, "devices is 'npu', but torch finds no acc.* one of 'auto', 'cpu', a number"),
        ("gpu", CUDA, r"devices is 'gpu', .*'auto', 'cpu', 'cuda', 'accelerator', a number of"),
        (0, {}, "devices is 0, .* a number of ranks from 1"),
        (True, {}, "devices is True, .* a number of ranks"),
        (None, {}, "devices is None, "),
        (3, CUDA, r"finds 2 cuda devices.*\['cuda:0', 'cuda:1', 'cpu'\]"),
        ([], {}, r"devices is \[\], .* a list such as \['cpu'\]"),
        (["cuda"], {"cuda": 1}, "choose one of 'auto'"),
        (["cuda:0", "cuda:2"], CUDA, "finds 2 cuda devices here; devices are numbered from 0"),
    ],
)
def test_devices_that_are_not_there(devices, counts, named):
    with pytest.raises(ConfigError, match=named):
        devices_of_host(devices, counts)


def rank_of(local_rank, local_world_size, launched_by="torchrun", **more):
    return DistributedTrainConfig(
        world_size=local_world_size,
        rank=local_rank,
        local_rank=local_rank,
        role="worker" if local_rank else "coordinator",
        local_world_size=local_world_size,
        launched_by=launched_by,
        **more,
    )


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize(
    ("devices", "place", "expected"),
    [
        ("auto", rank_of(1, 3), "cuda:1"),
        ("auto", rank_of(2, 3), "cpu"),
        (["cuda:1", "cpu"], rank_of(1, 2), "cpu"),
        (2, rank_of(1, 2), "cuda:1"),
        ("cuda:1", DistributedTrainConfig(), "cuda:1"),
        ("auto", DistributedTrainConfig(backend="cpu"), "cpu"),
        ("auto", rank_of(1, 2, backend="accelerator"), "cuda:1"),
        ("accelerator", rank_of(0, 2), "cuda:0"),
        # SLURM shows a task the devices that it was bound to, numbered from 0.
        ("auto", rank_of(3, 4, "slurm"), "cuda:1"),
    ],
)
def test_the_device_of_a_rank(two_cards, devices, place, expected):
    assert choose_device(devices, place) == torch.device(expected)


@pytest.mark.parametrize("backend", ["cuda", "accelerator"])
def test_a_compute_backend_that_is_not_there(monkeypatch, backend):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    place = rank_of(0, 1, backend=backend)
    # It is the place that asks for it: `devices` is 'auto' already.
    said = f"^backend is '{backend}', but local rank 0 finds no accelerator where it needs "
    with pytest.raises(ConfigError, match=said):
        choose_device("auto", place)


def test_a_list_that_does_not_fit_the_ranks_that_were_started(two_cards):
    with pytest.raises(ConfigError, match="for 2 ranks, but torchrun has started 3 on this host"):
        choose_device(["cpu", "cpu"], rank_of(0, 3))


def test_a_script_is_started_again_by_its_whole_path(monkeypatch):
    main = ModuleType("__main__")
    main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr("sys.argv", ["file.py", "--lr", "1"])
    assert how_started() == [__file__, "--lr", "1"]


def test_a_test_runner_is_not_started_again(monkeypatch):
    main = ModuleType("__main__")
    main.__file__ = pytest.__file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ConfigError, match=r"is run by .*, such as a test runner"):
        how_started()


def test_without_a_script_one_device_is_used_and_the_way_to_all_is_told(monkeypatch, capsys):
    from evener.team.starting import start_all_ranks

    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    start_all_ranks(("cuda:0", "cuda:1"), optional=True, quiet=False)
    said = capsys.readouterr().err
    assert "using cuda:0 of cuda:0, cuda:1" in said
    assert "evener launch SCRIPT" in said
    with pytest.raises(ConfigError, match=r"devices names 2 devices .*cpu, cpu.*evener launch"):
        start_all_ranks(("cpu", "cpu"), optional=False, quiet=False)


def test_a_notebook_is_not_started_again(monkeypatch):
    class Notebook:
        @staticmethod
        def get_ipython():
            return object()

    monkeypatch.setitem(sys.modules, "IPython", Notebook)
    with pytest.raises(ConfigError, match="a notebook is one process"):
        how_started()
