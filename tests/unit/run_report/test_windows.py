"""Windows in bounded room: nothing but resolution is lost."""

from typing import Any

import numpy as np
import pytest

from evener.observe.events import make_event
from evener.observe.lineage import Voids
from evener.run_report import windows as windows_module
from evener.run_report.document import figures
from evener.run_report.history import RunHistory
from evener.run_report.summary_facts import SummaryFacts
from evener.run_report.windows import Windows
from helpers.event_cases import committed_window, started


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_MOST_NEW", 96)  # 32 of two lanes are kept as they are
    monkeypatch.setattr(windows_module, "_LEAST_CELLS", 16)


def history(count: int, most_kept: int, voids: Voids | None = None) -> RunHistory:
    found = RunHistory(voids, most_kept=most_kept)
    found.add(started())
    for k in range(count):
        found.add(window(k))
    return found


def window(k: int) -> dict[str, Any]:
    times = ((0.1, 0.8, 0.1), (0.9, 0, 0.1)) if k == 333 else ((0.7, 0.2, 0.1), (0.9, 0.0, 0.1))
    losses = (9.0, 9.0) if k == 777 else (2.0, 2.0)
    return committed_window(k, t=k + 1.0, losses=losses, times_s=times)


def numbers(found: RunHistory) -> dict[str, Any]:
    return figures("x", found, SummaryFacts(), [])


def assert_alike(whole: Any, short: Any) -> None:
    """All the same, but what ranks do alone: that is of nearly the same windows."""
    if isinstance(whole, list):
        for pair in zip(whole, short, strict=True):
            assert_alike(*pair)
    else:
        of_alone = ("alone", "best_alone", "ideal", "of_ideal", "of_best_alone")
        for key, value in whole.items():
            assert short[key] == (pytest.approx(value, rel=0.01) if key in of_alone else value)


def test_merged_windows_have_the_same_sums_and_extremes() -> None:
    merged = history(1000, 300)
    cells, short = merged.windows.cells(), numbers(merged)
    assert len(merged.windows) == 1000
    assert len(cells["windows"]) < 180
    assert cells["windows"][-32:].tolist() == [1] * 32
    whole = numbers(history(1000, 10**6))
    for part in ("straggler", "run"):
        assert whole[part] == short[part]
    for part in ("team", "ranks"):  # merged windows straddle the end of the warm-up
        assert_alike(whole[part], short[part])
    assert max(short["series"]["loss"]["high"]) == 9
    assert max(short["series"]["waits"][0]["high"]) == 0.8
    assert max(short["timeline"]["ranks"][0]["most_wait"]) == 800
    assert sum(short["timeline"]["ranks"][1]["compute_us"]) == 900_000_000
    assert sum(short["timeline"]["length_us"]) == 1000_000_000


def test_a_window_that_stands_for_several_counts_for_them() -> None:
    every, few = RunHistory(), RunHistory()
    for found in (every, few):
        found.add(started())
    for k in range(1000):
        one = committed_window(k, t=k + 1.0)
        every.add(one)
        if k % 10 == 9:
            few.add({**one, "stands_for": 10})
    whole, short = numbers(every), numbers(few)
    for part in ("ranks", "straggler", "run", "team"):
        assert whole[part] == short[part]
    assert set(short["series"]["speed"]["mean"]) == {100}
    assert few.num_estimated == 900


def test_of_windows_that_one_stands_for_some_may_be_void() -> None:
    found = history(0, 300)
    for k in (9, 19, 29):
        found.add({**committed_window(k, t=k + 1.0), "stands_for": 10})
    found.add(make_event("run_resumed", t=31.0, window=14, path="x", new_data=False))
    assert (len(found.windows), found.void_windows, found.is_blurred) == (14, 16, False)
    assert found.windows.cells()["last"].tolist() == [9, 13]
    assert found.windows.cells()["samples"].sum() == pytest.approx(140)


def test_a_lane_that_comes_late_has_zeros_where_windows_were_merged() -> None:
    found = Windows(most_kept=100)
    found.add_lane()
    for k in range(500):
        found.add((k, k, k + 1, 2.0, np.nan, 1), [(1, 10, 0.5, 0.1, 0.1, 0, 0)])
    found.add_lane()
    found.add((500, 500, 501, 2.0, np.nan, 1), [(1, 10, 0.5, 0.1, 0.1, 0, 0)] * 2)
    cells = found.cells()
    assert cells["samples"].sum(axis=1).tolist() == [501, 1]
    assert cells["waits_high"][1][-1] == pytest.approx(0.1 / 0.7)
    assert np.isnan(cells["waits_high"][1][:-1]).all()


def test_void_windows_are_dropped_where_that_is_known_beforehand_or_soon_enough() -> None:
    resumed = make_event("run_resumed", t=2000.0, window=990, path="x", new_data=False)
    soon = history(1000, 300)
    soon.add(resumed)
    assert (len(soon.windows), soon.void_windows, soon.is_blurred) == (990, 10, False)
    late = history(1000, 300)
    late.add({**resumed, "window": 101})
    assert late.is_blurred
    assert (len(late.windows), late.void_windows) == (101, 899)
    assert late.windows.cells()["samples"].sum() == pytest.approx(1010)
    again = history(1000, 300, Voids([{**resumed, "window": 101}]))
    again.add({**resumed, "window": 101})
    assert (len(again.windows), again.void_windows, again.is_blurred) == (101, 899, False)
