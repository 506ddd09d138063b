"""Lists of a report: what happened, in order and in bounded memory."""

import pytest

from evener.observe.event_lines import from_line, to_line
from evener.observe.events import make_event
from evener.run_report.history import RunHistory
from helpers.event_cases import committed_window, started


def taken(*events) -> RunHistory:
    found = RunHistory()
    for event in events:
        found.add(event)
    return found


def resumed(window: int, t: float):
    return make_event("run_resumed", t=t, window=window, path="step-1", new_data=False)


def evaluation(window: int, t: float, loss: float = 3.0):
    numbers = {"loss": loss, "weight": 1.0, "elapsed_s": 0.5}
    return make_event("eval", t=t, window=window, name="heldout", **numbers)


def test_a_resume_and_its_start_are_one_session():
    found = taken(started(), committed_window(0, t=1.0), resumed(1, 9.0), started(t=9.0))
    assert found.sessions == 2
    assert taken(started(), started(t=9.0)).sessions == 2


def test_what_is_said_of_members_and_of_the_end_is_kept():
    found = taken(
        started(),
        make_event("worker_started", t=0.0, rank=1, member="b", pid=7, host="box", device="cpu"),
        make_event("worker_lost", t=2.0, rank=1, member="b", window=1, reason="killed"),
        make_event("reformed", t=2.0, window=1, generation=1, members=["a"], reform_s=0.03),
        make_event("run_finished", t=3.0, window=1, reason="failed", message="WorkerError: gone"),
    )
    assert (found.workers["b"]["host"], found.workers["b"]["device"]) == ("box", "cpu")
    assert [one["text"] for one in found.incidents] == [
        "lost rank 1 (b): killed; the team formed again with 1 rank; it cost 30 ms (30 ms until "
        "the team had formed again)",
        "failed after step 1: WorkerError: gone",
    ]
    assert not found.has_summary


def test_a_rank_that_is_slowed_on_purpose_is_known():
    place = {"t": 0.0, "pid": 7, "host": "box", "device": "cpu"}
    slow = make_event("worker_started", rank=1, member="b", emulated=2.0, **place)
    events = [from_line(to_line(one)) for one in (started(), slow, committed_window(0))]
    found = taken(*events)
    assert [found.slowed(lane) for lane in (0, 1)] == [None, 2.0]


def test_evaluations_of_a_state_that_is_void_are_dropped():
    windows = [committed_window(0, t=1.0), evaluation(1, 1.5), committed_window(1, t=2.0)]
    found = taken(started(), *windows, evaluation(2, 2.5), resumed(1, t=4.0))
    assert [one["window"] for one in found.evals] == [1]
    found.add(committed_window(1, t=5.0))
    found.add(evaluation(2, 5.5))
    assert [one["window"] for one in found.evals] == [1, 2]


def test_a_checkpoint_ends_when_its_thread_has_written_it():
    saved = {"path": "p", "num_bytes": 9, "write_s": 0.5, "copy_s": 0.05, "rank": 0}
    event = make_event("checkpoint", t=13.0, window=1, begin_t=11.2, **saved)
    (one,) = taken(started(t=10.0), event).checkpoints
    assert (one["t_s"], one["copy_s"], one["rank"]) == (pytest.approx(1.7), 0.05, 0)
