import re
import time

import pytest

from evener.engine import emulate
from evener.engine.emulate import Slowdown, compute_clock, parse_emulation
from evener.errors import ConfigError


def test_factors_per_rank():
    assert parse_emulation(["1:3", "0:1.5"], 2) == {1: 3.0, 0: 1.5}
    assert parse_emulation([], 1) == {}


REFUSED = {
    "there is no rank 2 in a team of 2": ["2:3"],
    "a factor of 1 or more": ["1:0.5", "1:-2", "1:inf"],
    "is not RANK:FACTOR": ["1:nan", "1", "1:", ":3", "-1:3", "one:3", "1:3:4"],
}


@pytest.mark.parametrize("named", REFUSED)
def test_a_bad_option_is_named_with_its_value_and_remedy(named):
    for spec in REFUSED[named]:
        with pytest.raises(ConfigError, match=f"{re.escape(spec)}.*{named}"):
            parse_emulation([spec], 2)


@pytest.mark.parametrize(
    ("waited_s", "slept_s"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (5.0, 0.0)]
)
def test_sleeps_for_what_the_slower_device_would_still_compute(monkeypatch, waited_s, slept_s):
    """Half a second of compute takes a second and a half: waits for a core are a part of it."""
    slept, computed, wall = [], [7.0], [100.0]
    slowdown = Slowdown(3.0, clock=lambda: computed[0])
    monkeypatch.setattr(slowdown, "_sleep", slept.append)
    monkeypatch.setattr(emulate.time, "perf_counter", lambda: wall[0])
    start = slowdown.start()
    computed[0] += 0.5
    wall[0] += 0.5 + waited_s
    assert slowdown.after(start) == pytest.approx(slept_s)
    assert sum(slept) == pytest.approx(slept_s)


def test_the_clock_of_compute_is_processor_time_on_a_cpu():
    assert compute_clock("cpu") is time.thread_time
    assert compute_clock("cuda:0") is time.perf_counter


def test_a_long_sleep_ends_when_a_stop_is_requested(monkeypatch):
    slept = []
    monkeypatch.setattr(emulate.time, "sleep", slept.append)
    slowdown = Slowdown(
        1e6, clock=iter([0.0, 1.0]).__next__, stop_requested=lambda: len(slept) == 3
    )
    slowdown.after(slowdown.start())
    assert slept == [emulate.SLICE_S] * 3
