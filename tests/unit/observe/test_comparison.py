"""Trials compared at equal time and at equal work, and what is recommended."""

import math
from dataclasses import replace

import numpy as np
import pytest

from evener.observe.comparison import Trial, compare, read_trial, table
from evener.observe.events import make_event
from helpers.event_cases import committed_window, started


def trial(
    policy: str, speed: float, loss_of, *, backend: str = "gloo", seconds: int = 100
) -> Trial:
    """A window a second; ``loss_of(units)`` is its loss."""
    elapsed_s = np.arange(1.0, seconds + 1)
    return Trial(
        policy=policy,
        backend=backend,
        unit="tokens",
        speed=speed,
        elapsed_s=elapsed_s,
        units=speed * elapsed_s,
        losses=np.array([loss_of(speed * t) for t in elapsed_s]),
    )


def falling(units: float) -> float:
    return 4.0 * math.exp(-units / 20_000)


def worse(units: float) -> float:
    return 1.5 * falling(units)


def test_losses_at_equal_time_and_at_equal_work():
    result = compare([trial("sync", 100, falling), trial("cadence", 200, falling, seconds=80)], {})
    assert (result.seconds, result.units) == (80.0, 10_000.0)
    sync, cadence = result.candidates
    assert sync.speed == pytest.approx(100)
    assert cadence.speed == pytest.approx(200)
    # The same loss as a function of work: equal at equal work, lower for the faster by time.
    assert sync.loss_by_units == pytest.approx(cadence.loss_by_units, rel=0.02)
    assert cadence.loss_by_time < sync.loss_by_time
    # The mean over the last fifth: units 6,400 to 8,000, a window every 100.
    expected = sum(falling(u) for u in range(6400, 8001, 100)) / 17
    assert sync.loss_by_time == pytest.approx(expected)


def test_the_lowest_loss_in_the_same_time_is_recommended_with_its_reason():
    result = compare([trial("sync", 100, falling), trial("cadence", 200, falling)], {})
    assert result.recommended == "cadence/gloo"
    assert "its loss after 100 s is the lowest" in result.reason
    assert "of sync/gloo" in result.reason


def test_a_trial_that_has_done_all_its_steps_does_not_shorten_the_comparison():
    early = replace(trial("async", 400, falling, seconds=20), completed=True)
    result = compare([trial("sync", 100, falling), early], {})
    assert result.seconds == 100.0
    assert result.candidates[1].loss_by_time == pytest.approx(early.loss_by_time(20.0))
    both = [replace(trial("sync", 100, falling), completed=True), early]
    assert compare(both, {}).seconds == 100.0


def test_speed_that_costs_more_loss_than_it_saves_is_not():
    result = compare([trial("sync", 100, falling), trial("async", 110, worse)], {})
    assert result.recommended == "sync/gloo"
    assert "against 110 of async/gloo" in result.reason


def test_where_losses_cannot_be_told_apart_the_exact_policy_wins():
    result = compare([trial("cadence", 100.1, falling), trial("sync", 100, falling)], {})
    assert result.recommended == "sync/gloo"
    assert "does not differ from that of cadence/gloo" in result.reason
    assert "it is exact" in result.reason


def test_rounds_that_differ_by_more_than_combinations_decide_nothing():
    noisy = [trial("sync", 100, falling), trial("sync", 100, worse)]
    result = compare([*noisy, trial("cadence", 120, falling)], {})
    (sync, cadence) = result.candidates
    assert sync.rounds == 2
    assert sync.spread > cadence.loss_by_time * 0.3
    assert result.recommended == "sync/gloo"


def test_the_fastest_backend_of_equals_is_taken():
    flat = [trial("sync", s, lambda _: 2.0, backend=b) for s, b in ((100, "gloo"), (300, "nccl"))]
    result = compare(flat, {})
    assert result.recommended == "sync/nccl"
    assert "it is the fastest of these" in result.reason


def test_the_table_names_what_was_skipped_and_why():
    text = table(compare([trial("sync", 100, falling)], {"sync/nccl": "no GPU"}))
    lines = text.splitlines()
    assert lines[0].split("  ")[0] == "policy/backend"
    assert lines[1].startswith("sync/gloo")
    assert " ".join(lines[2:4]) == (
        "loss by time: after 100 s; by work: after 10,000 tokens; spread: how much rounds"
        "   differ by time"
    )
    assert lines[4] == "sync/nccl skipped: no GPU"
    assert lines[5] == "recommended: sync/gloo, because nothing else could be measured"
    assert "of each rank's own copy" not in text
    local = table(compare([trial("sync", 100, falling), trial("async", 100, falling)], {}))
    assert "in cadence and async these are losses of each rank's own copy" in local
    assert "no combination could be measured" in table(compare([], {"sync/nccl": "no GPU"}))


def test_a_trial_is_read_from_the_events_of_a_run():
    evaluation = {"name": "heldout", "loss": 2.5, "weight": 1.0, "elapsed_s": 4.0}
    events = [
        started(t=100.0),
        committed_window(0, t=101.0, samples=(3, 1), losses=(2.0, 6.0)),
        make_event("eval", t=105.0, window=1, **evaluation),
        committed_window(1, t=106.5, samples=(4, 0), losses=(1.0, None)),
    ]
    read = read_trial(events, "sync", "auto")
    assert read is not None
    found = (read.elapsed_s, read.units, read.losses)
    assert [column.tolist() for column in found] == [[1.0, 2.5], [40.0, 80.0], [3.0, 1.0]]
    assert (read.heldout_loss, read.speed) == (2.5, pytest.approx(40 / 1.5))
    assert not read.completed
    end = make_event("run_finished", t=107.0, window=2, reason="completed", message=None)
    assert read_trial([*events, end], "sync", "auto").completed
    assert read_trial(events[:1], "sync", "auto") is None
