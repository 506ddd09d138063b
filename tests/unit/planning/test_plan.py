"""What a plan promises: every position once, and sums that add up."""

from hypothesis import given
from hypothesis import strategies as st

from evener.planning.plans import WindowPlan

SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple)


def plan_of(shares: tuple[int, ...], *, start: int = 0, window: int = 0) -> WindowPlan:
    return WindowPlan(window, 3, start, sum(shares), shares)


@given(shares=SHARES, start=st.integers(0, 10**12))
def test_positions_partition_the_window(shares, start):
    plan = plan_of(shares, start=start)
    seen = []
    for rank, share in enumerate(shares):
        assert len(plan.positions(rank)) == share
        seen += plan.positions(rank)
    assert seen == list(range(start, start + plan.size))
    assert plan.stop == start + plan.size
