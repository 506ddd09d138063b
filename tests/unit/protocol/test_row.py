"""What a row promises: an exact journey as numbers."""

import math
from dataclasses import replace
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    unpack,
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
    digest=st.integers(0, 2**48).map(float),
    report=REPORTS,
    num_samples=WHOLE,
    batch_size=WHOLE,
    seed=WHOLE,
    plan=st.none(),
)


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


def test_every_purpose_says_what_a_rank_is_doing():
    said = [purpose.description for purpose in Purpose]
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
    row = Row(purpose=Purpose.WINDOW, window=0, plan=plan)
    received = decode(encode(row, len(shares))).plan
    assert received == plan
    assert all(type(share) is int for share in received.shares)
    bare = replace(plan, parked=())  # nobody is parked
    received = decode(encode(row._replace(plan=bare), len(shares))).plan
    assert received == replace(plan, parked=(0,) * len(shares))


@pytest.mark.parametrize("changes", [{}, {"window_s": math.inf}, {"blocking": False}])
def test_a_plan_of_local_steps_survives_the_journey(changes):
    sent = local_plan(**changes)
    row = Row(purpose=Purpose.PLAN, window=0, plan=sent)
    received = decode(encode(row, len(sent.steps))).plan
    assert received == sent
    assert type(received.blocking) is bool
    assert type(received.verdict) is Verdict


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


def test_only_fields_of_known_kinds_travel():
    for value in Row(purpose=Purpose.PLAN, window=0):
        assert isinstance(value, int | float | Enum | Report | None)
