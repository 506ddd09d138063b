import math

import pytest

from evener.observe.events import make_event
from evener.observe.lineage import Voids
from evener.run_report import history
from evener.run_report.history import RunHistory
from helpers.event_cases import committed_window, started


def taken(*events) -> RunHistory:
    found = RunHistory()
    for event in events:
        found.add(event)
    return found


def numbers(found: RunHistory, name: str = "first") -> list[float]:
    return found.windows.cells()[name].tolist()


def samples(found: RunHistory) -> dict[str, list[float]]:
    return dict(zip(found.lanes, numbers(found, "samples"), strict=True))


def resumed(window: int, t: float):
    return make_event("run_resumed", t=t, window=window, path="step-1", new_data=False)


def test_windows_become_columns_with_a_lane_for_each_member():
    found = taken(started(), committed_window(0, t=1.0), committed_window(1, t=3.0))
    assert numbers(found) == [0, 1]
    assert numbers(found, "begin_s") == [0, 1]
    assert numbers(found, "end_s") == [1, 3]
    assert numbers(found, "loss_low") == [2, 2]
    assert math.isnan(numbers(found, "anchor_low")[0])
    assert samples(found) == {
        "a": [6, 6],
        "b": [4, 4],
    }
    assert (found.sessions, found.elapsed_s, found.void_windows) == (1, 3, 0)


def test_a_member_that_comes_later_or_goes_has_zeros_in_the_other_windows():
    short = committed_window(1, t=2.0, samples=(10,), losses=(2.0,), times_s=((1, 0, 0),))
    joined = committed_window(2, t=3.0)
    joined["ranks"][1]["member"] = "c"
    found = taken(started(), committed_window(0, t=1.0), short, joined)
    assert samples(found) == {
        "a": [6, 10, 6],
        "b": [4, 0, 0],
        "c": [0, 0, 4],
    }


def test_a_resume_drops_the_windows_that_it_makes_void_and_the_time_between_sessions():
    found = taken(
        started(),
        *(committed_window(k, t=k + 1.0) for k in range(4)),
        resumed(2, t=1000.0),
        started(t=1000.0),
        committed_window(2, t=1005.0),
    )
    assert numbers(found) == [0, 1, 2]
    assert numbers(found, "begin_s") == [0, 1, 4]
    assert numbers(found, "end_s") == [1, 2, 9]
    assert (found.void_windows, found.sessions, found.elapsed_s) == (2, 2, 9)
    assert [len(row) for row in samples(found).values()] == [3, 3]


def test_a_new_generation_drops_void_windows_within_a_session():
    reformed = make_event("reformed", t=2.5, window=1, generation=1, members=["a"])
    found = taken(
        started(), committed_window(0, t=1.0), committed_window(1, t=2.0), reformed,
        committed_window(1, t=4.0),
    )  # fmt: skip
    assert numbers(found) == [0, 1]
    assert numbers(found, "begin_s") == [0, 2.5]
    assert [mark.text for mark in found.incidents] == ["the team formed anew with 1 rank"]


def test_an_evaluation_is_not_part_of_the_window_after_it():
    evaluated = make_event(
        "eval", t=5.5, window=1, name="heldout", loss=3.0, weight=1.0, elapsed_s=4.0
    )
    found = taken(started(), committed_window(0, t=1.0), evaluated, committed_window(1, t=6.0))
    (held_out,) = found.evals
    assert (held_out.begin_s, held_out.end_s) == (1, 5)
    assert numbers(found, "begin_s") == [0, 5]


def test_what_is_said_of_the_end_and_of_members_is_kept():
    found = taken(
        started(),
        make_event("worker_started", t=0.0, rank=1, member="b", pid=7, host="box", device="cpu"),
        committed_window(0, t=1.0) | {"parked": [1, "x"]},
        make_event("worker_lost", t=2.0, rank=1, member="b", window=1, reason="killed"),
        make_event("run_finished", t=3.0, window=1, reason="failed", message="WorkerError: gone"),
    )
    assert (found.lanes["b"].host, found.lanes["b"].device) == ("box", "cpu")
    assert found.parked == {"b"}
    assert [mark.text for mark in found.incidents] == [
        "lost rank 1 (b): killed",
        "failed after 1 window: WorkerError: gone",
    ]
    assert found.ending is not None
    assert found.ending["message"] == "WorkerError: gone"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (committed_window(1, t=1e300), "t is 1e[+]300, not unix seconds"),
        (committed_window(1, t=-1.0), "t is -1.0, not a finite number from 0"),
        ({"t": 2.0, "type": "checkpoint", "window": 1, "path": 5}, "path is 5, not a text"),
        ({"t": 2.0, "type": "worker_lost"}, "worker_lost has a field that cannot be"),
        ({"t": 2.0, "type": "worker_started", "member": {}}, "member is {}, not a text"),
    ],
)
def test_events_that_cannot_be_are_refused_and_change_nothing(event, said):
    found = taken(started(), committed_window(0, t=1.0))
    with pytest.raises(ValueError, match=said):
        found.add(event)
    assert (numbers(found), list(found.lanes)) == ([0], ["a", "b"])
    found.add(committed_window(1, t=2.0))
    assert numbers(found, "end_s") == [1, 2]


def test_evaluations_of_a_state_that_is_void_are_dropped():
    def evaluation(window, t):
        numbers = {"loss": 3.0, "weight": 1.0, "elapsed_s": 0.5}
        return make_event("eval", t=t, window=window, name="heldout", **numbers)

    windows = [committed_window(0, t=1.0), evaluation(1, 1.5), committed_window(1, t=2.0)]
    found = taken(started(), *windows, evaluation(2, 2.5), resumed(1, t=4.0))
    assert [one.window for one in found.evals] == [1]
    found.add(committed_window(1, t=5.0))
    found.add(evaluation(2, 5.5))
    assert [one.window for one in found.evals] == [1, 2]


def test_a_refused_event_makes_no_later_window_void():
    refused = make_event("reformed", t=1e300, window=1, generation=1, members=["a"])
    found = RunHistory(Voids([refused]))
    for event in (started(), committed_window(0, t=1.0), committed_window(1, t=2.0)):
        found.add(event)
    with pytest.raises(ValueError, match="not unix seconds"):
        found.add(refused)
    found.add(committed_window(1, t=3.0))
    assert numbers(found, "end_s") == [1, 3]


def test_unknown_types_pass():
    assert len(taken(started(), {"t": 1.0, "type": "weather", "rain": True}).windows) == 0


def test_a_clock_that_is_set_back_makes_no_window_negative():
    found = taken(started(t=10.0), committed_window(0, t=20.0), committed_window(1, t=15.0))
    assert numbers(found, "length_s") == [10, 0]


def test_millions_of_members_are_not_millions_of_lanes(monkeypatch):
    monkeypatch.setattr(history, "MOST_LANES", 3)
    events = []
    for k in range(5):
        event = committed_window(k, t=float(k))
        event["ranks"][1]["member"] = f"b{k}"
        events.append(event)
    found = taken(started(), *events)
    assert list(found.lanes) == ["a", "b0", "b1"]
    assert found.num_omitted == 3
