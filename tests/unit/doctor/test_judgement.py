"""Facts in, problems out: every problem has a value, and a remedy."""

from dataclasses import replace
from typing import Any

import pytest

from evener.doctor.host_facts import ExchangeTrials
from evener.doctor.judgement import has_kernels, judge_host, judge_pair
from helpers.hosts import GIB, GOOD_LINK, HEALTHY, host

CPU, FIRST, SECOND = HEALTHY.devices
CPU_BUILD: dict[str, Any] = {"runtime": "", "architectures": (), "nccl": ""}

SICK = {
    "torch without CUDA": (
        host(devices=(CPU,), **CPU_BUILD, versions={"torch": "2.9.0"}),
        "shows 2 GPUs, but torch was built without",
        "pytorch.org",
    ),
    "an old driver": (host(devices=(CPU,)), "but torch finds 0", "nvidia-smi"),
    "a hidden card": (host(devices=(CPU, FIRST)), "shows 2 GPUs, but .* finds 1", "driver"),
    "no kernels": (
        host(architectures=("sm_80", "sm_90", "compute_90")),
        "no kernels for cuda:1 .GTX 1060, sm_61.; it was built for sm_80, sm_90, compute_90",
        "whose list has sm_61",
    ),
    "a broken card": (
        host(devices=(CPU, FIRST, replace(SECOND, failure="out of memory"))),
        "cuda:1 .GTX 1060. does not work: out of memory",
        "leave it out",
    ),
    "Gloo": (
        host(exchange=ExchangeTrials(gloo_failure="no device")),
        "over Gloo: no device",
        "127.0.0.1",
    ),
    "no NCCL": (host(nccl=""), "2 GPUs, but torch was built without NCCL", "build"),
    "NCCL": (
        host(exchange=ExchangeTrials(nccl_failure="on rank 1")),
        "over NCCL: on rank 1",
        "NCCL_DEBUG",
    ),
    "memory that is not shared": (
        host(exchange=ExchangeTrials(memory_failure="Operation not permitted")),
        "cannot share memory, .*: Operation not permitted",
        "memfd_create",
    ),
    "a container's /dev/shm": (
        host(shm_bytes=64 << 20),
        "/dev/shm has 64 MiB",
        "--shm-size",
    ),
    "few files": (host(open_files=256), "256 open files", "ulimit -n"),
    "few processes": (host(processes=100), "100 processes", "--pids-limit"),
    "a quota": (host(cpus=2.0), "grants 2 CPUs, but ranks see 16 cores", "OMP_NUM_THREADS=2"),
    "less than a CPU": (host(cpus=0.5), "grants 0.5 CPUs", "OMP_NUM_THREADS=1 "),
    "no memory": (host(free_bytes=GIB // 2), "512 MiB of memory", "end other"),
}


def test_a_healthy_host_has_no_problem() -> None:
    assert judge_host(HEALTHY) == []
    unlimited = host(devices=(CPU,), devices_shown=0, **CPU_BUILD, open_files=None)
    assert judge_host(unlimited) == []
    assert judge_host(host(shm_bytes=None)) == []


@pytest.mark.parametrize("name", SICK)
def test_each_problem_is_told_with_its_remedy(name: str) -> None:
    facts, what, remedy = SICK[name]
    (problem,) = judge_host(facts, "there")
    assert problem.where == "there"
    with pytest.raises(AssertionError, match=what):
        raise AssertionError(problem.what)
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("architecture", "built_for", "expected"),
    [
        ("sm_61", "sm_50 sm_60 sm_70", True),  # 6.1 runs the kernels of 6.0
        ("sm_61", "sm_70 sm_80", False),
        ("sm_89", "sm_80 sm_86", True),
        ("sm_120", "sm_80 sm_90", False),
        ("sm_120", "sm_90 compute_90", True),  # translated by the driver
        ("sm_90", "sm_90a", False),
        ("gfx1030", "gfx900 gfx1030", True),
        ("sm_61", "", False),
    ],
)
def test_which_kernels_run_on_which_card(architecture: str, built_for: str, expected: bool) -> None:
    assert has_kernels(architecture, tuple(built_for.split())) is expected


def test_two_alike_on_a_good_link_have_no_problem() -> None:
    assert judge_pair(HEALTHY, replace(HEALTHY, host="other"), GOOD_LINK) == []


UNLIKE = {
    "torch": (
        host(versions={"torch": "2.8.0", "evener": "0.1.0"}),
        GOOD_LINK,
        "torch is 2.9.0 here and 2.8.0 there",
    ),
    "NCCL": (
        HEALTHY,
        replace(GOOD_LINK, backend="gloo", reason="chosen because NCCL failed on rank 1"),
        "exchange through host memory, which is slower: chosen because NCCL failed on rank 1",
    ),
    "slow link": (HEALTHY, replace(GOOD_LINK, bytes_per_s_here=1.2e7), "carries 96 Mbit/s"),
    "far away": (HEALTHY, replace(GOOD_LINK, row_s=0.04), "a row takes 40 ms"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_keeps_two_hosts_apart(name: str) -> None:
    there, link, what = UNLIKE[name]
    (problem,) = judge_pair(HEALTHY, there, link)
    assert problem.where == "between"
    assert what in problem.what
    assert problem.remedy


def test_hosts_without_gpus_need_no_nccl() -> None:
    there = host(devices=(CPU,), devices_shown=0, **CPU_BUILD)
    assert judge_pair(HEALTHY, there, replace(GOOD_LINK, backend="gloo")) == []
