"""Devices by name, number and list; commands that can be given again."""

from pathlib import Path

import pytest
import torch

from evener.errors import ConfigError
from evener.run.launching.starting import how_started, program_of, starting_folder
from evener.run.team.environment import DistributedTrainConfig
from evener.run.team.placement import choose_device, devices_of_host


@pytest.mark.parametrize(
    ("devices", "num_cuda", "expected"),
    [
        ("auto", 0, ("cpu",)),
        ("auto", 2, ("cuda:0", "cuda:1")),
        ("cuda", 2, ("cuda:0", "cuda:1")),
        ("cpu", 2, ("cpu",)),
        ("cuda:1", 2, ("cuda:1",)),
        (torch.device("cpu"), 0, ("cpu",)),
        (3, 0, ("cpu", "cpu", "cpu")),
        (2, 4, ("cuda:0", "cuda:1")),
        (["cuda:0", "cpu"], 1, ("cuda:0", "cpu")),
        (["cpu", torch.device("cpu")], 0, ("cpu", "cpu")),
    ],
)
def test_a_device_for_each_rank(devices, num_cuda, expected):
    assert devices_of_host(devices, num_cuda) == expected


@pytest.mark.parametrize(
    ("devices", "num_cuda", "named"),
    [
        ("cuda", 0, "finds no CUDA device"),
        ("gpu", 1, "devices is 'gpu'; choose"),
        (0, 0, "devices is 0; give 1 or more"),
        (True, 0, "devices is True"),
        (3, 2, r"this host has 2 CUDA devices.*'cuda:0', 'cuda:1', 'cpu'"),
        ([], 0, "empty list"),
        (["cuda"], 1, "choose 'auto'"),
        (["cuda:0", "cuda:2"], 2, "finds 2 CUDA devices here, numbered from 0"),
    ],
)
def test_devices_that_are_not_there(devices, num_cuda, named):
    with pytest.raises(ConfigError, match=named):
        devices_of_host(devices, num_cuda)


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
        ("cpu", rank_of(1, 2), "cpu"),
        (["cuda:1", "cpu"], rank_of(0, 2), "cuda:1"),
        (["cuda:1", "cpu"], rank_of(1, 2), "cpu"),
        (2, rank_of(1, 2), "cuda:1"),
        ("cuda:1", DistributedTrainConfig(), "cuda:1"),
        ("auto", DistributedTrainConfig(backend="cpu"), "cpu"),
        # SLURM shows a task the devices that it was bound to, numbered from 0.
        ("auto", rank_of(3, 4, "slurm"), "cuda:1"),
    ],
)
def test_the_device_of_a_rank(two_cards, devices, place, expected):
    assert choose_device(devices, place) == torch.device(expected)


def test_a_list_that_does_not_fit_the_ranks_that_were_started(two_cards):
    with pytest.raises(ConfigError, match="for 2 ranks, but torchrun has started 3 on this host"):
        choose_device(["cpu", "cpu"], rank_of(0, 3))


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["-u", "-W", "error", "-Xdev", "train.py", "-m", "x"], ["train.py", "-m", "x"]),
        (["-m", "pkg.mod", "-c", "1"], ["-m", "pkg.mod", "-c", "1"]),
        (["-Oum", "pkg.mod"], ["-m", "pkg.mod"]),
        (["-mpkg.mod"], ["-m", "pkg.mod"]),
        (["--check-hash-based-pycs", "never", "a.py"], ["a.py"]),
        (["-c", "import x", "a.py"], []),
        (["-"], []),
        (["-i"], []),
        ([], []),
    ],
)
def test_script_or_module_out_of_the_command_line(words, program):
    assert program_of(words) == program


@pytest.mark.parametrize(
    ("script", "main_file", "folder"),
    [
        ("train.py", "/a/b/train.py", "/a/b"),
        ("src/train.py", "/a/b/src/train.py", "/a/b"),
        ("./train.py", "/a/train.py", "/a"),
        ("/a/train.py", "/a/train.py", "/now"),
        ("train.py", "/a/other.py", "/now"),
        ("../train.py", "/a/train.py", "/now"),
    ],
)
def test_the_folder_that_a_script_was_started_in(script, main_file, folder):
    assert starting_folder([script], "/now", main_file) == folder


def test_a_test_is_not_started_again():
    with pytest.raises(ConfigError, match="a test is not started again"):
        how_started()


def test_without_a_script_one_device_is_used_and_the_way_to_all_is_told(monkeypatch, capsys):
    from evener.run.launching.starting import start_all_ranks

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr("sys.orig_argv", ["python", "-c", "pass"])
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

    monkeypatch.setitem(__import__("sys").modules, "IPython", Notebook)
    with pytest.raises(ConfigError, match="a notebook is one process"):
        how_started()


def test_what_is_no_file_is_not_started_again(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr("sys.orig_argv", ["python", str(Path(tmp_path))])
    with pytest.raises(ConfigError, match="is no Python file"):
        how_started()
