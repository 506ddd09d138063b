"""El Che's numbers: fixed points of the rules, and what holds whatever is reported."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener import ConfigError, ElChe
from evener.errors import CheckpointError

SIZES = st.integers(1, 8)


def report(cadence: ElChe, true_ms: list[float], sync_ms: float = 0.0, jitter=lambda: 1.0) -> None:
    counts = cadence.batch_counts
    wall = [c * ms * jitter() for c, ms in zip(counts, true_ms, strict=True)]
    cadence.report_timing(wall, counts, sync_ms)


# ── the rules, one by one ────────────────────────────────────────────────────────────────────────


def test_a_speed_ratio_gives_the_others_more():
    cadence = ElChe(3, anchor=10).with_speed_ratio(slow_rank=1, ratio=2.35)
    assert cadence.batch_counts == (24, 10, 24)
    assert cadence.has_speed_hint
    assert not cadence.is_calibrated


def test_the_first_report_is_believed_as_it_is():
    cadence = ElChe(2, anchor=10)
    cadence.report_timing([1000.0, 3000.0], [10, 10], 0.0)
    assert cadence.ms_per_batch == (100.0, 300.0)
    assert cadence.batch_counts == (30, 10)
    assert cadence.anchor_wall_ms == 3000.0


@pytest.mark.parametrize(
    ("new_ms", "expected_ms"),
    [
        (105.0, 0.1 * 105 + 0.9 * 100),  # 5 % off: the least gain
        (150.0, 0.5 * 150 + 0.5 * 100),  # 50 % off: a gain of one half
        (500.0, 0.8 * 500 + 0.2 * 100),  # far off: the greatest gain
    ],
)
def test_later_reports_move_by_how_far_they_are_off(new_ms, expected_ms):
    cadence = ElChe(1, anchor=10)
    cadence.report_timing([1000.0], [10], 0.0)
    cadence.report_timing([new_ms * 10], [10], 0.0)
    assert cadence.ms_per_batch[0] == pytest.approx(expected_ms)


def test_speed_is_that_of_the_batches_really_done():
    cadence = ElChe(2, anchor=10)
    cadence.report_timing([1000.0, 1000.0], [40, 5], 0.0)
    assert cadence.ms_per_batch == (25.0, 200.0)


def test_a_rank_without_work_keeps_its_timing():
    cadence = ElChe(2, anchor=4)
    cadence.report_timing([400.0, 800.0], [4, 4], 0.0)
    cadence.report_timing([400.0, 0.0], [4, 0], 0.0)
    assert cadence.ms_per_batch == (100.0, 200.0)


def test_counts_within_the_dead_zone_stay():
    cadence = ElChe(2, anchor=10)
    cadence.report_timing([100.0 * 10, 300.0 * 10], [10, 10], 0.0)
    cadence.report_timing([98.0 * 30, 300.0 * 10], [30, 10], 0.0)
    assert cadence.batch_counts == (30, 10)
    cadence.report_timing([60.0 * 30, 300.0 * 10], [30, 10], 0.0)
    assert cadence.batch_counts[0] > 33


def test_the_anchor_grows_at_once_and_comes_down_slowly_not_below_its_start():
    cadence = ElChe(2, anchor=10).with_overhead_target(0.1)
    cadence.report_timing([1000.0, 1000.0], [10, 10], 250.0)  # 25 % overhead
    assert cadence.anchor == 25
    cadence.report_timing([2500.0, 2500.0], [25, 25], 250.0)  # 10 %: neither more nor less
    assert cadence.anchor == 25
    for expected in (24, 23):
        cadence.report_timing([2500.0, 2500.0], [25, 25], 50.0)  # 2 %
        assert cadence.anchor == expected
    for _ in range(40):
        report(cadence, [100.0, 100.0], 1.0)
    assert cadence.anchor == 10


def test_the_anchor_stops_at_its_largest():
    cadence = ElChe(2, anchor=10).with_max_anchor(20)
    report(cadence, [100.0, 100.0], 5000.0)
    assert cadence.anchor == 20
    assert ElChe(2, anchor=300).anchor == 300
    shrunk = ElChe(2, anchor=30).with_speed_ratio(0, 2.0).with_max_anchor(10)
    assert shrunk.batch_counts == (10, 20)


def test_a_nudge_goes_below_the_start():
    cadence = ElChe(2, anchor=10)
    report(cadence, [100.0, 200.0])
    cadence.nudge_anchor_down(0.45)
    assert cadence.anchor == 5
    assert cadence.batch_counts == (10, 5)
    cadence.nudge_anchor_down(-1.0)  # taken for 0.1
    assert cadence.anchor == 1


def test_a_nudge_before_the_first_report_keeps_the_hint():
    cadence = ElChe(2, anchor=10).with_speed_ratio(slow_rank=1, ratio=2.3)
    cadence.nudge_anchor_down(0.5)
    assert (cadence.anchor, cadence.batch_counts) == (5, (23, 10))
    cadence.report_timing([2300.0, 2300.0], [23, 10], 0.0)
    assert cadence.batch_counts == (12, 5)


def test_max_batch_diff_limits_a_change():
    cadence = ElChe(2, anchor=10).with_max_batch_diff(3)
    report(cadence, [100.0, 100.0])
    cadence.report_timing([1000.0, 4000.0], [10, 10], 0.0)
    assert cadence.batch_counts == (13, 10)
    cadence.nudge_anchor_down(0.2)  # alone it would be (7, 2)
    assert cadence.batch_counts == (10, 2)


def test_state_goes_into_another_object():
    cadence = ElChe(2, anchor=10)
    report(cadence, [100.0, 230.0], 700.0)
    other = ElChe(2, anchor=10)
    other.load_state_dict(cadence.state_dict())
    assert other.batch_counts == cadence.batch_counts
    assert (other.anchor, other.anchor_wall_ms) == (cadence.anchor, cadence.anchor_wall_ms)
    with pytest.raises(CheckpointError, match="2 counts for 3 ranks"):
        ElChe(3, anchor=10).load_state_dict(cadence.state_dict())


# ── what holds for all reports ───────────────────────────────────────────────────────────────────

TIMES = st.floats(0.001, 1e6)


@given(
    world_size=SIZES,
    anchor=st.integers(1, 300),
    diff=st.one_of(st.none(), st.integers(0, 5)),
    data=st.data(),
)
def test_counts_are_positive_and_the_slowest_rank_has_the_anchor(world_size, anchor, diff, data):
    cadence = ElChe(world_size, anchor).with_max_batch_diff(diff)
    for _ in range(data.draw(st.integers(1, 6))):
        wall = data.draw(st.lists(TIMES, min_size=world_size, max_size=world_size))
        done = data.draw(st.lists(st.integers(0, 50), min_size=world_size, max_size=world_size))
        if not any(done):
            continue
        cadence.report_timing(wall, done, data.draw(st.floats(0, 1e6)))
        assert min(cadence.batch_counts) >= 1
        slowest = max(range(world_size), key=lambda r: cadence.ms_per_batch[r])
        assert cadence.batches(slowest) == cadence.anchor
        assert 1 <= cadence.anchor <= max(200, anchor)
        assert cadence.total_batches == sum(cadence.batch_counts)


@given(world_size=SIZES, anchor=st.integers(1, 50), n=st.integers(0, 2000), data=st.data())
def test_clamped_counts_sum_to_at_most_what_was_asked_for(world_size, anchor, n, data):
    speeds = data.draw(st.lists(st.floats(0.01, 50), min_size=world_size, max_size=world_size))
    cadence = ElChe(world_size, anchor).with_speeds(speeds)
    before = cadence.batch_counts
    clamped = cadence.clamp_total(n)
    assert sum(clamped) == min(n, cadence.total_batches)
    assert cadence.batch_counts == before
    if n >= cadence.total_batches:
        assert clamped == before
    elif n >= world_size:
        assert min(clamped) >= 1
    else:
        assert clamped == (1,) * n + (0,) * (world_size - n)


@given(change=st.floats(3.0, 10.0), anchor=st.integers(5, 40))
def test_a_rank_that_becomes_much_slower_is_followed_within_four_reports(change, anchor):
    cadence = ElChe(2, anchor)
    report(cadence, [100.0, 100.0])
    for _ in range(4):
        report(cadence, [100.0, 100.0 * change])
    exact = anchor * change
    # What the falling gain leaves over, and the dead zone.
    assert abs(cadence.batches(0) - exact) <= 0.25 * exact + 1.0
    assert cadence.batches(1) == anchor


@given(ratio=st.floats(1.0, 10.0), seed=st.integers(0, 10**6), anchor=st.integers(4, 40))
def test_jitter_of_five_percent_moves_no_count_back_and_forth(ratio, seed, anchor):
    noise = random.Random(seed)
    cadence = ElChe(2, anchor)
    for _ in range(10):
        report(cadence, [100.0, 100.0 * ratio], jitter=lambda: noise.uniform(0.95, 1.05))
    seen = [cadence.batches(0)]
    for _ in range(60):
        report(cadence, [100.0, 100.0 * ratio], jitter=lambda: noise.uniform(0.95, 1.05))
        if cadence.batches(0) != seen[-1]:
            seen.append(cadence.batches(0))
    assert len(seen) <= 3, f"counts went {seen}"
    assert max(seen) - min(seen) <= 0.1 * max(seen) + 1


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ElChe(0, 10), "world_size is 0"),
        (lambda: ElChe(2, 0), "anchor is 0"),
        (lambda: ElChe(2, 1.5), "anchor is 1.5; give a whole number"),
        (lambda: ElChe(2, 10).with_max_anchor(20.5), "max_anchor is 20.5"),
        (lambda: ElChe(2, 10).with_speed_ratio(1, 0.5), "ratio is 0.5"),
        (lambda: ElChe(2, 10).with_speed_ratio(2, 2.0), "slow_rank is 2"),
        (lambda: ElChe(2, 10).with_speeds([1.0, 0.0]), "speeds is"),
        (lambda: ElChe(2, 10).with_max_batch_diff(-1), "max_batch_diff is -1"),
        *(
            (lambda bad=bad: ElChe(2, 10).with_overhead_target(bad), f"overhead_target is {bad}")
            for bad in (math.nan, 0.0, 0.6)
        ),
        (lambda: ElChe(2, 10).batches(-1), "rank is -1"),
        (lambda: ElChe(2, 10).report_timing([1.0], [1, 1], 0.0), r"wall_ms is \[1.0\] for 2 ranks"),
        (
            lambda: ElChe(2, 10).report_timing([1.0, 1.0], [1], 0.0),
            r"actual_batches is \[1\] for 2 ranks",
        ),
        (lambda: ElChe(2, 10).report_timing([1.0, 1.0], [0, 0], 0.0), "no rank computed a batch"),
        (lambda: ElChe(2, 10).report_timing([1.0, -1.0], [1, 1], 0.0), "wall_ms is"),
        (lambda: ElChe(2, 10).report_timing([1.0, 1.0], [1, 1], math.inf), "sync_ms is inf"),
    ],
)
def test_bad_input_is_a_value_error_that_names_the_value(call, words):
    with pytest.raises(ConfigError, match=words) as caught:
        call()
    assert isinstance(caught.value, ValueError)
