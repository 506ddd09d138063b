"""When ranks drift apart: nothing, hold the anchor, bring it down."""

import pytest

from evener.errors import ConfigError
from evener.planning.guard import LevelGuard, NoGuard, Verdict, make_guard

STABLE, HOLD, DOWN = Verdict.STABLE, Verdict.SUPPRESS_GROWTH, Verdict.NUDGE_DOWN


@pytest.mark.parametrize(
    ("divergences", "verdicts"),
    [
        ([0.02, 0.04, 0.06], [STABLE, STABLE, HOLD]),
        ([0.01, 0.02, 0.03, 0.04], [STABLE] * 4),  # rises, below the threshold
        ([0.06, 0.07, 0.06, 0.07, 0.07], [STABLE] * 5),  # above it, two rising values at most
        ([0.06, 0.07, 0.08, 0.09, 0.08, 0.09], [STABLE, STABLE, HOLD, DOWN, STABLE, STABLE]),
    ],
)
def test_the_third_rising_value_above_the_threshold(divergences, verdicts):
    """The anchor comes down only where a factor was given."""
    guard, with_factor = LevelGuard(0.05), LevelGuard(0.05, factor=0.7)
    held = [HOLD if verdict is DOWN else verdict for verdict in verdicts]
    assert [guard.report(d) for d in divergences] == held
    lowered = [(DOWN, 0.7) if verdict is DOWN else verdict for verdict in verdicts]
    assert [with_factor.report(d) for d in divergences] == lowered


def test_ranks_that_are_far_apart_average_more_often_until_they_are_near():
    """Whether the divergence rises or falls."""
    divergences = [0.7, 0.6, 0.4, 0.1, 0.05, 0.06, 0.51]
    for factor, down in ((None, (DOWN, 0.5)), (0.7, (DOWN, 0.7))):
        guard = LevelGuard(0.05, factor)
        found = [guard.report(divergence) for divergence in divergences]
        assert found == [down, down, HOLD, HOLD, STABLE, STABLE, down]


def test_guards_by_name():
    for off in ("none", None, False):
        assert isinstance(make_guard(off, 0.05), NoGuard)
    assert isinstance(make_guard("level", 0.05), LevelGuard)
    with pytest.raises(ConfigError, match="choose one of none, level"):
        make_guard("trend", 0.05)
