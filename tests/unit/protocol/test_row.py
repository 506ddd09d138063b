"""What a row promises: an exact journey as numbers, and damage that is refused and named."""

import math
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ProtocolError
from evener.planning.guard import Verdict
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.report import Report
from evener.protocol.row import (
    ALL,
    Purpose,
    Row,
    decode,
    encode,
    pack,
    room_of,
    unpack,
    unpack_local_plan,
    unpack_plan,
)

BOUNDED = settings(deadline=None, derandomize=True, max_examples=200, database=None)
SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple)
WHOLE = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)

REPORTS = st.builds(
    Report,
    weight=st.floats(0, 1e300),
    loss_sum=st.floats(allow_nan=False),
    compute_s=SECONDS,
    busy_s=SECONDS,
    micro_batches=WHOLE,
    samples=WHOLE,
    steps=WHOLE,
    skipped=WHOLE,
    overflows=WHOLE,
    non_finite=st.integers(-2, 10**6),
    own_norm=st.floats(allow_nan=False),
    buffers_changed=st.booleans(),
    loss_scale=st.floats(0, 2**24),
    limit=WHOLE,
    warmup_s=SECONDS,
    warmup_busy_s=SECONDS,
    warmup_micro_batches=WHOLE,
    warmup_steps=WHOLE,
    warmup_samples=WHOLE,
    wait_s=SECONDS,
    sync_s=SECONDS,
    update_s=SECONDS,
    update_parts=WHOLE,
    elapsed_s=SECONDS,
    divergence=st.floats(allow_nan=False),
    stale_steps=WHOLE,
    data_s=SECONDS,
    sent_bytes=WHOLE,
    work_ago_s=SECONDS,
    wait_ago_s=SECONDS,
    sync_ago_s=SECONDS,
)
ROWS = st.builds(
    Row,
    purpose=st.sampled_from(Purpose),
    window=WHOLE,
    generation=WHOLE,
    stop=st.booleans(),
    drop=st.booleans(),
    left=st.booleans(),
    busy=st.booleans(),
    part=st.integers(ALL, 100),
    renew=st.booleans(),
    trainable=WHOLE,
    rates=st.integers(0, 2**32 - 1).map(float),
    hooked=st.booleans(),
    may_skip=st.booleans(),
    late_non_finite=st.integers(-2, 10**6),
    report=REPORTS,
    body=st.lists(st.floats(allow_nan=False), max_size=room_of(1)).map(tuple),
)


def window_plan(shares: tuple[int, ...], *, start: int = 0, window: int = 0) -> WindowPlan:
    return WindowPlan(window, 3, start, sum(shares), shares, (0,) * len(shares))


def local_plan(**changes) -> LocalPlan:
    values = {
        "window": 3,
        "epoch": 1,
        "window_s": 1.5,
        "blocking": True,
        "steps": (4, 2),
        "most": (6, 4),
        "queues": (12, 8),
        "least": 3,
        "anchor": 2,
        "verdict": Verdict.NUDGE_DOWN,
    }
    return LocalPlan(**(values | changes))


def place_of(field: str) -> int:
    """Where a field of a packed report is."""
    return Report._fields.index(field)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


@BOUNDED
@given(row=ROWS, world_size=st.integers(1, 9))
def test_a_row_survives_the_journey(row, world_size):
    sent = encode(row, world_size)
    assert all(type(number) is float for number in sent)
    received = decode(sent)
    assert received == row
    assert type(received.window) is int
    assert type(received.stop) is bool
    assert type(received.purpose) is Purpose


@BOUNDED
@given(rows=st.lists(ROWS, min_size=2, max_size=2), world_size=st.integers(1, 9))
def test_rows_of_one_team_are_of_one_length(rows, world_size):
    assert len({len(encode(row, world_size)) for row in rows}) == 1


@BOUNDED
@given(
    row=ROWS,
    data=st.data(),
    value=st.one_of(st.integers(-3, 2**54).map(float), st.floats(), st.just(0.5)),
)
def test_any_single_damaged_number_is_refused(row, data, value):
    sent = encode(row, 1)
    place = data.draw(st.integers(0, len(sent) - 1))
    if sent[place] == value:
        value += 1.0
    sent[place] = value
    with pytest.raises(ProtocolError, match="checksum"):
        decode(sent)


def test_damage_that_keeps_every_sum_is_refused():
    sent = encode(Row(purpose=Purpose.WINDOW, window=3, generation=2), 2)
    sent[1], sent[2] = sent[2], sent[1]
    with pytest.raises(ProtocolError, match="does not match its checksum"):
        decode(sent)


def test_a_body_that_is_too_long_is_refused():
    row = Row(purpose=Purpose.VALUE, window=0, body=(0.0,) * (room_of(2) + 1))
    with pytest.raises(ProtocolError, match="payload of 23 numbers, room for 22"):
        encode(row, 2)
    assert len(decode(encode(row, 3)).body) == 23


def test_a_number_too_large_to_travel_is_refused():
    with pytest.raises(ProtocolError, match=r"2\*\*53"):
        encode(Row(purpose=Purpose.WINDOW, window=2**53 + 1), 1)


def test_every_purpose_says_what_a_rank_is_doing():
    said = [purpose.deed for purpose in Purpose]
    assert all(said)
    assert len(set(said)) == len(said)


# ── plans ────────────────────────────────────────────────────────────────────────────────────────


@BOUNDED
@given(
    shares=SHARES,
    window=WHOLE,
    epoch=st.integers(0, 2**31),
    start=WHOLE,
)
def test_a_plan_of_sync_survives_the_journey(shares, window, epoch, start):
    plan = WindowPlan(window, epoch, start, sum(shares), shares, (0, *[1] * (len(shares) - 1)))
    numbers = pack(plan)
    assert all(type(number) is float for number in numbers)
    received = unpack(WindowPlan, numbers)
    assert received == plan
    assert all(type(share) is int for share in received.shares)
    row = Row(purpose=Purpose.WINDOW, window=0, body=tuple(numbers))
    assert unpack(WindowPlan, decode(encode(row, len(shares))).body) == plan


@pytest.mark.parametrize("changes", [{}, {"window_s": math.inf}, {"blocking": False}])
def test_a_plan_of_local_steps_survives_the_journey(changes):
    sent = local_plan(**changes)
    received = unpack_local_plan(pack(sent))
    assert received == sent
    assert type(received.blocking) is bool
    assert type(received.verdict) is Verdict


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 1.5, "'window' is 1.5, which is not a whole"),
        (2, math.nan, "'start' is nan"),
        (3, math.inf, "'size' is inf"),
        (3, 5.0, "sum to 4 samples, but the window has 5"),
        (4, -2.0, "'shares' is -2, outside"),
        (1, 2.0**53 + 2, "'epoch' is .* outside"),
    ],
)
def test_damage_is_named(place, value, message):
    numbers = pack(window_plan((2, 2)))
    numbers[place] = value
    with pytest.raises(ProtocolError, match=message):
        unpack_plan(numbers, 2)


@pytest.mark.parametrize("window_s", [0.0, -0.0, -1.0, math.nan])
def test_a_window_that_takes_no_time_is_refused(window_s):
    with pytest.raises(ProtocolError, match=r"out of range: window_s must|is not a duration"):
        unpack_local_plan(pack(local_plan(window_s=window_s)))


def test_a_plan_of_another_length_is_refused():
    numbers = pack(local_plan())
    with pytest.raises(ProtocolError, match="encoded LocalPlan of 14 numbers"):
        unpack(LocalPlan, [*numbers, 1.0])
    with pytest.raises(ProtocolError, match="same version"):
        unpack(WindowPlan, [1.0, 2.0])


def test_a_verdict_that_does_not_exist_is_refused():
    numbers = pack(local_plan())
    numbers[6] = 77.0  # single numbers come first
    with pytest.raises(ProtocolError, match="'verdict' is 77, outside"):
        unpack(LocalPlan, numbers)


# ── reports ──────────────────────────────────────────────────────────────────────────────────────


@BOUNDED
@given(report=REPORTS)
def test_a_report_survives_the_journey_exactly(report):
    numbers = pack(report)
    assert all(type(number) is float for number in numbers)
    received = unpack(Report, numbers)
    assert received == report
    assert received == report
    assert list(map(type, received)) == list(map(type, report))
    assert type(received.samples) is int


def test_what_is_not_finite_travels_where_it_is_the_users():
    lost = Report(loss_sum=math.nan, weight=math.inf, non_finite=-1, divergence=math.inf)
    received = unpack(Report, pack(lost))
    assert math.isnan(received.loss_sum)
    assert received.weight == received.divergence == math.inf
    assert received.non_finite == -1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("compute_s", -1.0, "compute_s=-1.0, which is not a duration"),
        ("busy_s", math.nan, "busy_s=nan"),
        ("wait_s", -0.5, "wait_s=-0.5"),
        ("micro_batches", -1.0, "'micro_batches' is -1, outside"),
        ("samples", 0.5, "'samples' is 0.5, which is not a whole"),
        ("non_finite", -3.0, "'non_finite' is -3, outside"),
        ("warmup_micro_batches", -1.0, "'warmup_micro_batches' is -1, outside"),
        ("warmup_samples", 0.5, "'warmup_samples' is 0.5, which is not a whole"),
        ("steps", math.inf, "'steps' is inf"),
    ],
)
def test_a_bad_report_is_refused(field, value, message):
    numbers = pack(Report())
    numbers[place_of(field)] = value
    with pytest.raises(ProtocolError, match=message):
        unpack(Report, numbers)


def test_a_short_report_is_refused():
    with pytest.raises(ProtocolError, match="encoded Report of 6 numbers was received, it has 31"):
        unpack(Report, [0.0] * 6)


def test_only_fields_of_known_kinds_travel():
    for value in Row(purpose=Purpose.PLAN, window=0):
        assert isinstance(value, int | float | Enum | Report | tuple)
