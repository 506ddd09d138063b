from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.observe.events import Event, make_event
from evener.observe.measuring import measure
from evener.observe.table import RunTable, wait_parts
from helpers.event_cases import committed_window, started

ALONE: dict[str, Any] = {"samples": (10,), "losses": (1.0,), "times_s": ((1.0, 0.0, 0.0),)}


def windows(first: int, last: int, t: float | None = None, step_s: float = 1.0) -> list[Event]:
    begin_t = first if t is None else t
    return [committed_window(k, t=begin_t + step_s * (k - first)) for k in range(first, last)]


def resumed(t: float, window: int) -> Event:
    return make_event("run_resumed", t=t, window=window, path="x", new_data=False)


def reformed(t: float, window: int, *members: str) -> Event:
    return make_event("reformed", t=t, window=window, generation=1, members=list(members))


def evaluated(t: float, window: int, elapsed_s: float) -> Event:
    found = {"name": "heldout", "loss": 3.0, "weight": 1.0, "elapsed_s": elapsed_s}
    return make_event("eval", t=t, window=window, **found)


def rows(table: RunTable, name: str) -> list[float]:
    return table.rows()[name].tolist()


def sums(table: RunTable, name: str) -> dict[str, float]:
    return dict(zip(table.members, table.lane_sums()[name].tolist(), strict=True))


def test_work_is_summed_by_member() -> None:
    table = RunTable.of([started(), *windows(0, 4)])
    assert (len(table), table.elapsed_s, table.ranks) == (4, 3.0, [0, 1])
    assert sums(table, "samples") == {"a": 24, "b": 16}
    assert sums(table, "weight") == {"a": 240, "b": 160}
    assert wait_parts(table.lane_sums()).tolist() == [pytest.approx(0.2), 0.0]


def test_a_row_begins_where_the_one_before_or_an_evaluation_ended() -> None:
    late = evaluated(5.5, 1, elapsed_s=4.0)
    table = RunTable.of([started(), committed_window(0, t=1.0), late, committed_window(1, t=6.0)])
    assert (rows(table, "begin_s"), rows(table, "end_s")) == ([0, 5], [1, 6])
    assert table.eval_s == (1, 5)
    clock = [started(t=10.0), committed_window(0, t=20.0), committed_window(1, t=15.0)]
    assert rows(RunTable.of(clock), "end_s") == [10, 10], "a clock that was set back"


def test_a_resume_drops_windows_that_are_void_and_the_time_between_sessions() -> None:
    events = [started(), *windows(0, 4, t=1.0), resumed(1000.0, 2), started(t=1000.0, window=2)]
    table = RunTable.of([*events, committed_window(2, t=1005.0)])
    assert rows(table, "window") == [0, 1, 2]
    assert (rows(table, "begin_s"), rows(table, "end_s")) == ([0, 1, 4], [1, 2, 9])
    assert (table.void_windows, table.elapsed_s) == (2, 9)
    assert sums(table, "samples") == {"a": 18, "b": 12}


def test_a_second_run_in_the_same_events_replaces_the_windows_of_the_first() -> None:
    first = [started(), *windows(0, 8)]
    table = RunTable.of([*first, started(t=100.0), *windows(0, 6, t=102.0, step_s=2.0)])
    assert rows(table, "window") == [0, 1, 2, 3, 4, 5]
    assert sums(table, "samples") == {"a": 36, "b": 24}
    assert table.void_windows == 8
    assert measure(table).speed == 50.0, "of the new one alone: 10 samples of 10 tokens in 2 s"


def test_a_team_that_forms_again_drops_windows_and_not_their_time() -> None:
    events = [*windows(0, 3), reformed(3.0, 1, "a"), committed_window(1, t=4.0, **ALONE)]
    table = RunTable.of(events)
    assert sums(table, "samples") == {"a": 16, "b": 4}
    assert (table.elapsed_s, rows(table, "begin_s")) == (4, [0, 3])


def test_an_event_of_several_windows_counts_as_these() -> None:
    table = RunTable.of([started(), *windows(0, 4), committed_window(7) | {"windows": 4}])
    assert (len(table), rows(table, "windows")) == (5, [1, 1, 1, 1, 4])
    table.add(resumed(100.0, 6))
    assert rows(table, "window") == [0, 1, 2, 3, 7], "it holds windows that count"
    table.add(resumed(101.0, 4))
    assert (rows(table, "window"), table.void_windows) == ([0, 1, 2, 3], 4)


def test_speed_leaves_out_the_first_windows() -> None:
    # Window 0 lands after 100 s, 1 to 3 take 10 s each, all later ones 1 s: 10 tokens a sample.
    times = [100.0, 110.0, 120.0, 130.0, 131.0, 132.0, 133.0, 134.0]
    table, speeds = RunTable.of([started()]), []
    for window, t in enumerate(times):
        table.add(committed_window(window, t=t))
        speeds.append(measure(table).speed)
    assert speeds[:4] == [None, 10.0, 10.0, 10.0]
    assert speeds[7] == 100.0, "from window 3 to 7"


def test_evaluations_do_not_count_as_time() -> None:
    events = [*windows(0, 6), evaluated(25.0, 6, 20.0), *windows(6, 8, t=26.0)]
    assert measure(RunTable.of(events)).speed == 100.0
    assert measure(RunTable.of([*events, evaluated(50.0, 8, 22.0)])).speed == 100.0


def test_the_speed_is_that_of_the_present_team() -> None:
    events = [started(), *windows(0, 8), reformed(9.0, 6, "a")]
    # If the main process was lost, the next one records the last windows of before once more.
    events += windows(6, 8)
    assert measure(RunTable.of(events)).speed is None, "nothing is known of this team"
    events += [committed_window(w, t=10.0 + 4 * (w - 8), **ALONE) for w in range(8, 16)]
    assert measure(RunTable.of(events)).speed == 25.0
    assert measure(RunTable.of(events)).alone == {0: 100.0}
    # Those of before again: their windows and the new ones are one measurement.
    events += [reformed(40.0, 16, "a", "b"), *windows(16, 24, t=46.0)]
    assert measure(RunTable.of(events)).speed == 100.0


def test_a_rank_alone_makes_the_whole_update_for_all_samples() -> None:
    """Of 0.7 s for six of ten samples 0.1 s was half of the update: alone 1.0 s and 0.2 s."""
    events = [started(), *windows(0, 9)]
    for event in events[1:]:
        event["update_parts"] = 2  # type: ignore[index]
        for row in event["ranks"]:
            row["update_s"] = 0.1
    assert measure(RunTable.of(events)).alone[0] == pytest.approx(100 / 1.2)


def test_nothing_is_no_error() -> None:
    table = RunTable()
    found = measure(table)
    assert (found.speed, found.alone, table.elapsed_s, len(table)) == (None, {}, 0, 0)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0.01, 10.0), min_size=2, max_size=2),
            st.integers(1, 9),
            st.sampled_from(["", "", "", "run_resumed", "reformed"]),
        ),
        min_size=2,
        max_size=40,
    )
)
def test_no_team_does_more_than_its_ranks_alone(measured: list[Any]) -> None:
    """Whatever speeds do, and whether the run is resumed or its team forms again meanwhile."""
    table, t = RunTable.of([started()]), 0.0
    for number, (seconds, samples, event) in enumerate(measured):
        if event == "run_resumed":
            t += 100.0
            table.add(resumed(t, number))
        elif event == "reformed":
            table.add(reformed(t, number, "a", "b"))
        t += max(seconds)
        times_s = tuple((own_s, max(seconds) - own_s, 0.0) for own_s in seconds)
        table.add(committed_window(number, t=t, samples=(samples, 10 - samples), times_s=times_s))
        found = measure(table)
        assert not found.speeds_changed
        assert found.of_ideal is None or found.of_ideal <= 1.0 + 1e-9
