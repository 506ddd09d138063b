import json

import pytest

from evener.observe.events import make_event
from evener.run_report import document as figures_module
from evener.run_report.document import figures
from evener.run_report.history import RunHistory
from evener.run_report.summary_facts import SummaryFacts, read_facts
from helpers.event_cases import committed_window, started


def history_of(*events) -> RunHistory:
    found = RunHistory()
    for event in events:
        found.add(event)
    return found


def ten_windows(**changes) -> RunHistory:
    """Two ranks, 6 and 4 samples of weight 10, a second a window."""
    return history_of(started(), *(committed_window(k, t=k + 1.0, **changes) for k in range(10)))


def document_of(history: RunHistory, facts: SummaryFacts | None = None, **options):
    found = figures("run", history, facts or SummaryFacts(), [], **options)
    json.dumps(found, allow_nan=False)
    return found


def test_speeds_compare_the_team_with_each_rank_alone_and_the_ideal():
    found = document_of(ten_windows())
    assert found["team"]["speed"] == 100  # of weight, in a second
    # What a rank does in a second of its own compute: 60 / 0.7 and 40 / 0.9.
    assert [rank["alone"] for rank in found["ranks"]] == [85.7143, 44.4444]
    assert found["team"]["ideal"] == pytest.approx(60 / 0.7 + 40 / 0.9, rel=1e-5)
    assert found["team"]["of_ideal"] == pytest.approx(100 / (60 / 0.7 + 40 / 0.9), rel=1e-5)
    assert found["team"]["of_best_alone"] == pytest.approx(0.7 * 100 / 60, rel=1e-5)
    assert [rank["share"] for rank in found["ranks"]] == [0.6, 0.4]


def test_only_the_present_member_of_a_rank_is_parked_and_what_it_does_alone_stays_known():
    windows = [committed_window(k, t=k + 1.0) for k in range(40)]
    team = make_event("reformed", t=2.0, window=2, generation=1, members=["a", "c"])
    for k, window in enumerate(windows):
        if k >= 2:
            window["ranks"][1]["member"] = "c"
        if k >= 10:
            window["ranks"][1] |= {"samples": 0, "weight": 0.0, "loss": None, "compute_s": 0.0}
            window["parked"] = [1]
    found = document_of(history_of(started(), *windows[:2], team, *windows[2:]))
    rows = {row["member"]: (row["parked"], row["alone"]) for row in found["ranks"]}
    assert rows == {"a": (False, 85.7143), "b": (False, None), "c": (True, 44.4444)}
    assert found["team"]["ideal"] == pytest.approx(60 / 0.7 + 40 / 0.9, rel=1e-5)


def test_a_team_that_formed_again_may_exchange_over_something_else():
    alone = started() | {"backend": "none", "backend_reason": "one rank, nothing to exchange"}
    place = {"t": 2.0, "window": 1, "generation": 1, "members": ["a", "b"]}
    grown = make_event("reformed", **place) | {"backend": "shared", "backend_reason": "one host"}
    run = document_of(history_of(alone, committed_window(0), grown))["run"]
    assert (run["backend"], run["backend_reason"]) == ("shared", "one host")
    run = document_of(history_of(alone, make_event("reformed", **place)))["run"]  # an older file
    assert (run["backend"], run["backend_reason"]) == ("none", "one rank, nothing to exchange")


def test_losses_shares_and_waits_over_time():
    series = document_of(ten_windows())["series"]
    assert series["end_s"] == list(range(1, 11))
    assert series["samples"] == list(range(10, 101, 10))
    assert series["loss"] == {"mean": [2] * 10}
    assert series["speed"] == {"mean": [100] * 10}
    assert [share["mean"][0] for share in series["shares"]] == [0.6, 0.4]
    assert [wait["mean"][0] for wait in series["waits"]] == [0.2, 0]
    assert series["anchor"] is None


def test_bytes_data_and_why_plans_changed_are_shown_where_events_have_them():
    events = []
    plan = {"generation": 0, "epoch": 0, "start": 0, "size": 10, "shares": [6, 4]}
    for k in range(600):
        event = committed_window(k, t=k + 1.0) | {"anchor": 5}
        for row in event["ranks"]:
            row |= {"sent_bytes": 100, "data_s": 0.25}
        events += [event, make_event("plan", t=k + 1.0, window=k, **plan, reason=f"reason {k}")]
    found = document_of(history_of(started(), *events))
    assert found["team"]["sent_bytes"] == 120_000
    assert found["team"]["data_fraction"] == 0.2
    assert [rank["sent_bytes"] for rank in found["ranks"]] == [60_000] * 2
    assert found["series"]["sent_bytes"]["mean"][0] == 200
    assert found["series"]["anchor"]["mean"][0] == 5
    assert found["timeline"]["ranks"][0]["data_us"][0] == 250_000
    texts = [one["text"] for one in found["decisions"]]
    assert (len(texts), texts[0], texts[-1]) == (500, "6 / 4: reason 0", "6 / 4: reason 599")
    assert found["run"]["plans"] == 600
    assert document_of(ten_windows())["series"]["sent_bytes"] is None


def test_long_runs_keep_their_extremes(monkeypatch):
    monkeypatch.setattr(figures_module, "MOST_POINTS", 20)
    events = [
        committed_window(k, t=k + 1.0, losses=(9.0, 9.0) if k == 777 else (2.0, 2.0))
        for k in range(1000)
    ]
    series = document_of(history_of(started(), *events))["series"]
    assert len(series["loss"]["mean"]) == 20
    assert max(series["loss"]["high"]) == 9
    assert max(series["loss"]["mean"]) == pytest.approx(2 + 7 / 50, rel=1e-5)
    assert series["windows_per_point"] == 50


def test_held_out_losses_stand_at_the_samples_before_them():
    held_out = {"name": "heldout", "loss": 3.0, "weight": 1.0, "elapsed_s": 0.0}
    found = RunHistory()
    for k in range(100):
        found.add(committed_window(k, t=k + 1.0))
        if k % 10 == 4:
            found.add(make_event("eval", t=k + 1.0, window=k + 1, **held_out))
    evals = document_of(found)["evals"]
    assert [one["samples"] for one in evals] == [10 * one["window"] for one in evals]


def test_of_very_many_evaluations_some_are_shown_up_to_the_newest():
    held_out = {"name": "heldout", "loss": 3.0, "weight": 1.0, "elapsed_s": 0.0}
    events = [make_event("eval", t=float(k), window=k, **held_out) for k in range(5000)]
    windows = [one["window"] for one in document_of(history_of(started(), *events))["evals"]]
    assert windows == list(range(9, 5000, 10))


def test_a_run_without_windows_has_a_document():
    found = document_of(history_of(started()))
    assert found["team"]["speed"] is None
    assert found["ranks"] == []
    assert found["waits"]["culprit"] is None
    assert "too short" in found["verdict"]["answers"]["worth"]
    assert document_of(RunHistory())["run"]["state"] == "no end recorded"


def test_a_member_has_a_share_while_it_is_in_the_team():
    after = committed_window(1, t=3.0)
    after["ranks"][1]["member"] = "c"
    found = document_of(history_of(started(), committed_window(0, t=1.0), after))
    assert [curve["mean"] for curve in found["series"]["shares"]] == [
        *([0.6, 0.6], [0.4, None], [None, 0.4]),
    ]


# ── who is there ─────────────────────────────────────────────────────────────────────────────────

LOST = make_event("worker_lost", t=1.0, rank=1, member="b", window=1, reason="killed")


def presences(*events, is_running=True):
    rows = document_of(history_of(started(), *events), is_running=is_running)["ranks"]
    return [(row["member"], row["presence"]) for row in rows]


def test_who_is_lost_is_gone_until_it_is_back_or_another_has_its_place():
    first = committed_window(0)
    assert presences(first) == [("a", "here"), ("b", "here")]
    assert presences(first, LOST) == [("a", "here"), ("b", "gone")]
    assert presences(LOST, first) == [("a", "here"), ("b", "gone")], "it was known only then"
    found = document_of(history_of(started(), first, LOST))
    assert found["ranks"][1]["why_gone"] == "killed"
    joined = make_event("worker_joined", t=2.0, rank=1, member="b", window=1, generation=1)
    assert presences(first, LOST, joined) == [("a", "here"), ("b", "here")]
    assert presences(first, LOST, committed_window(1)) == [("a", "here"), ("b", "here")]
    other = committed_window(1, t=3.0)
    other["ranks"][1]["member"] = "c"
    told = presences(first, LOST, other)
    assert told == [("a", "here"), ("b", "replaced"), ("c", "here")]


def test_parked_running_and_ended():
    parked = {**committed_window(0), "parked": [1]}
    assert presences(parked) == [("a", "here"), ("b", "parked")]
    assert presences(parked, is_running=False) == [("a", "ended"), ("b", "ended")]
    states = [(True, "running"), (False, "ended unexpectedly"), (None, "no end recorded")]
    for is_running, state in states:
        found = document_of(history_of(started(), parked), is_running=is_running)
        assert (found["run"]["state"], found["is_running"]) == (state, is_running is True)
    end = make_event("run_finished", t=5.0, window=1, reason="stopped", message=None)
    found = document_of(history_of(started(), parked, end), is_running=True)
    assert (found["run"]["state"], found["is_running"]) == ("stopped", False)
    assert found["line"].startswith("step 1  loss 2")


# ── who waits for whom ───────────────────────────────────────────────────────────────────────────


def test_the_rank_that_comes_last_is_named_with_its_cost():
    equal = ((0.9, 0.01, 0.1), (0.91, 0.0, 0.1))
    text = document_of(ten_windows(times_s=equal))["waits"]["text"]
    assert text == "No rank keeps another one waiting for a noteworthy part of the time."
    slow = ((0.5, 0.4, 0.1), (0.9, 0.0, 0.1))
    waits = document_of(ten_windows(times_s=slow))["waits"]
    assert (waits["culprit"], waits["seconds"]) == (1, [[0, 4], [0, 0]])
    assert waits["text"] == (
        "Rank 0 (a) waits for rank 1 (b): 4.0 s, 20.0% of the ranks' time. It came last in 10 of "
        "10 windows."
    )


def test_nobody_is_named_where_ranks_come_last_in_turn():
    slow = ((0.5, 0.4, 0.1), (0.9, 0.0, 0.1))
    events = [
        committed_window(k, t=k + 1.0, times_s=slow if k % 2 else slow[::-1]) for k in range(10)
    ]
    waits = document_of(history_of(started(), *events))["waits"]
    assert (waits["culprit"], waits["seconds"]) == (None, [[0, 2], [2, 0]])
    assert waits["text"] == (
        "Ranks wait 20.0% of their time for one another; none of them stands out."
    )


def test_waits_are_counted_against_the_last_to_arrive():
    # Three ranks; the second is the last by 1 s, then the third by 2 s; the fourth is parked.
    times_s = (
        ((1.0, 2.0, 0.0), (3.0, 0.0, 0.0), (2.0, 1.0, 0.0), (0.0, 0.0, 0.0)),
        ((1.0, 4.0, 0.0), (1.0, 4.0, 0.0), (5.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    )
    four = {"samples": (1, 1, 1, 0), "losses": (2.0, 2.0, 2.0, None)}
    events = [committed_window(k, t=3.0 * k + 3, times_s=times_s[k % 2], **four) for k in range(6)]
    found = document_of(history_of(started(), *events))
    columns = ("windows_last", "waited_for_s", "delay_s")
    rows = [[row[name] for name in columns] for row in found["ranks"]]
    assert rows == [[0, 0, 0], [3, 9, 3], [3, 24, 12], [0, 0, 0]]
    assert found["waits"]["seconds"] == [[0, 6, 12, 0], [0, 0, 12, 0], [0, 3, 0, 0], [0, 0, 0, 0]]
    assert found["waits"]["culprit"] == 2
    assert "had it come with the next one" in found["waits"]["text"]
    idle = {"samples": (1, 0), "losses": (1.0, None)}
    alone = committed_window(0, times_s=((1.0, 0.0, 0.0), (0.0, 0.0, 0.0)), **idle)
    text = document_of(history_of(started(), alone))["waits"]["text"]
    assert text == "No two ranks worked in the same window."


# ── flags and decisions ──────────────────────────────────────────────────────────────────────────


def test_a_change_of_the_team_is_one_flag_with_its_cost():
    place = {"rank": 1, "window": 1}
    found = document_of(
        history_of(
            started(),
            committed_window(0, t=1.0),
            make_event("worker_lost", t=2.0, member="b", reason="killed", **place),
            make_event(
                "reformed",
                t=3.0,
                window=1,
                generation=1,
                members=["a", "c"],
                detect_s=0.5,
                reform_s=0.25,
                recover_s=1.0,
            ),
            make_event(
                "recovered", t=3.0, member="c", source="a", num_bytes=9, elapsed_s=1.0, **place
            ),
            make_event("worker_joined", t=3.0, member="c", generation=1, **place),
            committed_window(1, t=4.0) | {"redo_s": 2.0},
            committed_window(2, t=5.0),
            make_event("join_refused", t=6.0, member="d", window=3, reason="another version"),
        )
    )
    lost, refused = found["flags"]
    assert (lost["kind"], lost["rank"], lost["window"], lost["t_s"]) == ("loss", 1, 1, 2)
    assert lost["cost_s"] == 3.75
    assert lost["text"] == (
        "lost rank 1 (b): killed; the team formed again with 2 ranks; rank 1 (c) joined with the "
        "state of a; it cost 3.8 s (500 ms until it was noticed, 250 ms until the team had formed "
        "again, 1.0 s to send the state, 2.0 s until the next window was committed)"
    )
    assert [one["type"] for one in found["events"]] == ["team_changed", "join_refused"]
    assert (refused["kind"], refused["text"]) == ("refused", "d was refused: another version")


def test_decisions_are_kept_with_their_reasons():
    plan = {"generation": 0, "epoch": 0, "start": 0, "size": 10, "shares": [6, 4]}
    parked = {"rank": 1, "member": "b", "reason": "it costs more than it brings"}
    found = document_of(
        history_of(
            started(),
            make_event("plan", t=0.0, window=0, **plan, reason="the first shares"),
            make_event("parked", t=1.0, window=3, **parked),
            make_event("recalled", t=2.0, window=9, **{**parked, "reason": "tried again"}),
            make_event("plan", t=3.0, window=9, **plan),
        )
    )
    assert [(one["kind"], one["window"], one["text"]) for one in found["decisions"]] == [
        ("first_plan", 0, "6 / 4: the first shares"),
        ("parked", 3, "rank 1 (b) is parked: it costs more than it brings"),
        ("recalled", 9, "rank 1 (b) is back at work: tried again"),
        ("plan", 9, "6 / 4"),
    ]
    assert [one["kind"] for one in found["flags"]] == ["parked", "recalled"]


# ── the timeline ─────────────────────────────────────────────────────────────────────────────────


def test_the_timeline_has_a_cell_for_each_window():
    found = document_of(ten_windows())["timeline"]
    assert found["merged"] == 1
    assert found["gap_us"] == [0] * 10
    assert found["length_us"] == [1_000_000] * 10
    assert found["ranks"][0]["wait_us"] == [200_000] * 10
    assert "most_wait" not in found["ranks"][0]


def test_windows_are_merged_to_save_room_and_the_largest_wait_is_kept(monkeypatch):
    monkeypatch.setattr(figures_module, "MOST_TIMELINE_NUMBERS", 200)
    times = ((0.7, 0.2, 0.1), (0.9, 0.0, 0.1))
    events = [
        committed_window(
            k, t=k + 1.0, times_s=((0.1, 0.8, 0.1), (0.9, 0, 0.1)) if k == 33 else times
        )
        for k in range(100)
    ]
    found = document_of(history_of(started(), *events))["timeline"]
    assert found["merged"] > 1
    assert json.dumps(found).count(",") < 200
    assert sum(found["length_us"]) + sum(found["gap_us"]) == 100_000_000
    assert sum(found["ranks"][1]["compute_us"]) == 90_000_000
    assert max(found["ranks"][0]["most_wait"]) == 800


# ── the summary ──────────────────────────────────────────────────────────────────────────────────

MATRIX = {"labels": ["x", "y"], "confusion": [[3, 1], [0, 2]]}


def test_the_confusion_matrix_is_taken_from_the_summary():
    found = document_of(ten_windows(), read_facts(MATRIX))
    assert found["confusion"] == {"labels": ["x", "y"], "counts": [[3, 1], [0, 2]]}
    assert read_facts({"confusion": None}).confusion is None


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ([1], "valid dictionary"),
        ({"elapsed_s": "long"}, "elapsed_s"),
        ({**MATRIX, "confusion": [[1], [2]]}, "confusion does not have a count for each"),
        ({**MATRIX, "confusion": [[1, -1], [0, 0]]}, "confusion.0.1"),
        ({"versions": 3}, "versions"),
    ],
)
def test_a_damaged_summary_is_refused(document, key):
    with pytest.raises(ValueError, match=key):
        read_facts(document)
