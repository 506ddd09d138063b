"""Find out why a rank is slow, from the system and the GPU's driver.

Asked only while a rank is suspected of being slow: it costs a fraction of a millisecond.
"""

import os
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from evener.planning.stragglers import SlowCause

_LEAST_S: Final = 0.02
_MOST_SWITCHES: Final = 20.0
"""A second, involuntary: a thread that has a core for itself is hardly ever interrupted."""

_MOST_PRESSURE: Final = 0.25
"""Part of the time in which something on the host waited for a core."""

_MOST_FAULTS: Final = 20.0
"""A second that had to read from the disk."""

_HEAT: Final = 0x20 | 0x40 | 0x08
_POWER: Final = 0x04 | 0x80
"""Bits of NVML's reasons for a lower clock: thermal and hardware slowdown; power cap and brake."""


class _Counts(NamedTuple):
    at_s: float
    switches: float
    pressure_us: float
    faults: float


@final
class SlowDiagnosis:
    """Finds out why this rank is slow.

    Args:
        gpu: Id of its NVIDIA GPU, as torch calls it (``uuid``); empty for another device.
        proc: The folder of the system's own figures.
    """

    def __init__(self, gpu: str = "", proc: Path = Path("/proc")) -> None:
        self._gpu = gpu
        self._proc = proc
        self._before: _Counts | None = None

    def forget(self) -> None:
        """Forget the rank, which is not slow any more; the next suspicion starts over."""
        self._before = None

    def look(self) -> SlowCause:
        """Return the likely cause, from what has happened since the suspicion began."""
        if (throttled := self._throttled()) is SlowCause.HEAT:
            return throttled
        before, now = self._before, self._count()
        if before is None:
            self._before = before = now
        seconds = now.at_s - before.at_s
        if seconds < _LEAST_S:
            return throttled
        if (now.faults - before.faults) / seconds > _MOST_FAULTS and self._swapped_kb():
            return SlowCause.SWAP
        pressure = (now.pressure_us - before.pressure_us) / 1e6 / seconds
        crowded = pressure > _MOST_PRESSURE or self._load() > (os.cpu_count() or 1) + 1
        if crowded and (now.switches - before.switches) / seconds > _MOST_SWITCHES:
            return SlowCause.CPU
        return throttled  # last, as a GPU that is busy may be at its power limit as a rule

    def _count(self) -> _Counts:
        switches = faults = 0.0
        with suppress(ImportError):  # not on Windows
            usage = import_module("resource").getrusage(0)
            switches, faults = float(usage.ru_nivcsw), float(usage.ru_majflt)
        pressure = 0.0
        for word in self._read("pressure/cpu").partition("\n")[0].split():
            if word.startswith("total="):
                pressure = float(word.removeprefix("total="))
        return _Counts(time.monotonic(), switches, pressure, faults)

    def _load(self) -> float:
        with suppress(OSError, AttributeError):
            return os.getloadavg()[0]
        return 0.0

    def _swapped_kb(self) -> int:
        for line in self._read("self/status").splitlines():
            if line.startswith("VmSwap:"):
                return int(line.split()[1])
        return 0

    def _read(self, name: str) -> str:
        with suppress(OSError, ValueError):
            return (self._proc / name).read_text(encoding="ascii")
        return ""

    def _throttled(self) -> SlowCause:
        """Return what NVML says, where it is installed (``pip install nvidia-ml-py``)."""
        if not self._gpu:
            return SlowCause.UNKNOWN
        try:
            nvml: Any = import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(self._gpu)
            reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        except Exception:  # missing, another version, no rights: it is a diagnosis, and no more
            self._gpu = ""
            return SlowCause.UNKNOWN
        if reasons & _HEAT:
            return SlowCause.HEAT
        return SlowCause.POWER if reasons & _POWER else SlowCause.UNKNOWN
