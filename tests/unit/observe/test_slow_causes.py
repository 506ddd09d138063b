"""What the system and NVML say of a slow rank, from files and a module that stand in for them."""

import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from evener.observe.slow_causes import SlowDiagnosis
from evener.planning.stragglers import SlowCause


class Machine:
    """A host whose clock, counters and files a test sets."""

    def __init__(self, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.at_s, self.switches, self.faults, self.load = proc, 100.0, 0, 0, 0.5
        for folder in ("pressure", "self"):
            (proc / folder).mkdir()
        self.say(pressure_us=0, swapped_kb=0)
        monkeypatch.setattr(time, "monotonic", lambda: self.at_s)
        monkeypatch.setattr(os, "getloadavg", lambda: (self.load, 0.0, 0.0))
        monkeypatch.setattr(
            resource,
            "getrusage",
            lambda who: SimpleNamespace(ru_nivcsw=self.switches, ru_majflt=self.faults),
        )

    def say(self, *, pressure_us: int, swapped_kb: int) -> None:
        some = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={pressure_us}\n"
        (self.proc / "pressure" / "cpu").write_text(some + "full total=0\n")
        (self.proc / "self" / "status").write_text(f"Name:\tx\nVmSwap:\t{swapped_kb} kB\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def cause_after_a_second(machine: Machine, *, pressure_us: int = 0, swapped_kb: int = 0, **counts):
    diagnosis = SlowDiagnosis(proc=machine.proc)
    assert diagnosis.look() is SlowCause.UNKNOWN, "nothing has been counted yet"
    machine.at_s += 1.0
    for name, value in counts.items():
        setattr(machine, name, value)
    machine.say(pressure_us=pressure_us, swapped_kb=swapped_kb)
    return diagnosis.look()


def test_nothing_unusual_is_no_cause(machine: Machine):
    assert cause_after_a_second(machine, switches=5) is SlowCause.UNKNOWN


def test_other_programs_take_its_cores(machine: Machine):
    cause = cause_after_a_second(machine, switches=500, pressure_us=900_000)
    assert cause is SlowCause.CPU


def test_a_high_load_counts_where_the_system_knows_no_pressure(machine: Machine):
    assert cause_after_a_second(machine, switches=500, load=1e4) is SlowCause.CPU
    machine.switches = 0
    assert cause_after_a_second(machine, load=1e4) is SlowCause.UNKNOWN, "it is not interrupted"


def test_it_swaps(machine: Machine):
    assert cause_after_a_second(machine, faults=400, swapped_kb=9000) is SlowCause.SWAP


def test_a_system_without_these_files_is_no_error(tmp_path: Path):
    diagnosis = SlowDiagnosis(proc=tmp_path / "missing")
    for _ in range(3):
        assert diagnosis.look() in SlowCause


@pytest.mark.parametrize(
    ("reasons", "cause"),
    [(0x20, SlowCause.HEAT), (0x40, SlowCause.HEAT), (0x04, SlowCause.POWER), (0x01, None)],
)
def test_the_gpu_throttles(monkeypatch: pytest.MonkeyPatch, machine: Machine, reasons, cause):
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-7": "seven"}[uuid],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: {"seven": reasons}[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = SlowDiagnosis("GPU-7", machine.proc).look()
    assert found is (cause or SlowCause.UNKNOWN)
    unknown = SlowDiagnosis("GPU-8", machine.proc)
    assert unknown.look() is SlowCause.UNKNOWN
