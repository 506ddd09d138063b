"""The speed model: exact where nothing disturbs it, unmoved by what is not a change of speed."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.planning.speed import CostModel, SpeedModel, num_micro_batches

LINES = st.builds(
    CostModel, fixed_s=st.floats(0, 0.2), per_sample_s=st.floats(1e-3, 0.1), window_s=st.just(0.0)
)


def measured(line: CostModel, samples: int = 24, windows: int = 3) -> SpeedModel:
    """After so many windows of that many samples, in micro-batches of 8."""
    model = SpeedModel()
    for _ in range(windows):
        model.observe(samples, num_micro_batches(samples, 8), line.seconds(samples, 8))
    return model


# ── CostModel ────────────────────────────────────────────────────────────────────────────────────


def test_cost_by_example():
    cost = CostModel(0.5, 0.1)
    assert cost.seconds(0, 4) == 0.0
    assert cost.seconds(4, 4) == pytest.approx(0.9)
    assert cost.seconds(5, 4) == pytest.approx(1.5)
    assert cost.seconds(5, None) == pytest.approx(1.0)
    assert cost.scaled(2.0) == CostModel(1.0, 0.2)
    assert [num_micro_batches(samples, 3) for samples in range(5)] == [0, 1, 1, 1, 2]
    assert [num_micro_batches(samples, None) for samples in range(3)] == [0, 1, 1]


# ── observe ──────────────────────────────────────────────────────────────────────────────────────


@given(line=LINES, one=st.integers(1, 60), other=st.integers(1, 60))
def test_at_two_sizes_the_prediction_is_as_good_as_the_windows(line, one, other):
    model = measured(line, one, 10)
    for _ in range(10):
        model.observe(other, num_micro_batches(other, 8), line.seconds(other, 8))
    assert model.cost.seconds(other, 8) == pytest.approx(line.seconds(other, 8), rel=0.02)


def test_what_tells_nothing_is_ignored():
    model = measured(CostModel(0.1, 0.01))
    before = model.state_dict()
    for row in [(0, 0, 1.0), (0, 1, 1.0), (5, 0, 1.0), (5, 1, 0.0), (5, 1, math.inf)]:
        model.observe(*row)
    model.observe(5, 1, math.nan)
    model.observe(5, 1, -1.0)
    assert model.state_dict() == before


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("at", [3, 5, 10, 30])
def test_an_outlier_moves_nothing(factor, at):
    line = CostModel(0.01, 0.004)
    rng = random.Random(at)
    model = SpeedModel()
    for _ in range(at):
        model.observe(24, 3, line.seconds(24, 8) * rng.uniform(0.98, 1.02))
    before = model.cost.seconds(24, 8)
    model.observe(24, 3, line.seconds(24, 8) * factor)
    assert model.cost.seconds(24, 8) == pytest.approx(before, rel=0.03)
    for _ in range(5):
        model.observe(24, 3, line.seconds(24, 8) * rng.uniform(0.98, 1.02))
    assert model.cost.seconds(24, 8) == pytest.approx(line.seconds(24, 8), rel=0.03)


def test_a_slow_first_window_is_forgotten_at_once():
    line = CostModel(0.01, 0.004)
    model = SpeedModel()
    model.observe(24, 3, line.seconds(24, 8) * 10)
    model.observe(24, 3, line.seconds(24, 8))
    assert model.cost.seconds(24, 8) == pytest.approx(line.seconds(24, 8))


@pytest.mark.parametrize("factor", [4.0, 0.25, 1.5])
@pytest.mark.parametrize("before", [0, 2, 5, 15, 60])
def test_a_lasting_change_is_followed_within_five_windows(factor, before):
    line = CostModel(0.01, 0.004)
    rng = random.Random(before)
    model = SpeedModel()
    for _ in range(before):
        model.observe(24, 3, line.seconds(24, 8) * rng.uniform(0.97, 1.03))
    for _ in range(5):
        model.observe(24, 3, factor * line.seconds(24, 8) * rng.uniform(0.97, 1.03))
    assert model.cost.seconds(24, 8) == pytest.approx(factor * line.seconds(24, 8), rel=0.05)


@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.floats(0, 1e3)), max_size=40)
)
def test_costs_stay_sensible_whatever_is_measured(rows):
    model = SpeedModel()
    for row in rows:
        model.observe(*row)
    if model.cost is not None:
        assert 0.0 <= model.cost.fixed_s < math.inf
        assert 0.0 < model.cost.per_sample_s < math.inf


# ── state ────────────────────────────────────────────────────────────────────────────────────────


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 9), st.floats(1e-3, 1e3)), max_size=40
    ),
    windows=st.integers(0, 3),
)
def test_state_round_trip_goes_on_alike(rows, windows):
    model = measured(CostModel(0.01, 0.004), windows=windows)
    half = len(rows) // 2
    for row in rows[:half]:
        model.observe(*row)
    resumed = SpeedModel()
    resumed.load_state_dict(json.loads(json.dumps(model.state_dict())))
    for row in rows[half:]:
        model.observe(*row)
        resumed.observe(*row)
    assert resumed.state_dict() == model.state_dict()
    assert resumed.cost == model.cost
