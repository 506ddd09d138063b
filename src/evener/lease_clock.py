"""The clock of leases: it also counts the time in which the machine was suspended."""

import time


def now_s() -> float:
    """Return seconds since some moment in the past, time in which the machine slept included.

    ``time.monotonic`` stands still on Linux while a laptop sleeps or a virtual machine is paused. A
    member that woke up would then take a lease for valid that has run out for everybody else.
    """
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # macOS and Windows lack it
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
