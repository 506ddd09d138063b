"""What a plan promises: every position once, and sums that add up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ProtocolError
from evener.planning.plan import WindowPlan

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


def test_a_notebook_shows_who_does_what():
    shown = WindowPlan(7, 3, 10, 4, (3, 1, 0))._repr_html_()
    assert "window 7: 4 samples of epoch 3" in shown
    assert "<tr><td>0</td><td>3</td><td>75.0%</td><td>[10, 13)</td></tr>" in shown
    assert "<tr><td>2</td><td>0</td><td>0.0%</td><td>[14, 14)</td></tr>" in shown
    assert "<td>0.0%</td>" in WindowPlan(0, 0, 0, 0, (0,))._repr_html_()
