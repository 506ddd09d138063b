"""The speed model: exact where nothing disturbs it, unmoved by what is not a change of speed."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.cadence.speed import CostModel, SpeedModel, num_micro_batches
from evener.errors import CheckpointError, ConfigError

BOUNDED = settings(deadline=None, derandomize=True, max_examples=200, database=None)
LINES = st.builds(CostModel, fixed_s=st.floats(0, 0.2), per_sample_s=st.floats(1e-3, 0.1))


def probed(line: CostModel, small: int = 1, large: int = 8) -> SpeedModel:
    model = SpeedModel()
    model.probe([(size, 1, line.seconds(size, None)) for size in (small, large)])
    return model


def assert_close(cost: CostModel, expected: CostModel, rel: float = 1e-9) -> None:
    assert cost.fixed_s == pytest.approx(expected.fixed_s, rel=rel, abs=rel * expected.per_sample_s)
    assert cost.per_sample_s == pytest.approx(expected.per_sample_s, rel=rel)


# ── CostModel ────────────────────────────────────────────────────────────────────────────────────


def test_cost_by_example():
    cost = CostModel(0.5, 0.1)
    assert cost.seconds(0, 4) == 0.0
    assert cost.seconds(4, 4) == pytest.approx(0.9)
    assert cost.seconds(5, 4) == pytest.approx(1.5)
    assert cost.seconds(5, None) == pytest.approx(1.0)
    assert cost.samples_per_s(5, None) == pytest.approx(5.0)
    assert cost.scaled(2.0) == CostModel(1.0, 0.2)
    assert [num_micro_batches(samples, 3) for samples in range(5)] == [0, 1, 1, 1, 2]
    assert [num_micro_batches(samples, None) for samples in range(3)] == [0, 1, 1]


# ── probe and hint ───────────────────────────────────────────────────────────────────────────────


def test_nothing_is_known_at_first():
    model = SpeedModel()
    assert not model.is_known
    assert not model.is_measured
    with pytest.raises(ConfigError, match="not known"):
        _ = model.cost


@BOUNDED
@given(line=LINES, small=st.integers(1, 4), more=st.integers(1, 60))
def test_probe_is_exact_without_noise(line, small, more):
    model = probed(line, small, small + more)
    assert model.is_measured
    assert_close(model.cost, line, rel=1e-7)


def test_probe_with_several_micro_batches_is_exact():
    line = CostModel(0.02, 0.003)
    model = SpeedModel()
    model.probe([(8, 1, line.seconds(8, 8)), (8, 8, line.seconds(8, 1))])
    assert_close(model.cost, line)


def test_of_repeats_the_fastest_counts():
    line = CostModel(0.02, 0.003)
    model = SpeedModel()
    model.probe([(1, 1, 9.0), (8, 1, 0.044), (1, 1, 0.023), (8, 1, 7.0), (4, 1, 5.0)])
    assert_close(model.cost, line)


@BOUNDED
@given(
    small_s=st.floats(1e-4, 10.0),
    large_s=st.floats(1e-4, 10.0),
    small=st.integers(1, 4),
    more=st.integers(1, 60),
)
def test_probe_makes_sense_under_any_noise(small_s, large_s, small, more):
    model = SpeedModel()
    large = small + more
    model.probe([(small, 1, small_s), (large, 1, large_s)])
    cost = model.cost
    assert cost.fixed_s >= 0.0
    assert cost.per_sample_s > 0.0
    assert cost.seconds(large, None) == pytest.approx(large_s)
    assert cost.seconds(small, None) <= cost.seconds(large, None)


def test_probe_of_sizes_that_tell_no_fixed_cost():
    model = SpeedModel()
    model.probe([(4, 1, 0.4), (8, 2, 0.8)])
    assert_close(model.cost, CostModel(0.0, 0.1))
    model = SpeedModel()
    model.probe([(4, 1, 0.4)])
    assert_close(model.cost, CostModel(0.0, 0.1))


def test_probe_without_a_measurement_tells_nothing():
    model = SpeedModel()
    model.probe([(0, 0, 1.0), (1, 1, 0.0), (1, 1, math.inf), (1, 1, math.nan), (1, 0, 1.0)])
    assert not model.is_known


def test_hint_holds_until_something_is_measured():
    model = SpeedModel()
    model.hint(0.25)
    assert model.is_known
    assert not model.is_measured
    assert model.cost == model.hinted == CostModel(0.0, 4.0)
    model.observe(10, 2, 0.5)
    assert model.is_measured
    assert_close(model.cost, CostModel(0.0, 0.05))
    model = probed(CostModel(0.1, 0.01))
    model.hint(3.0)
    assert_close(model.cost, CostModel(0.1, 0.01))
    assert model.hinted is None


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_bad_hint_is_refused(speed):
    with pytest.raises(ConfigError, match="speed_hint"):
        SpeedModel().hint(speed)


# ── observe ──────────────────────────────────────────────────────────────────────────────────────


@BOUNDED
@given(line=LINES, share=st.integers(1, 100), windows=st.integers(1, 40))
def test_windows_that_agree_with_the_probe_change_nothing(line, share, windows):
    model = probed(line)
    for _ in range(windows):
        model.observe(share, num_micro_batches(share, 8), line.seconds(share, 8))
    assert_close(model.cost, line, rel=1e-6)


def test_what_tells_nothing_is_ignored():
    model = probed(CostModel(0.1, 0.01))
    before = model.state_dict()
    for row in [(0, 0, 1.0), (0, 1, 1.0), (5, 0, 1.0), (5, 1, 0.0), (5, 1, math.inf)]:
        model.observe(*row)
    model.observe(5, 1, math.nan)
    model.observe(5, 1, -1.0)
    assert model.state_dict() == before


@pytest.mark.parametrize("with_probe", [True, False])
@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("at", [3, 5, 10, 30])
def test_an_outlier_moves_nothing(with_probe, factor, at):
    line = CostModel(0.01, 0.004)
    rng = random.Random(at)
    model = probed(line) if with_probe else SpeedModel()
    for _ in range(at):
        model.observe(24, 3, line.seconds(24, 8) * rng.uniform(0.98, 1.02))
    before = model.cost.seconds(24, 8)
    model.observe(24, 3, line.seconds(24, 8) * factor)
    assert model.cost.seconds(24, 8) == pytest.approx(before, rel=0.03)
    for _ in range(5):
        model.observe(24, 3, line.seconds(24, 8) * rng.uniform(0.98, 1.02))
    assert model.cost.seconds(24, 8) == pytest.approx(line.seconds(24, 8), rel=0.03)


def test_a_slow_first_window_does_not_set_the_speed():
    line = CostModel(0.01, 0.004)
    model = probed(line)
    model.observe(24, 3, line.seconds(24, 8) * 10)
    assert_close(model.cost, line)


@pytest.mark.parametrize("factor", [4.0, 0.25, 1.5])
@pytest.mark.parametrize("before", [0, 2, 5, 15, 60])
def test_a_lasting_change_is_followed_within_five_windows(factor, before):
    line = CostModel(0.01, 0.004)
    rng = random.Random(before)
    model = probed(line)
    for _ in range(before):
        model.observe(24, 3, line.seconds(24, 8) * rng.uniform(0.97, 1.03))
    for _ in range(5):
        model.observe(24, 3, factor * line.seconds(24, 8) * rng.uniform(0.97, 1.03))
    assert model.cost.seconds(24, 8) == pytest.approx(factor * line.seconds(24, 8), rel=0.05)


def test_one_window_tells_that_a_probe_was_disturbed():
    line = CostModel(0.01, 0.004)
    model = probed(line.scaled(4.0))
    model.observe(24, 3, line.seconds(24, 8))
    assert_close(model.cost, line)


def test_a_probe_of_another_speed_has_no_vote():
    line = CostModel(0.01, 0.004)
    model = probed(line)
    for factor in (4.2, 3.9, 4.0):
        model.observe(24, 3, factor * line.seconds(24, 8))
    assert_close(model.cost, line.scaled(4.0))


def test_a_slow_drift_is_followed():
    line = CostModel(0.01, 0.004)
    model = probed(line)
    for window in range(200):
        model.observe(24, 3, line.seconds(24, 8) * (1.0 + 0.005 * window))
    assert model.cost.seconds(24, 8) == pytest.approx(line.seconds(24, 8) * 1.995, rel=0.05)


@pytest.mark.parametrize("with_probe", [True, False])
def test_fixed_cost_is_learnt_where_windows_show_it(with_probe):
    line, wrong = CostModel(0.03, 0.004), CostModel(0.015, 0.005)
    rng = random.Random(0)
    model = probed(wrong) if with_probe else SpeedModel()
    for window in range(60):
        share = (4, 9, 17, 24, 33)[window % 5]
        model.observe(share, num_micro_batches(share, 16), line.seconds(share, 16))
    assert model.cost.fixed_s == pytest.approx(0.03, rel=0.15)
    assert model.cost.per_sample_s == pytest.approx(0.004, rel=0.15)
    for window in range(60):
        share = (4, 9, 17, 24, 33)[window % 5]
        seconds = line.seconds(share, 16) * rng.uniform(0.95, 1.05)
        model.observe(share, num_micro_batches(share, 16), seconds)
    assert model.cost.seconds(40, 16) == pytest.approx(line.seconds(40, 16), rel=0.06)


def test_fixed_cost_stays_that_of_the_probe_where_windows_do_not_show_it():
    line = CostModel(0.03, 0.004)
    rng = random.Random(1)
    model = probed(line)
    for _ in range(60):
        model.observe(24, 3, line.seconds(24, 8) * rng.uniform(0.9, 1.1))
    assert model.cost.fixed_s == pytest.approx(0.03, rel=0.05)
    assert model.cost.per_sample_s == pytest.approx(0.004, rel=0.05)


@BOUNDED
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.floats(0, 1e3)), max_size=40),
    probe=st.booleans(),
)
def test_costs_stay_sensible_whatever_is_measured(rows, probe):
    model = probed(CostModel(0.01, 0.004)) if probe else SpeedModel()
    for row in rows:
        model.observe(*row)
    if model.is_known:
        assert 0.0 <= model.cost.fixed_s < math.inf
        assert 0.0 < model.cost.per_sample_s < math.inf


# ── state ────────────────────────────────────────────────────────────────────────────────────────


@BOUNDED
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 9), st.floats(1e-3, 1e3)), max_size=40
    ),
    start=st.sampled_from(["probe", "hint", "nothing"]),
)
def test_state_round_trip_goes_on_alike(rows, start):
    model = SpeedModel()
    if start == "probe":
        model = probed(CostModel(0.01, 0.004))
    elif start == "hint":
        model.hint(0.5)
    half = len(rows) // 2
    for row in rows[:half]:
        model.observe(*row)
    resumed = SpeedModel()
    resumed.load_state_dict(json.loads(json.dumps(model.state_dict())))
    for row in rows[half:]:
        model.observe(*row)
        resumed.observe(*row)
    assert resumed.state_dict() == model.state_dict()
    assert resumed.is_known == model.is_known
    assert resumed.is_measured == model.is_measured
    if model.is_known:
        assert resumed.cost == model.cost


@pytest.mark.parametrize(
    "changes",
    [
        {"prior": [1.0]},
        {"prior": [-1.0, 1.0]},
        {"prior": [0.0, 0.0]},
        {"recent": [[1, 1]]},
        {"recent": [[1, 1, -2.0]]},
        {"recent": None},
        {"votes": "many"},
    ],
)
def test_damaged_state_is_refused(changes):
    model = probed(CostModel(0.01, 0.004))
    before = model.state_dict()
    with pytest.raises(CheckpointError, match="damaged"):
        model.load_state_dict({**before, **changes})
    assert model.state_dict() == before
    with pytest.raises(CheckpointError, match="damaged"):
        model.load_state_dict({})
