from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.observe.events import make_event
from evener.observe.multiples import multiples
from evener.observe.tally import EventTally
from helpers.event_cases import committed_window, started
from helpers.lineage import effective_events


def test_totals_per_member() -> None:
    tally = EventTally.of([started(), *(committed_window(w) for w in range(4))])
    assert (tally.total.windows, tally.total.samples, tally.total.weight) == (4, 40, 400.0)
    first, second = tally.members["a"], tally.members["b"]
    assert (first.windows, first.samples) == (4, 24)
    assert (second.samples, second.weight) == (16, 160.0)
    assert first.wait_fraction == pytest.approx(0.2)
    assert second.wait_fraction == 0.0
    assert tally.elapsed_s == 3.0


def test_speed_leaves_out_the_first_windows() -> None:
    # Window 0 lands after 100 s, 1 to 3 take 10 s each, all later ones 1 s: 10 tokens a sample.
    times = [100.0, 110.0, 120.0, 130.0, 131.0, 132.0, 133.0, 134.0]
    tally = EventTally()
    speeds: list[float | None] = []
    tally.add(started())
    for window, t in enumerate(times):
        tally.add(committed_window(window, t=t))
        speeds.append(tally.speed())
    assert speeds[0] is None
    assert speeds[1] == 10.0, "from window 0 to 1"
    assert speeds[2] == 10.0, "from window 1 to 2"
    assert speeds[3] == 10.0, "from window 1 to 3"
    assert speeds[7] == 100.0, "from window 3 to 7"


def test_evaluations_do_not_count_as_time() -> None:
    tally = EventTally()
    for window in range(8):
        tally.add(committed_window(window, t=window + (20.0 if window > 5 else 0.0)))
        if window in (1, 5):
            loss = 3.0 - window / 10
            tally.add(
                make_event(
                    "eval",
                    t=window + 20.0,
                    window=window,
                    loss=loss,
                    weight=1.0,
                    elapsed_s=20.0,
                    name="heldout",
                )
            )
    # The evaluation after window 1 was before the measured span, and took its time there.
    assert tally.speed() == 100.0


def test_evaluation_after_the_last_window_changes_nothing() -> None:
    events = [committed_window(window) for window in range(8)]
    last = make_event(
        "eval", t=30.0, window=8, loss=1.0, weight=1.0, elapsed_s=22.0, name="heldout"
    )
    assert EventTally.of([*events, last]).speed() == EventTally.of(events).speed()


def test_time_between_sessions_does_not_count() -> None:
    tally = EventTally.of(
        effective_events(
            [
                started(),
                *(committed_window(window) for window in range(8)),
                started(t=1000.0),
                make_event("run_resumed", t=1000.0, window=6, path="step-6", new_data=False),
                *(committed_window(window, t=1000.0 + window) for window in range(6, 14)),
            ]
        )
    )
    assert tally.total.windows == 14
    assert tally.total.weight == 1400.0
    # Of the first session six windows count, from window 2 at 2 s to window 5; the last two are
    # void.
    assert tally.speed() == 700.0 / (3.0 + 4.0)


def test_reformed_team_gives_back_void_windows() -> None:
    tally = EventTally.of(
        effective_events(
            [
                *(committed_window(window) for window in range(3)),
                make_event("reformed", t=3.0, window=1, generation=1, members=["a"]),
                committed_window(
                    1, t=4.0, samples=(10,), losses=(1.0,), times_s=((1.0, 0.0, 0.0),)
                ),
            ]
        )
    )
    assert tally.total.windows == 2
    assert {name: (m.samples, m.windows) for name, m in tally.members.items()} == {
        "a": (16, 2),
        "b": (4, 1),
    }
    assert tally.elapsed_s == 4.0


def test_a_team_that_forms_anew_is_measured_by_itself() -> None:
    events = [started(), *(committed_window(w) for w in range(8))]
    events.append(make_event("reformed", t=9.0, window=6, generation=1, members=["a"]))
    alone: dict[str, Any] = {"samples": (10,), "losses": (1.0,), "times_s": ((1.0, 0.0, 0.0),)}
    # If the main process was lost, the next one records the last windows of before once more.
    again = [committed_window(w) for w in range(6, 8)]
    events += again
    assert EventTally.of(effective_events(events)).speed() is None, "nothing is known of this team"
    events += [committed_window(w, t=10.0 + 4 * (w - 8), **alone) for w in range(8, 16)]
    tally = EventTally.of(effective_events(events))
    assert tally.speed() == 25.0
    assert tally.elapsed_s == 10.0 + 4 * 7, "forming anew takes time of the run"
    assert EventTally.from_json(tally.to_json()).speed() == 25.0
    # Those of before again: their windows and the new ones are one measurement.
    events.append(make_event("reformed", t=40.0, window=16, generation=2, members=["a", "b"]))
    events += [committed_window(w, t=30.0 + w) for w in range(16, 24)]
    assert EventTally.of(effective_events(events)).speed() == 100.0


def test_a_team_that_often_changes_takes_bounded_memory() -> None:
    tally = EventTally.of([started()])
    sizes = set()
    for change in range(300):
        t = 10.0 + change
        members = ["a", f"b.{change}"]
        tally.add(make_event("reformed", t=t, window=0, generation=change + 1, members=members))
        tally.add(committed_window(change, t=t + 0.5))
        sizes.add(len(tally.to_json()["sessions"]))
    began_t = started()["t"]
    assert max(sizes) == len(tally.to_json()["sessions"]) < 300
    assert tally.elapsed_s == EventTally.from_json(tally.to_json()).elapsed_s == 309.5 - began_t


def test_nothing_is_no_error() -> None:
    tally = EventTally()
    assert tally.speed() is None
    assert tally.members == {}
    assert tally.elapsed_s == 0.0


def test_the_speed_is_that_of_the_present_team() -> None:
    def session(t: float, window: int, members: list[str], seconds: float) -> list[dict[str, Any]]:
        times = [t + seconds * k for k in range(1, 5)]
        return [
            make_event("run_resumed", t=t, window=window, path="x", new_data=False),
            started(t=t, members=members),
            *(committed_window(window + k, t=times[k]) for k in range(4)),
        ]

    events = [
        *session(0.0, 0, ["a", "b"], 1.0),
        *session(100.0, 4, ["a", "b", "c"], 0.1),
        *session(200.0, 8, ["a", "b"], 2.0),
    ]
    # From the second window of a session of four on: 3 windows without the first of them.
    assert EventTally.of(events).speed() == pytest.approx(400.0 / (2 * (1.0 + 2.0)))
    assert EventTally.of(events[:12]).speed() == pytest.approx(200.0 / (2 * 0.1))


def test_elapsed_time_leaves_out_the_time_between_sessions() -> None:
    tally = EventTally.of(
        effective_events(
            [
                started(t=0.0),
                *(committed_window(window, t=1.0 + window) for window in range(3)),
                make_event("run_resumed", t=100.0, window=2, path="x", new_data=False),
                started(t=100.5),
                committed_window(2, t=102.0),
            ]
        )
    )
    assert tally.elapsed_s == 2.0 + 1.5, "window 2 of the first session is void"


@settings(deadline=None, derandomize=True, max_examples=100, database=None)
@given(
    windows=st.lists(
        st.tuples(
            st.lists(st.floats(0.01, 10.0), min_size=2, max_size=2),
            st.integers(1, 9),
            st.sampled_from(["", "", "", "run_resumed", "reformed", "pause"]),
        ),
        min_size=2,
        max_size=40,
    )
)
def test_no_team_does_more_than_its_ranks_alone(windows: list[Any]) -> None:
    """Whatever speeds do, and whether the run is resumed or its team formed anew meanwhile."""
    tally, t = EventTally(), 0.0
    tally.add(started())
    for number, (seconds, samples, event) in enumerate(windows):
        if event == "pause":
            t += 100.0
            tally.add(make_event("run_resumed", t=t, window=number, path="x", new_data=False))
        elif event == "run_resumed":
            tally.add(make_event(event, t=t, window=number, path="x", new_data=False))
        elif event == "reformed":
            members = ["a", "b"]
            tally.add(make_event(event, t=t, window=number, generation=1, members=members))
        t += max(seconds)
        times_s = tuple((own_s, max(seconds) - own_s, 0.0) for own_s in seconds)
        tally.add(committed_window(number, t=t, samples=(samples, 10 - samples), times_s=times_s))
        tally = EventTally.from_json(tally.to_json())
        alone = tally.speeds_alone()
        found = multiples(tally.speed(), alone.values())
        assert not found.speeds_changed
        assert found.of_ideal is None or found.of_ideal <= 1.0 + 1e-9
    if not any(event for _, _, event in windows):
        assert found.of_ideal is not None


def test_a_rank_alone_makes_the_whole_update_for_all_samples() -> None:
    """Of 0.7 s for six of ten samples 0.1 s was half of the update: alone 1.0 s and 0.2 s."""
    tally = EventTally.of([started(), *(_sharded(window) for window in range(9))])
    assert tally.speeds_alone()["a"] == pytest.approx(100 / 1.2)


def _sharded(window: int) -> Any:
    event = committed_window(window) | {"update_parts": 2}
    for row in event["ranks"]:
        row["update_s"] = 0.1
    return event
