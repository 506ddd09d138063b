"""Events in, the page's document out."""

import json
from typing import Any

import pytest

from evener.dashboard.view import MOST_LOGGED, MOST_NUMBERS, RunView
from evener.observe.events import Event, make_event
from evener.run_report.summary_facts import SummaryFacts
from helpers.event_cases import committed_window, started

LOST = {"rank": 1, "member": "b", "window": 1, "reason": "killed by <b>SIGKILL</b>"}
JOINED = {"rank": 1, "member": "b", "window": 1, "generation": 1}


def view(*events: Event) -> RunView:
    made = RunView()
    for event in events:
        made.add(event)
    return made


def document(made: RunView, *, is_running: bool | None = True) -> dict[str, Any]:
    found = made.document("run", SummaryFacts(), [], is_running=is_running)
    return dict(json.loads(json.dumps(found, allow_nan=False)))


def presences(made: RunView, **options: Any) -> list[str]:
    return [row["presence"] for row in document(made, **options)["ranks"]]


def test_a_run_that_goes_on() -> None:
    made = view(started(total_windows=10), *(committed_window(k) for k in range(4)))
    found = document(made)
    assert found["run"]["state"] == "running"
    assert found["is_running"] is True
    assert found["line"].startswith("step 4/10  loss 2 ")
    assert "ETA 6.0 s" in found["line"]
    assert found["newest_t"] == 3.0
    assert [row["share"] for row in found["ranks"]] == [0.6, 0.4]
    assert len(found["series"]["loss"]["mean"]) == 4
    assert "timeline" not in found


def test_nothing_yet() -> None:
    found = document(RunView(), is_running=None)
    assert found["run"]["state"] == "no end recorded"
    assert found["line"] == ""
    assert found["ranks"] == []


def test_who_is_lost_is_gone_until_it_is_back() -> None:
    events = [started(), committed_window(0)]
    made = view(*events)
    assert presences(made) == ["here", "here"]
    made.add(make_event("worker_lost", t=1.0, **LOST))
    assert presences(made) == ["here", "gone"]
    found = document(made)
    assert found["ranks"][1]["why_gone"] == LOST["reason"]
    assert found["log"][-1]["text"] == "lost rank 1 (b): killed by <b>SIGKILL</b>"
    made.add(make_event("worker_joined", t=2.0, **JOINED))
    assert presences(made) == ["here", "here"]
    made.add(make_event("worker_lost", t=3.0, **LOST))
    made.add(committed_window(1, t=4.0))  # it takes part, so it is there
    assert presences(made) == ["here", "here"]


def test_who_is_gone_may_be_replaced() -> None:
    after = committed_window(1, t=3.0)
    after["ranks"][1]["member"] = "c"
    lost = make_event("worker_lost", t=1.0, **LOST)
    made = view(started(), lost, committed_window(0))  # it was known only then
    assert presences(made) == ["here", "gone"]
    made.add(after)
    told = [(row["rank"], row["member"], row["presence"]) for row in document(made)["ranks"]]
    assert told == [(0, "a", "here"), (1, "b", "replaced"), (1, "c", "here")]


def test_a_loss_without_its_window_is_shown() -> None:
    lost = {key: value for key, value in LOST.items() if key != "window"}
    made = view(started(), committed_window(0), {"t": 1.0, "type": "worker_lost", **lost})
    assert presences(made) == ["here", "gone"]


def test_parked_and_ended() -> None:
    made = view(started(), {**committed_window(0), "parked": [1]})
    assert presences(made) == ["here", "parked"]
    assert presences(made, is_running=False) == ["ended", "ended"]
    assert document(made, is_running=False)["run"]["state"] == "ended unexpectedly"
    made.add(make_event("run_finished", t=5.0, window=1, reason="stopped", message=None))
    found = document(made, is_running=True)  # the process has not gone yet
    assert (found["run"]["state"], found["is_running"]) == ("stopped", False)


def test_a_long_run_stays_small_and_the_log_is_its_end() -> None:
    made = view(started(), *(committed_window(k) for k in range(3000)))
    for k in range(2 * MOST_LOGGED):
        made.add(make_event("worker_lost", t=3000.0 + k, **LOST))
    found = document(made)
    numbers = json.dumps(found["series"]).count(",") + 1
    assert numbers <= MOST_NUMBERS
    assert len(found["log"]) == MOST_LOGGED
    # Extremes are kept.
    assert {"mean", "low", "high"} <= set(found["series"]["loss"])


@pytest.mark.parametrize(
    "damage",
    [
        {**committed_window(1), "turns": "many"},
        {**committed_window(1), "t": 1e300},
        {**started(), "total_windows": "all"},
        {**started(), "run": 7},
    ],
)
def test_an_event_that_cannot_be_does_not_count(damage: Event) -> None:
    made = view(started(), committed_window(0))
    before = document(made)
    with pytest.raises(ValueError, match=r"turns|t is|total_windows|run"):
        made.add(damage)
    assert document(made) == before
