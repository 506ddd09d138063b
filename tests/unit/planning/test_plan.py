"""What a plan and a report promise: every position once, and an exact journey as numbers."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ProtocolError
from evener.planning.plan import (
    REPORT_LENGTH,
    WindowPlan,
    decode_plan,
    decode_report,
    encode_plan,
    encode_report,
    plan_length,
)
from evener.planning.report import Report

BOUNDED = settings(deadline=None, derandomize=True, max_examples=200, database=None)
SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple)


def plan_of(shares: tuple[int, ...], *, start: int = 0, window: int = 0) -> WindowPlan:
    return WindowPlan(window, 3, start, sum(shares), shares)


@BOUNDED
@given(shares=SHARES, start=st.integers(0, 10**12))
def test_positions_partition_the_window(shares, start):
    plan = plan_of(shares, start=start)
    seen = []
    for rank, share in enumerate(shares):
        assert len(plan.positions(rank)) == share
        seen += plan.positions(rank)
    assert seen == list(range(start, start + plan.size))
    assert plan.stop == start + plan.size


def test_layout_by_example():
    plan = plan_of((3, 0, 1, 2), start=10)
    expected = [range(10, 13), range(13, 13), range(13, 14), range(14, 16)]
    assert [plan.positions(rank) for rank in range(4)] == expected


@pytest.mark.parametrize("rank", [-1, 2])
def test_positions_of_a_rank_that_is_not_there(rank):
    with pytest.raises(ProtocolError, match=f"rank {rank} has no place"):
        plan_of((1, 1)).positions(rank)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 0, 0, 4, (1, 2)), r"sum to 3 samples, but the window has 4"),
        ((0, 0, 0, 1, (2, -1)), r"rank 1 a share of -1"),
        ((-1, 0, 0, 0, ()), r"window=-1"),
        ((0, 0, -5, 0, ()), r"start=-5"),
    ],
)
def test_a_plan_that_does_not_add_up_cannot_be_made(fields, message):
    with pytest.raises(ProtocolError, match=message):
        WindowPlan(*fields)


@BOUNDED
@given(
    shares=SHARES,
    window=st.integers(0, 2**53),
    epoch=st.integers(0, 2**31),
    start=st.integers(0, 2**53),
)
def test_plan_round_trip(shares, window, epoch, start):
    plan = WindowPlan(window, epoch, start, sum(shares), shares)
    row = encode_plan(plan, len(shares))
    assert len(row) == plan_length(len(shares))
    assert all(type(value) is float for value in row)
    decoded = decode_plan(row, len(shares))
    assert decoded == plan
    assert all(type(share) is int for share in decoded.shares)


def test_no_plan_round_trip():
    assert decode_plan(encode_plan(None, 3), 3) is None
    with pytest.raises(ProtocolError, match="world_size"):
        encode_plan(None)


@BOUNDED
@given(
    shares=SHARES,
    data=st.data(),
    value=st.one_of(st.integers(-3, 2**54).map(float), st.floats(), st.just(0.5)),
)
def test_any_single_damaged_number_is_refused(shares, data, value):
    row = encode_plan(plan_of(shares, start=7, window=11))
    place = data.draw(st.integers(0, len(row) - 1))
    if row[place] == value:
        value += 1.0
    row[place] = value
    with pytest.raises(ProtocolError):
        decode_plan(row, len(shares))


def test_damage_that_keeps_every_sum_is_refused():
    row = encode_plan(plan_of((4, 4)))
    row[4], row[5] = 5.0, 3.0
    with pytest.raises(ProtocolError, match="checksum"):
        decode_plan(row, 2)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 1.5, "'window' is 1.5, which is not a whole"),
        (2, math.nan, "'start' is nan"),
        (3, math.inf, "'size' is inf"),
        (4, -2.0, "'share of rank 0' is -2, outside"),
        (1, 2.0**53 + 2, "'epoch' is .* outside"),
    ],
)
def test_damage_is_named(place, value, message):
    row = encode_plan(plan_of((2, 2)))
    row[place] = value
    with pytest.raises(ProtocolError, match=message):
        decode_plan(row, 2)


def test_plan_for_another_world_size_is_refused():
    row = encode_plan(plan_of((2, 2)))
    with pytest.raises(ProtocolError, match="3 ranks has 8 numbers, received 7"):
        decode_plan(row, 3)
    with pytest.raises(ProtocolError, match="for 2 ranks, not for 3"):
        encode_plan(plan_of((2, 2)), 3)


def test_a_number_too_large_to_travel_is_refused():
    with pytest.raises(ProtocolError, match=r"2\*\*53"):
        encode_plan(WindowPlan(2**53 + 1, 0, 0, 1, (1,)))


REPORTS = st.builds(
    Report,
    weight=st.floats(0, 1e300),
    loss_sum=st.floats(allow_nan=False),
    compute_s=st.floats(0, 1e9),
    micro_batches=st.integers(0, 2**53),
    samples=st.integers(0, 2**53),
    non_finite=st.integers(-1, 10**6),
    leaving=st.integers(0, 2),
    warmup_s=st.floats(0, 1e9),
    warmup_micro_batches=st.integers(0, 2**53),
    warmup_samples=st.integers(0, 2**53),
)


@BOUNDED
@given(report=REPORTS)
def test_report_round_trip_is_exact(report):
    row = encode_report(report)
    assert len(row) == REPORT_LENGTH
    assert all(type(value) is float for value in row)
    decoded = decode_report(row)
    assert decoded == report
    assert dataclasses.astuple(decoded) == dataclasses.astuple(report)
    assert type(decoded.samples) is int


def test_a_loss_that_is_not_finite_travels():
    decoded = decode_report(encode_report(Report(loss_sum=math.nan, non_finite=-1)))
    assert math.isnan(decoded.loss_sum)
    assert decoded.non_finite == -1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute_s": -1.0}, "compute_s=-1.0"),
        ({"compute_s": math.nan}, "compute_s=nan"),
        ({"micro_batches": -1}, "'micro_batches' is -1, outside"),
        ({"samples": 0.5}, "'samples' is 0.5, which is not a whole"),
        ({"non_finite": -2}, "'non_finite' is -2, outside"),
        ({"leaving": 3}, "leaving=3"),
        ({"warmup_s": math.inf}, "warmup_s=inf"),
        ({"warmup_micro_batches": -1}, "'warmup_micro_batches' is -1, outside"),
        ({"warmup_samples": 0.5}, "'warmup_samples' is 0.5, which is not a whole"),
    ],
)
def test_bad_report_is_refused(changes, message):
    row = encode_report(Report(**changes))
    with pytest.raises(ProtocolError, match=message):
        decode_report(row)


def test_short_report_is_refused():
    with pytest.raises(ProtocolError, match="10 numbers, received 6"):
        decode_report([0.0] * 6)
