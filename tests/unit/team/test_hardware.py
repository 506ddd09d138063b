"""The line that sums up the team's devices."""

import pytest

from evener.team.members import Member, hardware_summary


def device(kind: str, name: str, gb: float, **more) -> Member:
    values = {
        "member": "m",
        "rank": 0,
        "host": "alpha",
        "pid": 1,
        "device": kind,
        "device_name": name,
        "memory_bytes": int(gb * 2**30),
        "threads": 4,
        "emulated": 1.0,
        "versions": {},
    }
    return Member(**{**values, **more})


FAST, SLOW = device("cuda:0", "RTX 5060 Ti", 16), device("cuda:1", "GTX 1060", 6)
CPU = device("cpu", "EPYC", 32)


@pytest.mark.parametrize(
    ("team", "line"),
    [
        ([FAST, SLOW], "2 GPUs (unequal) | RTX 5060 Ti 16.0 GB | GTX 1060 6.0 GB"),
        ([FAST, FAST, SLOW], "3 GPUs (unequal) | 2 x RTX 5060 Ti 16.0 GB | GTX 1060 6.0 GB"),
        ([FAST, FAST], "2 GPUs (equal) | 2 x RTX 5060 Ti 16.0 GB"),
        ([FAST], "1 GPU | RTX 5060 Ti 16.0 GB"),
        ([CPU], "1 CPU rank | EPYC 32.0 GB 4 threads"),
        (
            [FAST, CPU],
            "1 GPU + 1 CPU rank (unequal) | RTX 5060 Ti 16.0 GB | EPYC 32.0 GB 4 threads",
        ),
        (
            [device("mps:0", "Apple GPU", 12), device("npu:0", "npu", 0), CPU],
            "1 GPU + 1 accelerator + 1 CPU rank (unequal) | Apple GPU 12.0 GB | npu | "
            "EPYC 32.0 GB 4 threads",
        ),
        (
            [CPU, device("cpu", "EPYC", 32, threads=1, emulated=3.0)],
            "2 CPU ranks (unequal) | EPYC 32.0 GB 4 threads | "
            "EPYC 32.0 GB 1 thread (emulated 3x slower)",
        ),
    ],
)
def test_a_team_in_one_line(team, line):
    assert hardware_summary(team) == line
