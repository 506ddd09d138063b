"""Limits of control groups, as Linux and container runtimes show them."""

from pathlib import Path

import pytest

from evener.cgroups import GroupLimits, read_group_limits

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_there_are_no_limits(tmp_path: Path) -> None:
    assert read_group_limits(tmp_path) == GroupLimits()


def test_the_tightest_of_all_groups_around_counts(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/user/job\n",
        f"{top}/user/job/cpu.max": "max 100000\n",
        f"{top}/user/cpu.max": "250000 100000\n",
        f"{top}/user/job/memory.max": f"{800 * MIB}\n",
        f"{top}/user/job/memory.current": f"{700 * MIB}\n",
        f"{top}/user/job/memory.stat": f"anon 1\ninactive_file {200 * MIB}\n",
        f"{top}/user/memory.max": "max\n",
        f"{top}/user/job/pids.max": "4096\n",
        f"{top}/pids.max": "100\n",
    }
    assert read_group_limits(write(tmp_path, files)) == GroupLimits(
        cpus=2.5, free_bytes=300 * MIB, processes=100
    )


def test_a_container_that_sees_its_group_as_the_top(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "3:cpu:/elsewhere\n0::/docker/abc\n",
        f"{top}/cpu.max": "50000 100000\n",
        f"{top}/memory.max": f"{64 * MIB}\n",
        f"{top}/memory.current": f"{60 * MIB}\n",
        f"{top}/pids.max": "max\n",
    }
    assert read_group_limits(write(tmp_path, files)) == GroupLimits(cpus=0.5, free_bytes=4 * MIB)


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"sys/fs/cgroup/cpu.max": "1 0\n"},
        {"sys/fs/cgroup/cpu.max": "what\n", "sys/fs/cgroup/memory.max": "\x00"},
        {"sys/fs/cgroup/memory.current": "1\n", "sys/fs/cgroup/memory.stat": "one word a line\n"},
    ],
)
def test_no_limit_and_nonsense_are_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    groups = {"proc/self/cgroup": "3:cpu:/\n0::/\nnonsense\n"}
    assert read_group_limits(write(tmp_path, groups | files)) == GroupLimits()
